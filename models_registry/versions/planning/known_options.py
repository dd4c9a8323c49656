"""Engines whose options are all known: renders theirs from a version, and names the options of each engine that decide
about memory. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine_agent.protocol.engine_options import CHECKED
from models_registry.versions.planning.machines import Degrees
from models_registry.versions.planning.spec import InvalidVersion, Quantization, VersionSpec, VllmQuantization

SLOT_FIELDS: Mapping[str, str] = {"context_length": "context_length", "parallel": "max_concurrency"}
"""Of llama.cpp, which is also Triton's model."""
OPTION_FIELDS: Mapping[str, Mapping[str, str]] = {
    "llama-cpp": SLOT_FIELDS,
    "sglang": {
        "context_length": "context_length",
        "max_running_requests": "max_concurrency",
        "tp_size": "parallelism",
        "pp_size": "parallelism",
        "quantization": "quantization",
    },
    "triton": SLOT_FIELDS,
    "tensorrt-llm": {
        "max_seq_len": "context_length",
        "max_batch_size": "max_concurrency",
        "tp_size": "parallelism",
        "pp_size": "parallelism",
    },
}
"""Engine -> its options that have their own field of a version -> that field."""


def known_options(spec: VersionSpec, degrees: Degrees, quantization: Quantization | None) -> dict[str, Any]:
    """Options of an engine whose options are all known. Raises InvalidVersion for one that has its own field, or a
    field whose value the engine does not take."""
    fields = OPTION_FIELDS[spec.engine]
    stated = {name.replace("-", "_"): value for name, value in spec.engine_options.items()}
    for name, value in spec.engine_options.items():
        if field := fields.get(name.replace("-", "_")):
            raise InvalidVersion(f"{spec.reference}: engine_options.{name} is {value!r}; state it in {field}")
    values = {"context_length": spec.context_length, "max_concurrency": spec.max_concurrency}
    own: dict[str, Any] = {name: values[field] for name, field in fields.items() if field in values}
    for name, value in own.items():
        if wrong := CHECKED[spec.engine][name.replace("_", "-")].problem(value):
            raise InvalidVersion(f"{spec.reference}: {fields[name]} is {value}; on engine {spec.engine} it {wrong}")
    if stated.get("host_cache_gib") and not stated.get("enable_block_reuse"):
        raise InvalidVersion(
            f"{spec.reference}: engine_options.host_cache_gib keeps blocks of prompts for reuse; it needs "
            "engine_options.enable_block_reuse to be true, and all tenants then share one cache"
        )
    if "tp_size" in fields:
        own |= {name: size for name, size in (("tp_size", degrees.tp), ("pp_size", degrees.pp)) if size > 1}
    if spec.engine == "sglang":
        own |= _sglang_options(spec, stated, quantization)
    return {**own, **stated}


def _sglang_options(spec: VersionSpec, stated: Mapping[str, Any], quantization: Quantization | None) -> dict[str, Any]:
    """Without further statement SGLang reuses no prompt, because its cache is common to all tenants. Raises
    InvalidVersion if a copy of that cache in host memory is wanted nevertheless."""
    if stated.get("enable_hierarchical_cache") and stated.get("disable_radix_cache", True):
        raise InvalidVersion(
            f"{spec.reference}: engine_options.enable_hierarchical_cache is true; it needs "
            "engine_options.disable_radix_cache to be false, and all tenants then share one cache"
        )
    method = {"quantization": quantization.method} if isinstance(quantization, VllmQuantization) else {}
    return {"disable_radix_cache": True, "enable_cache_report": True, **method}


UTILIZATION = 0.92
"""Default of `--gpu-memory-utilization`."""


@dataclass(frozen=True, slots=True)
class Names:
    """An engine's options for its share of a device, the tokens of a step, and the tokens of a block of its cache, with
    the share and the block that it uses unless they are stated."""

    share: str = "gpu_memory_utilization"
    batched: str = "max_num_batched_tokens"
    block: str = "block_size"
    usual_share: float = UTILIZATION
    usual_block: int = 16


NAMES: Mapping[str, Names] = {
    "neuron": Names(),
    "sglang": Names("mem_fraction_static", "chunked_prefill_size", "page_size", usual_share=1.0, usual_block=1),
    "tensorrt-llm": Names("", "max_num_tokens", "", usual_share=1.0, usual_block=32),
    "vllm": Names(),
}
"""SGLang's default share follows from the GPU, so nothing is subtracted without a statement. TensorRT-LLM's share is of
what is free next to the weights."""
FREE_SHARE = "kv_cache_free_gpu_memory_fraction"
FREE_SHARE_DEFAULT = 0.9
