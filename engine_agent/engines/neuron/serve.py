"""Starts vLLM with the Neuron plugin on one node of a cell, in the engine's Python.

Options and exit statuses are those of `engine_agent.engines.vllm.serve`, with three differences: the Neuron stack must
be a known build, for which the plan was rendered; folders that NxDI writes to must exist and be whole; and that build's
server is run. It imports nothing of the stack before it is checked.
"""

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
from engine_agent.protocol.neuron_targets import PLUGIN, SETTINGS, TARGETS, NeuronTarget

Installed = Callable[[str], str | None]


class NoTarget(Exception):
    """This environment is no Neuron stack that the agent knows, or none that the plan is for; the text says what it has
    and what would do."""


def installed_version(distribution: str) -> str | None:
    """Version of a distribution in this Python; None where it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def installed_target(installed: Installed = installed_version) -> NeuronTarget:
    """The target that this Python has installed.

    Raises:
        NoTarget: none, or one with parts of other versions.
    """
    plugin = installed(PLUGIN)
    if plugin is None:
        raise NoTarget(f"{PLUGIN} is not installed; install one of {_known()}")
    for target in TARGETS:
        if not plugin.startswith(target.distributions[PLUGIN]):
            continue
        for name, beginning in target.distributions.items():
            version = installed(name)
            if version is None or not version.startswith(beginning):
                raise NoTarget(f"{name} is {version or 'not installed'}; {PLUGIN} {plugin} needs {beginning}*")
        return target
    raise NoTarget(f"{PLUGIN} is {plugin}; this agent starts {_known()}")


def check_plan_is_for(target: NeuronTarget, args: Sequence[str]) -> None:
    """Check that the plan's settings are those of this build: another one would read none of them, without a word.

    Raises:
        NoTarget: they are for another.
    """
    stated = [name for name in SETTINGS if name in json_option(args, "--additional-config")]
    if stated and target.settings not in stated:
        fitting = ", ".join(other.name for other in TARGETS if other.settings in stated)
        raise NoTarget(
            f"this is {target.name}, which reads {target.settings}, and the plan states {', '.join(stated)}: install "
            f"what it was rendered for ({fitting}), or state engine_options.neuron_target {target.name} in its version"
        )


def _known() -> str:
    return ", ".join(map(str, TARGETS))


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
