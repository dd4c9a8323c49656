"""Supported builds of the Neuron stack: their packages, machines, settings and limits. The control plane renders
versions for them, and agents detect which one is installed. Add a new build here."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

PLUGIN = "vllm-neuron"
NXDI_SETTINGS = "override_neuron_config"
NATIVE_SETTINGS = "neuron_config"
SETTINGS = (NATIVE_SETTINGS, NXDI_SETTINGS)
"""Keys of `--additional-config` under which builds read their settings."""
_API_SERVER = "vllm.entrypoints.openai.api_server"
_NXDI = "neuronx-distributed-inference"


@dataclass(frozen=True, slots=True)
class NeuronTarget:
    """One build of the stack.

    `accelerators` are those that AWS supports, as instance types name them. `distributions` maps required packages to
    the prefix of their version. `settings` is the key of `--additional-config` that it reads. `server` is the module of
    vLLM's API server, `framework` selects the plugin's backend (None: there is only one), `server_argv` are options
    that this vLLM needs in addition to the plan's. `speculation` are its methods; `most_nodes` is the largest cell, 0:
    any."""

    name: str
    sdk: str
    accelerators: tuple[str, ...]
    distributions: Mapping[str, str]
    settings: str
    speculation: tuple[str, ...]
    server: str = _API_SERVER
    framework: str | None = None
    server_argv: tuple[str, ...] = ()
    most_nodes: int = 0

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {beginning}*" for name, beginning in self.distributions.items())
        return f"{self.name} (Neuron SDK {self.sdk}: {parts}; for {', '.join(self.accelerators)})"


NXDI_2_28 = NeuronTarget(
    name="nxdi-2.28",
    sdk="2.28",
    accelerators=("trainium", "inferentia2", "trainium2"),
    distributions={PLUGIN: "0.4.", "vllm": "0.13.", _NXDI: "0.8."},
    settings=NXDI_SETTINGS,
    speculation=("eagle", "eagle3"),
    framework=_NXDI,
)
"""The last one whose kernels run on Trn1 and Inf2: breaking changes of NxDI in SDK 2.29,
https://awsdocs-neuron.readthedocs-hosted.com/en/v2.29.0/release-notes/components/nxd-inference.html"""

NXDI_2_29 = NeuronTarget(
    name="nxdi-2.29",
    sdk="2.29",
    accelerators=("trainium2",),
    distributions={PLUGIN: "0.5.", "vllm": "0.16.", _NXDI: "0.9."},
    settings=NXDI_SETTINGS,
    speculation=("eagle", "eagle3"),
    framework=_NXDI,
)
"""https://awsdocs-neuron.readthedocs-hosted.com/en/latest/libraries/nxd-inference/developer_guides/vllm-user-guide-v1.html"""

NATIVE_0_24 = NeuronTarget(
    name="native-0.24",
    sdk="2.32",
    accelerators=("trainium2",),
    distributions={PLUGIN: "0.24.", "vllm": "0.24."},
    settings=NATIVE_SETTINGS,
    speculation=("eagle3",),
    most_nodes=1,
)
"""The plugin without NxDI (beta). Its platform replaces any other executor by "mp", so a cell has one node:
https://awsdocs-neuron.readthedocs-hosted.com/en/v2.32.0/vllm-neuron/docs/guides/reference-configuration.html"""

TARGETS = (NXDI_2_28, NXDI_2_29, NATIVE_0_24)
TARGET_BY_NAME: Mapping[str, NeuronTarget] = {target.name: target for target in TARGETS}
DEFAULT_TARGET: Mapping[str, NeuronTarget] = {
    "trainium": NXDI_2_28,
    "inferentia2": NXDI_2_28,
    "trainium2": NXDI_2_29,
}
"""By accelerator, the target of versions that name none."""

NATIVE_KEYS = frozenset(
    {
        *("apply_prefill_dcp", "attention_dp_size", "decode_context_length_buckets", "embedding_dp_size"),
        *("enable_structured_outputs", "ep_degree", "fp8_packed_kv", "kv_segment_size_buckets", "lm_head_dp_size"),
        *("mlp_dp_size", "num_batched_tokens_buckets", "num_seqs_buckets", "on_device_sampling_config"),
        *("quantization",),
    }
)
"""Keys of the native plugin's NeuronConfig. Not those that write files (`debug_logits_dir`, `tensor_capture`) or
unpickle one (`tensor_replacement`), nor names that newer ones replace (`prefill_sequence_buckets`,
`decode_batch_buckets`): https://github.com/vllm-project/vllm-neuron, vllm_neuron/model/neuron_config.py."""


Installed = Callable[[str], str | None]
"""Name of a distribution -> its version."""


class NoTarget(Exception):
    """This environment is not a known Neuron stack, or not the one that the plan is for; the text states the cause and
    the remedy."""


def installed_target(installed: Installed) -> NeuronTarget:
    """Returns the target that is installed, by the versions of distributions. Raises NoTarget if there is none, or some
    of its parts have other versions."""
    plugin = installed(PLUGIN)
    if plugin is None:
        raise NoTarget(f"{PLUGIN} is not installed; install one of {_target_names()}")
    for target in TARGETS:
        if not plugin.startswith(target.distributions[PLUGIN]):
            continue
        for name, beginning in target.distributions.items():
            version = installed(name)
            if version is None or not version.startswith(beginning):
                raise NoTarget(f"{name} is {version or 'not installed'}; {PLUGIN} {plugin} needs {beginning}*")
        return target
    raise NoTarget(f"{PLUGIN} is {plugin}; this agent starts {_target_names()}")


def _target_names() -> str:
    return ", ".join(map(str, TARGETS))
