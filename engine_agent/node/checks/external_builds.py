"""Engine builds that a machine's image provides: the virtual environments of AWS's Neuron image. A version names one by
the release of the SDK (`external://neuron-2.29`); the node looks for it and checks its packages before each start, as
doctor does. Reads files only."""

from collections.abc import Sequence
from pathlib import Path

from engine_agent.engines.base import EngineUnavailable
from engine_agent.engines.registry import installed_python
from engine_agent.node.checks.node_facts import distributions_of
from engine_agent.protocol.engine_builds import EngineBuild, external_target
from engine_agent.protocol.neuron_targets import PLUGIN, TARGET_BY_NAME, NeuronTarget, NoTarget, installed_target

OF_IMAGE = "opt/aws_neuronx_venv_*/bin/python"
"""https://awsdocs-neuron.readthedocs-hosted.com/en/latest/dlami/index.html"""
PYTHON_LEAST = (3, 11)
"""The environment also runs the agent's code of the engine."""
NAMED_MOST = 4


def environments(cache: Path, root: Path = Path("/")) -> list[Path]:
    """Interpreters of the Neuron environments of this machine: that of the cache, then those of the image."""
    own = installed_python("neuron", cache)
    return [*([own] if own is not None else []), *sorted(root.glob(OF_IMAGE))]


def external_program(build: EngineBuild, pythons: Sequence[Path]) -> Path:
    """Returns the interpreter that is this build. Raises EngineUnavailable if there is none; the text says what each
    environment is instead."""
    target = external_target(build.uri)
    others = []
    for python in pythons:
        if not (why := _why_other(python, target)):
            return python
        others.append(f"{python.parent.parent} {why}")
    there = "; ".join(others[:NAMED_MOST]) or "there is no /opt/aws_neuronx_venv_*"
    raise EngineUnavailable(f"build {build.name} is {target}, and this machine's image has none: {there}")


def neuron_environment(cache: Path, target: str = "", root: Path = Path("/")) -> Path | None:
    """The Neuron environment that doctor examines: one of this target, or of any; else one with the plugin, or any."""
    wanted = [TARGET_BY_NAME[target]] if target else list(TARGET_BY_NAME.values())
    found = environments(cache, root)
    fitting = [python for python in found if any(not _why_other(python, each) for each in wanted)]
    with_plugin = [python for python in found if PLUGIN in distributions_of(python)]
    return next(iter((*fitting, *with_plugin, *found)), None)


def _why_other(python: Path, target: NeuronTarget) -> str:
    installed = distributions_of(python)
    if PLUGIN not in installed:
        return f"has no {PLUGIN}"
    try:
        found = installed_target(installed.get)
    except NoTarget as error:
        return f"is none: {error}"
    if found is not target:
        return f"is {found.name}"
    version = _python_version(python)
    least = ".".join(map(str, PYTHON_LEAST))
    return "" if version >= PYTHON_LEAST else f"has Python {'.'.join(map(str, version))}; {least} is needed"


def _python_version(python: Path) -> tuple[int, ...]:
    """By the name of its library's folder; empty if there is none."""
    names = [path.name.removeprefix("python") for path in python.parent.parent.glob("lib/python3.*")]
    return max((tuple(map(int, name.split("."))) for name in names if name.replace(".", "").isdecimal()), default=())
