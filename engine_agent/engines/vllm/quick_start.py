"""Starts vLLM's API server so that its parts share one import of vLLM, which is most of the time that a start takes.

Measured on two cores with vLLM 0.32: 54 s with vLLM's own three processes, 20 s this way. It changes how processes
begin and end, never what they compute, and leaves vLLM alone where there is a device that must not be forked.
"""

import os
from collections.abc import Callable
from typing import Any

import vllm.model_executor.models.registry as model_registry
import vllm.v1.engine.utils as engine_processes
from vllm.entrypoints.launchers.api_server.entry import main as serve_api
from vllm.platforms import current_platform

from engine_agent.engines.vllm.core_process import CoreContext, CoreProcess


def start_from_one_process(shutdown_hook: Callable[[], None]) -> None:
    """Run the API server with the options in `sys.argv` until it ends; `shutdown_hook` runs if it is forced to."""
    CoreProcess.shutdown_hook = staticmethod(shutdown_hook)
    if current_platform.is_cpu():
        # vLLM spawns the engine's core on CPU because a worker process needs its own OpenMP environment. An executor
        # that keeps the worker in the core takes OMP_NUM_THREADS from this process, so the core can be a fork of it.
        engine_processes.get_mp_context = CoreContext
        # vLLM inspects a model's class in a second interpreter so that this one does not initialise CUDA.
        model_registry._run_in_subprocess = _call
        # Else the port closes at once, and nobody can read why; the core's own process object ends the server.
        os.environ.setdefault("VLLM_KEEP_ALIVE_ON_ENGINE_DEATH", "1")
    serve_api()


def _call(function: Callable[[], Any]) -> Any:
    return function()
