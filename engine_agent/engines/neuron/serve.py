"""Starts vLLM with the Neuron plugin on one node of a cell, in the engine's Python. Options and exit statuses are those
of `engine_agent.engines.vllm.serve`, with three differences: the Neuron stack must be a known build, for which the plan
was rendered; folders that NxDI writes to must exist and be whole; and that build's server is run. It imports nothing of
the stack before it is checked."""

import json
import os
import runpy
import shutil
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from engine_agent.engines.base import json_option
from engine_agent.engines.vllm import serve
from engine_agent.protocol.neuron_targets import SETTINGS, TARGETS, Installed, NeuronTarget, NoTarget, installed_target


def installed_version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def check_plan_is_for(target: NeuronTarget, args: Sequence[str]) -> None:
    """Checks that the plan's settings are those of this build: another build would silently ignore them. Raises
    NoTarget if they are for another build."""
    stated = [name for name in SETTINGS if name in json_option(args, "--additional-config")]
    if stated and target.settings not in stated:
        fitting = ", ".join(other.name for other in TARGETS if other.settings in stated)
        raise NoTarget(
            f"this is {target.name}, which reads {target.settings}, and the plan states {', '.join(stated)}: install "
            f"what it was rendered for ({fitting}), or state engine_options.neuron_target {target.name} in its version"
        )


FRAMEWORK_VARIABLE = "VLLM_NEURON_FRAMEWORK"
COMPILED_VARIABLE = "NEURON_COMPILED_ARTIFACTS"
_HEADER_LENGTH_BYTES = 8
"""https://huggingface.co/docs/safetensors: the header's length as a little-endian number, the header, the tensors."""


def main(argv: Sequence[str], installed: Installed = installed_version) -> int:
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
        sys.stderr.write(f"cannot prepare NxDI's folders: {error}\n")
        return 1
    return serve.main(argv, serve.Server(target.server_argv, partial(run_server, target)))


def target_environment(target: NeuronTarget, given: Mapping[str, str]) -> dict[str, str]:
    """Returns variables that select the target's backend, except those already `given`."""
    if target.framework is None or FRAMEWORK_VARIABLE in given:
        return {}
    return {FRAMEWORK_VARIABLE: target.framework}


def prepare_compiled(compiled: str) -> None:
    """Creates the parent of the compiled model's folder, and deletes a model whose compilation was interrupted.

    The plugin loads any content of the folder, and a truncated file fails every start. The files themselves are
    checked: a marker for unfinished starts would also discard, after an hour of compilation, the complete output of a
    start that failed later. Raises OSError if the disk refuses."""
    if not compiled.startswith("/"):
        return
    folder = Path(compiled)
    folder.parent.mkdir(parents=True, exist_ok=True)  # the compiler creates the folder itself
    cut_short = [path for path in folder.rglob("*") if path.is_file() and not is_whole(path)]
    if cut_short:
        sys.stderr.write(f"{cut_short[0]} is truncated: compiling again\n")
        shutil.rmtree(folder)


def is_whole(path: Path) -> bool:
    """Whether a file is complete: PyTorch's (`model.pt`) have the archive's directory, safetensors have as many bytes
    as the header states. Other kinds are not checked."""
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
    """Creates the folder for the file of quantized weights, which NxDI does not create. Raises OSError if it cannot be
    created."""
    override = json_option(argv, "--additional-config").get("override_neuron_config", {})
    if path := override.get("quantized_checkpoints_path"):
        Path(path).parent.mkdir(parents=True, exist_ok=True)


def run_server(target: NeuronTarget, argv: Sequence[str], last_act: Callable[[], None]) -> None:
    """Runs the target's API server until it exits, then calls `last_act`."""
    sys.argv = [target.server, *argv]
    try:
        runpy.run_module(target.server, run_name="__main__", alter_sys=True)
    finally:
        last_act()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
