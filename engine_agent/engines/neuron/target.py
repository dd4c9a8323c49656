"""Which build of the Neuron stack this Python has, and whether a plan was rendered for it.

It reads names and versions of installed distributions, and imports none of them.
"""

from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version

from engine_agent.engines.plan_artifacts import json_option
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
