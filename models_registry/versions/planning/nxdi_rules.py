"""Rules between keys of NxDI's NeuronConfig, and which build of the Neuron stack fits a machine: each violation would
otherwise be an exception on every node after machines were started. Rules are from
`src/neuronx_distributed_inference/models/config.py` of https://github.com/aws-neuron/neuronx-distributed-inference,
equal in 0.8.0 and 0.9.0; `bench/models/neuron_configurations.py` compares them with the classes. Pure."""

from collections.abc import Callable, Mapping
from typing import Any

from engine_agent.protocol.neuron_targets import DEFAULT_TARGET, TARGET_BY_NAME, TARGETS, NeuronTarget
from models_registry.instance_types.planner import InstanceShape
from models_registry.versions.planning.machines import Degrees
from models_registry.versions.planning.spec import InvalidVersion, VersionSpec, one_of

Rendered = Mapping[str, Any]
Holds = Callable[[Rendered], Any]
CAST_TYPES = ("config", "as-declared")
ACTIVATIONS = ("dynamic", "static")
QKV_KERNELS = ("qkv_kernel_enabled", "qkv_nki_kernel_enabled")
ATTENTION_KERNELS = (
    "attn_block_tkg_nki_kernel_enabled", "attn_tkg_nki_kernel_enabled", "attn_tkg_builtin_kernel_enabled",
)  # fmt: skip
"""Each of the last two enables the first."""


def broken_rule(rendered: Rendered) -> str:
    """The first rule that a rendered configuration breaks, as `KEY is VALUE; it …`; empty if none."""
    for key, rule, is_broken in _RULES:
        if rendered.get(key) and is_broken(rendered):
            return f"{key} is {rendered[key]!r}; {rule}"
    return ""


def _is_any_set(rendered: Rendered, *keys: str) -> bool:
    return any(rendered.get(key) for key in keys)


def _without(*keys: str) -> Holds:
    return lambda rendered: not _is_any_set(rendered, *keys)


def _any_of(*keys: str) -> Holds:
    return lambda rendered: _is_any_set(rendered, *keys)


def _cte_kernels_off(rendered: Rendered) -> bool:
    """Kernels that are off unless stated, and one that is on."""
    off = [key for key in (*QKV_KERNELS, "out_proj_kernel_enabled") if not rendered.get(key)]
    return bool(off) or rendered.get("attn_kernel_enabled") is False


def _other_type(rendered: Rendered) -> bool:
    kept, model = rendered["attention_dtype"], rendered.get("torch_dtype", "bfloat16")
    return bool(kept != model) and rendered.get("cast_type", "config") != "as-declared"


_RULES: tuple[tuple[str, str, Holds], ...] = (
    ("cast_type", f"it must be {' or '.join(CAST_TYPES)}", lambda r: r["cast_type"] not in CAST_TYPES),
    ("attention_dtype", "another type than the model's needs cast_type as-declared", _other_type),
    (
        "activation_quantization_type",
        f"it must be {' or '.join(ACTIVATIONS)}",
        lambda r: r["activation_quantization_type"] not in ACTIVATIONS,
    ),
    (
        "activation_quantization_type",
        "it conflicts with mlp_kernel_enabled and quantized_mlp_kernel_enabled",
        _any_of("mlp_kernel_enabled", "mlp_tkg_nki_kernel_enabled", "quantized_mlp_kernel_enabled"),
    ),
    (
        "rmsnorm_quantize_kernel_enabled",
        "it needs quantized_mlp_kernel_enabled",
        _without("quantized_mlp_kernel_enabled"),
    ),
    (
        "qkv_cte_nki_kernel_fuse_rope",
        f"it needs {' and '.join(QKV_KERNELS)}",
        lambda r: not all(r.get(key) for key in QKV_KERNELS),
    ),
    (
        "attn_block_cte_nki_kernel_enabled",
        f"it needs {', '.join(QKV_KERNELS)} and out_proj_kernel_enabled true, and attn_kernel_enabled not false",
        _cte_kernels_off,
    ),
    *(
        (kernel, f"it needs {' or '.join(QKV_KERNELS)}", lambda r: not _is_any_set(r, *QKV_KERNELS))
        for kernel in ATTENTION_KERNELS[:1]
    ),
    *(
        (kernel, "it conflicts with flash_decoding_enabled", _any_of("flash_decoding_enabled"))
        for kernel in ATTENTION_KERNELS
    ),
    *(
        (key, f"it needs {ATTENTION_KERNELS[0]}", _without(*ATTENTION_KERNELS))
        for key in ("attn_block_tkg_nki_kernel_cache_update", "attn_block_tkg_nki_kernel_cascaded_attention")
    ),
    (
        "k_cache_transposed",
        "it conflicts with flash_decoding_enabled and prefix caching",
        _any_of("flash_decoding_enabled", "is_block_kv_layout"),
    ),
    (
        "quantized",
        f"with {' or '.join(QKV_KERNELS)} it needs quantization.unconverted",
        lambda r: _is_any_set(r, *QKV_KERNELS) and not r.get("modules_to_not_convert"),
    ),
    (
        "is_full_model_shuffled",
        "it needs is_mxfp4_compute or is_eagle_draft",
        _without("is_mxfp4_compute", "is_eagle_draft"),
    ),
    (
        "ep_dispatch_cc_option",
        "RS_AG needs max_concurrency of tp or more",
        lambda r: r["ep_dispatch_cc_option"] == "RS_AG" and r["tp_degree"] > r["tkg_batch_size"],
    ),
    (
        "token_generation_batches",
        "its largest must be at most max_concurrency",
        lambda r: max(_listed(r["token_generation_batches"])) > r["tkg_batch_size"],
    ),
)


