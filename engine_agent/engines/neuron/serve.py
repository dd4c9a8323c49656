"""Starts vLLM with the Neuron plugin on one node of a cell, in the engine's own Python.

All but three things are as in `engine_agent.engines.vllm.serve`, whose options and exit statuses it has: the stack must
be a known one, what it writes to and reads back must be there and whole, and vLLM's server is run as that stack has it.
Until the stack is known it imports nothing of it.
"""

import json
import os
import runpy
import shutil
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from engine_agent.engines.neuron.target import (
    Installed,
    NoTarget,
    check_plan_is_for,
    installed_target,
    installed_version,
)
from engine_agent.engines.plan_artifacts import json_option
from engine_agent.engines.vllm import serve
from engine_agent.protocol.neuron_targets import NeuronTarget

FRAMEWORK_VARIABLE = "VLLM_NEURON_FRAMEWORK"
COMPILED_VARIABLE = "NEURON_COMPILED_ARTIFACTS"
_HEADER_LENGTH_BYTES = 8
"""https://huggingface.co/docs/safetensors: the header's length as a little-endian number, the header, the tensors."""


def main(argv: Sequence[str], installed: Installed = installed_version) -> int:
    """Serve, or follow; returns the exit status."""
    try:
        target = installed_target(installed)
        check_plan_is_for(target, argv)
    except NoTarget as error:
        sys.stderr.write(f"no Neuron stack in {sys.executable}: {error}\n")
        return serve.EXIT_NO_VLLM
    os.environ.update(target_environment(target, os.environ))
    try:
        prepare_compiled(os.environ.get(COMPILED_VARIABLE, ""))
        prepare_quantized(argv)
    except OSError as error:
        sys.stderr.write(f"cannot prepare what NxDI writes: {error}\n")
        return 1
    return serve.main(argv, serve.Server(target.server_argv, partial(run_server, target)))


def target_environment(target: NeuronTarget, given: Mapping[str, str]) -> dict[str, str]:
    """Variables that select the target's backend, apart from those that are `given` already."""
    if target.framework is None or FRAMEWORK_VARIABLE in given:
        return {}
    return {FRAMEWORK_VARIABLE: target.framework}


def prepare_compiled(compiled: str) -> None:
    """Make place for the compiled model, and take one away that a start was killed in the middle of writing.

    The plugin loads whatever lies there, and compiles where nothing does; but a file cut short ends every start. It is
    looked for in the files themselves: a mark that the start had not ended would also throw away, after an hour of
    compiling, what a start that failed later had written whole.

    Raises:
        OSError: the disk refuses.
    """
    if not compiled.startswith("/"):
        return
    folder = Path(compiled)
    folder.parent.mkdir(parents=True, exist_ok=True)  # the folder itself is the compiler's to make
    cut_short = [path for path in folder.rglob("*") if path.is_file() and not is_whole(path)]
    if cut_short:
        sys.stderr.write(f"{cut_short[0]} was not written to its end: compiling again\n")
        shutil.rmtree(folder)


def is_whole(path: Path) -> bool:
    """Whether a file has the end that its kind says: of PyTorch's (`model.pt`) the archive's directory, of safetensors
    as many bytes as its header counts. Other kinds are taken as they are."""
    if path.suffix == ".pt":
        return zipfile.is_zipfile(path)
    if path.suffix != ".safetensors":
        return True
    with path.open("rb") as tensors:
        header_bytes = int.from_bytes(tensors.read(_HEADER_LENGTH_BYTES), "little")
        if header_bytes > path.stat().st_size:
            return False
        try:
            header = json.loads(tensors.read(header_bytes))
            ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
        except (ValueError, LookupError, TypeError, AttributeError):
            return False
    return path.stat().st_size == _HEADER_LENGTH_BYTES + header_bytes + max(ends, default=0)


def prepare_quantized(argv: Sequence[str]) -> None:
    """Make the folder in which NxDI writes the file of quantized weights, which it does not make itself.

    Raises:
        OSError: it cannot be made.
    """
    override = json_option(argv, "--additional-config").get("override_neuron_config", {})
    if path := override.get("quantized_checkpoints_path"):
        Path(path).parent.mkdir(parents=True, exist_ok=True)


def run_server(target: NeuronTarget, argv: Sequence[str], last_act: Callable[[], None]) -> None:
    """Be the target's API server until it ends, then do the last act."""
    sys.argv = [target.server, *argv]
    try:
        runpy.run_module(target.server, run_name="__main__", alter_sys=True)
    finally:
        last_act()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
