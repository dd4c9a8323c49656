"""Starts vLLM's API server with its engine core as a fork: they share one import of vLLM, which takes most of a start,
and each exits with the other.

Measured on two cores with vLLM 0.32: 54 s with vLLM's three processes, 20 s with a fork. vLLM's own supervision does
not suffice: a core can survive a killed server, and a stopping server can wait forever for streams that its dead core
will never finish. It leaves vLLM unchanged on devices that must not be forked. vLLM is imported only to start it."""

import ctypes
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from multiprocessing.connection import wait
from multiprocessing.context import ForkContext, ForkProcess
from threading import Thread
from typing import Any

EXIT_CORE_ENDED = 70
"""EX_SOFTWARE of <sysexits.h>."""
SERVER_GRACE_S = 2.0
"""How long a server may report the end of the core to its clients; measured: 0.1 s."""
PR_SET_PDEATHSIG = 1
"""From <linux/prctl.h>."""


def exit_with_parent(parent_pid: int) -> None:
    """Has this process killed when its parent exits, or the thread of the parent that started it."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(EXIT_CORE_ENDED)


class CoreProcess(ForkProcess):
    """A fork that is killed when its parent exits; the parent outlives it only briefly."""

    shutdown_hook: Callable[[], None] = staticmethod(lambda: None)
    """Called by a parent before it exits with its child."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._server_pid = os.getpid()

    def start(self) -> None:
        super().start()
        Thread(target=self._end_after_child, name="core-watch", daemon=True).start()

    def run(self) -> None:
        exit_with_parent(self._server_pid)
        super().run()

    def _end_after_child(self) -> None:
        wait([self.sentinel])
        time.sleep(SERVER_GRACE_S)
        try:
            sys.stderr.write(f"{self.name} exited {SERVER_GRACE_S:.0f} s ago: the server exits\n")
            self.shutdown_hook()
        finally:
            os._exit(EXIT_CORE_ENDED)


class CoreContext(ForkContext):
    """A multiprocessing context with `CoreProcess`es."""

    Process = CoreProcess


def one_process_server(shutdown_hook: Callable[[], None]) -> Callable[[], None]:
    """Returns vLLM's API server, which reads its options from `sys.argv`; `shutdown_hook` runs if it is forced to exit.
    Raises ImportError if this Python has no working vLLM."""
    import vllm.model_executor.models.registry as model_registry
    import vllm.v1.engine.utils as engine_processes
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    _let_named_executors_have_stages(EngineArgs)
    CoreProcess.shutdown_hook = staticmethod(shutdown_hook)
    if current_platform.is_cpu():
        # vLLM spawns the engine's core on CPU because a worker process needs its own OpenMP environment. An executor
        # that keeps the worker in the core takes OMP_NUM_THREADS from this process, so the core can be a fork of it.
        engine_processes.get_mp_context = CoreContext
        # vLLM inspects a model's class in a second interpreter so that this one does not initialise CUDA.
        model_registry._run_in_subprocess = _call
        # Otherwise the port closes before clients can read the reason; `CoreProcess` stops the server.
        os.environ.setdefault("VLLM_KEEP_ALIVE_ON_ENGINE_DEATH", "1")
    return api_server()


OLDER_SERVER = "vllm.entrypoints.openai.api_server"
"""A program, seen in 0.13 to 0.25. 0.32 has a function elsewhere."""


def api_server() -> Callable[[], None]:
    """Returns the API server of the installed vLLM."""
    if find_spec("vllm.entrypoints.launchers") is None:
        return partial(_run_program, OLDER_SERVER)
    from vllm.entrypoints.launchers.api_server.entry import main

    server: Callable[[], None] = main
    return server


def _run_program(module: str) -> None:
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _let_named_executors_have_stages(arguments: type[Any]) -> None:
    """Resolves the executor of engines with pipeline stages, which vLLM supports for a class and refuses for a name."""
    check = arguments.__post_init__

    def resolve(given: Any) -> None:
        check(given)
        executor = given.distributed_executor_backend
        if given.pipeline_parallel_size > 1 and isinstance(executor, str) and "." in executor:
            from vllm.utils.import_utils import resolve_obj_by_qualname

            given.distributed_executor_backend = resolve_obj_by_qualname(executor)

    arguments.__post_init__ = resolve


def _call(function: Callable[[], Any]) -> Any:
    return function()
