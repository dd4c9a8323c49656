"""Which builds of the Neuron stack this agent can start, by the plugin's version. A new one is a new entry.

It reads names and versions of installed distributions, and imports none of them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

PLUGIN = "vllm-neuron"
Installed = Callable[[str], str | None]


class NoTarget(Exception):
    """This environment is no Neuron stack that the agent knows; the text says what it has and what would do."""


@dataclass(frozen=True)
class NeuronTarget:
    """One build of the stack.

    `distributions` maps what must be installed to how its version begins. `server` is the module that is vLLM's API
    server, `framework` what selects the plugin's backend (None where it has one only), `server_argv` options that
    this vLLM needs beside the plan's.
    """

    name: str
    sdk: str
    distributions: Mapping[str, str]
    server: str
    framework: str | None
    server_argv: tuple[str, ...] = ()


NXDI_2_29 = NeuronTarget(
    name="nxdi-2.29",
    sdk="2.29",
    distributions={PLUGIN: "0.5.", "vllm": "0.16.", "neuronx-distributed-inference": ""},
    server="vllm.entrypoints.openai.api_server",
    framework="neuronx-distributed-inference",
)
"""https://awsdocs-neuron.readthedocs-hosted.com/en/latest/libraries/nxd-inference/developer_guides/vllm-user-guide-v1.html"""

TARGETS = (NXDI_2_29,)


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
                wanted = f"{beginning}*" if beginning else "any version"
                raise NoTarget(f"{name} is {version or 'not installed'}; {PLUGIN} {plugin} needs {wanted}")
        return target
    raise NoTarget(f"{PLUGIN} is {plugin}; this agent starts {_known()}")


def _known() -> str:
    return ", ".join(f"{PLUGIN} {target.distributions[PLUGIN]}* (Neuron SDK {target.sdk})" for target in TARGETS)
