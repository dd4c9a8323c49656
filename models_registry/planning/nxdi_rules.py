"""Rules of NxDI's NeuronConfig between keys that a version may state: each would be an exception on every node, after
machines were waited for. Pure. From `src/neuronx_distributed_inference/models/config.py` of
https://github.com/aws-neuron/neuronx-distributed-inference at 0.8.0 and 0.9.0, which have the same;
`bench/models/neuron_configurations.py` holds them against the classes themselves.
"""

from collections.abc import Callable, Mapping
from typing import Any

Rendered = Mapping[str, Any]
Holds = Callable[[Rendered], Any]
CAST_TYPES = ("config", "as-declared")
ACTIVATIONS = ("dynamic", "static")
QKV_KERNELS = ("qkv_kernel_enabled", "qkv_nki_kernel_enabled")
ATTENTION_KERNELS = (
    "attn_block_tkg_nki_kernel_enabled", "attn_tkg_nki_kernel_enabled", "attn_tkg_builtin_kernel_enabled",
)  # fmt: skip
"""Each of the last two turns the first on."""


def broken_rule(rendered: Rendered) -> str:
    """The first rule that a rendered configuration breaks, as `KEY is VALUE; it …`; empty if it keeps all."""
    for key, rule, is_broken in _RULES:
        if rendered.get(key) and is_broken(rendered):
            return f"{key} is {rendered[key]!r}; {rule}"
    return ""


def _any(rendered: Rendered, *keys: str) -> bool:
    return any(rendered.get(key) for key in keys)


def _without(*keys: str) -> Holds:
    return lambda rendered: not _any(rendered, *keys)


def _with(*keys: str) -> Holds:
    return lambda rendered: _any(rendered, *keys)


def _cte_kernels_off(rendered: Rendered) -> bool:
    """Those that are off unless stated, and one that is not."""
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
        "it goes with neither mlp_kernel_enabled nor quantized_mlp_kernel_enabled",
        _with("mlp_kernel_enabled", "mlp_tkg_nki_kernel_enabled", "quantized_mlp_kernel_enabled"),
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
        (kernel, f"it needs {' or '.join(QKV_KERNELS)}", lambda r: not _any(r, *QKV_KERNELS))
        for kernel in ATTENTION_KERNELS[:1]
    ),
    *(
        (kernel, "it does not go with flash_decoding_enabled", _with("flash_decoding_enabled"))
        for kernel in ATTENTION_KERNELS
    ),
    *(
        (key, f"it needs {ATTENTION_KERNELS[0]}", _without(*ATTENTION_KERNELS))
        for key in ("attn_block_tkg_nki_kernel_cache_update", "attn_block_tkg_nki_kernel_cascaded_attention")
    ),
    (
        "k_cache_transposed",
        "it goes with neither flash_decoding_enabled nor prefix caching",
        _with("flash_decoding_enabled", "is_block_kv_layout"),
    ),
    (
        "quantized",
        f"with {' or '.join(QKV_KERNELS)} it needs quantization.unconverted",
        lambda r: _any(r, *QKV_KERNELS) and not r.get("modules_to_not_convert"),
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