def _listed(value: Any) -> list[int]:
    return value if isinstance(value, list) and value else [value if isinstance(value, int) else 0]


# Chooses the build of the Neuron stack for a machine, and rejects what that build does not support.

NEURON_TARGET_OPTION = "neuron_target"
"""In a version's `engine_options`: the name of a target; default: that of its machines."""


def target_on(spec: VersionSpec, machine: InstanceShape) -> NeuronTarget:
    """The build for cells of these machines, which must be Neuron machines. Raises InvalidVersion if the build is
    unknown, or AWS does not support it there."""
    where = f"{spec.reference}: engine_options.{NEURON_TARGET_OPTION}"
    if (name := spec.engine_options.get(NEURON_TARGET_OPTION)) is None:
        return DEFAULT_TARGET[machine.accelerator]
    if name not in TARGET_BY_NAME:
        raise InvalidVersion(f"{where} is {name!r}; {one_of(sorted(TARGET_BY_NAME), str(name))}")
    target = TARGET_BY_NAME[name]
    if machine.accelerator not in target.accelerators:
        fitting = [each.name for each in TARGETS if machine.accelerator in each.accelerators]
        raise InvalidVersion(
            f"{where} is {name!r}; {machine.name} has {machine.accelerator}, and that target is for "
            f"{', '.join(target.accelerators)}: use {' or '.join(fitting) or 'another machine'}"
        )
    return target


def check_target(spec: VersionSpec, degrees: Degrees, machine: InstanceShape, target: NeuronTarget) -> None:
    """Check that the build and the machines' network support the cell. Raises InvalidVersion if it has too many nodes,
    or an unsupported method of speculation or quantization."""
    nodes = f"{spec.reference}: parallelism.{machine.name}.nodes is {degrees.nodes}"
    if degrees.nodes > 1 and is_without_efa(machine):
        raise InvalidVersion(
            f"{nodes}; {machine.name} has no EFA, which cells of several nodes need: it must be 1, or the "
            "machine a trn1.32xlarge, trn1n.32xlarge or of Trn2"
        )
    if target.most_nodes and degrees.nodes > target.most_nodes:
        raise InvalidVersion(
            f"{nodes}; target {target.name} replaces Switchyard's executor for several nodes with vLLM's own, "
            f"so it must be {target.most_nodes}, or engine_options.{NEURON_TARGET_OPTION} nxdi-2.29"
        )
    method = spec.speculation.get("method")
    if method is not None and method != "medusa" and method not in target.speculation:
        raise InvalidVersion(
            f"{spec.reference}: speculation.method is {method!r}; target {target.name} supports "
            f"{', '.join(target.speculation)}"
        )


def is_without_efa(machine: InstanceShape) -> bool:
    """Inf2, and types whose row says so, such as Trn1 with a single chip: "Supported instance types" of
    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa.html."""
    return machine.efa_interfaces == 0 or machine.accelerator == "inferentia2"


def target_note(target: NeuronTarget) -> str:
    """Returns the software that its nodes need, as a sentence."""
    return f"rendered for {target}"
