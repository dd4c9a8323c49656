"""Starts vLLM with the Neuron plugin on one node of a cell, in the engine's own Python.

All but two things are as in `engine_agent.engines.vllm.serve`, whose options and exit statuses it has: the stack must
be a known one, and vLLM's server is run as that stack has it. Until the stack is known it imports nothing of it.
"""

import os
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from engine_agent.engines.neuron.target import Installed, NeuronTarget, NoTarget, installed_target, installed_version
from engine_agent.engines.vllm import serve

FRAMEWORK_VARIABLE = "VLLM_NEURON_FRAMEWORK"
COMPILED_VARIABLE = "NEURON_COMPILED_ARTIFACTS"


def main(argv: Sequence[str], installed: Installed = installed_version) -> int:
    """Serve, or follow; returns the exit status."""
    try:
        target = installed_target(installed)
    except NoTarget as error:
        sys.stderr.write(f"no Neuron stack in {sys.executable}: {error}\n")
        return serve.EXIT_NO_VLLM
    os.environ.update(target_environment(target, os.environ))
    compiled = os.environ.get(COMPILED_VARIABLE, "")
    if compiled.startswith("/"):
        Path(compiled).parent.mkdir(parents=True, exist_ok=True)  # the folder itself is the compiler's to make
    return serve.main(argv, serve.Server(target.server_argv, partial(run_server, target)))


def target_environment(target: NeuronTarget, given: Mapping[str, str]) -> dict[str, str]:
    """Variables that select the target's backend, apart from those that are `given` already."""
    if target.framework is None or FRAMEWORK_VARIABLE in given:
        return {}
    return {FRAMEWORK_VARIABLE: target.framework}


def run_server(target: NeuronTarget, argv: Sequence[str], last_act: Callable[[], None]) -> None:
    """Be the target's API server until it ends, then do the last act."""
    sys.argv = [target.server, *argv]
    try:
        runpy.run_module(target.server, run_name="__main__", alter_sys=True)
    finally:
        last_act()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
