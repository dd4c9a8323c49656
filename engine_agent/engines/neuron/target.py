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

    `devices` is what AWS supports it on. `distributions` maps what must be installed to how its version begins.
    `server` is the module that is vLLM's API server, `framework` what selects the plugin's backend (None where it has
    one only), `server_argv` options that this vLLM needs beside the plan's.
    """

    name: str
    sdk: str
    devices: str
    distributions: Mapping[str, str]
    server: str
    framework: str | None
    server_argv: tuple[str, ...] = ()


NXDI_2_28 = NeuronTarget(
    name="nxdi-2.28",
    sdk="2.28",
    devices="Trn1, Inf2 and Trn2",
    distributions={PLUGIN: "0.4.", "vllm": "0.13.", "neuronx-distributed-inference": "0.8."},
    server="vllm.entrypoints.openai.api_server",
    framework="neuronx-distributed-inference",
)
"""The last whose kernels run on Trn1 and Inf2: breaking changes of NxDI in SDK 2.29,
https://awsdocs-neuron.readthedocs-hosted.com/en/v2.29.0/release-notes/components/nxd-inference.html"""

NXDI_2_29 = NeuronTarget(
    name="nxdi-2.29",
    sdk="2.29",
    devices="Trn2",
    distributions={PLUGIN: "0.5.", "vllm": "0.16.", "neuronx-distributed-inference": "0.9."},
    server="vllm.entrypoints.openai.api_server",
    framework="neuronx-distributed-inference",
)
"""https://awsdocs-neuron.readthedocs-hosted.com/en/latest/libraries/nxd-inference/developer_guides/vllm-user-guide-v1.html"""

TARGETS = (NXDI_2_28, NXDI_2_29)

OTHER_PLUGINS: Mapping[str, str] = {
    "0.24.": "it takes its settings as neuron_config and replaces the executor of a cell of several nodes by its own",
}
"""Plugins that share the name and nothing else, by how their version begins: why none of them is started."""


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
    why = next((f" ({text})" for beginning, text in OTHER_PLUGINS.items() if plugin.startswith(beginning)), "")
    raise NoTarget(f"{PLUGIN} is {plugin}{why}; this agent starts {_known()}")


def _known() -> str:
    return ", ".join(
        f"{PLUGIN} {target.distributions[PLUGIN]}* (Neuron SDK {target.sdk}, for {target.devices})"
        for target in TARGETS
    )
