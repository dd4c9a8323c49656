"""Renders a model version into `neuron_config`, the settings of the vLLM Neuron plugin without NxDI. Pure.

Keys and rules are those of its NeuronConfig and of how its worker reads buckets; what vLLM itself has an option for is
stated there.
"""

from collections.abc import Mapping
from typing import Any

from engine_agent.protocol.neuron_targets import NATIVE_0_24, NATIVE_KEYS
from models_registry.planning.fields import FieldReader, one_of
from models_registry.planning.neuron_configuration import SAMPLING
from models_registry.planning.parallelism import Degrees
from models_registry.planning.version_spec import InvalidVersion, VersionSpec

SAMPLING_KEYS = ("all_greedy", "deterministic", "max_top_k", "sampling_dp_degree")
BUCKETS = ("decode_context_length_buckets", "kv_segment_size_buckets", "num_batched_tokens_buckets", "num_seqs_buckets")
FLAGS = ("apply_prefill_dcp", "enable_structured_outputs", "fp8_packed_kv")
SHARDING: Mapping[str, str] = {
    **dict.fromkeys(("attention_dp_size", "embedding_dp_size", "lm_head_dp_size", "mlp_dp_size"), "dp"),
    "apply_prefill_dcp": "cp",
}
"""Keys that share a replica out beyond tensor parallelism, and the degree that would say so. Each needs more engines
than the one that a cell has."""
SEGMENTS = (512, 1024, 2048, 4096, 8192)
SINGLE_SHOT_MOST = 16 * 1024
CONTEXT_TILE = 128
"""`SUPPORTED_KV_SEGMENT_SIZES`, `MAX_MODEL_LEN_SINGLE_SHOT` and the attention kernel's tile in the plugin's
vllm_neuron/utils/bucket_utils.py."""
_WHERE = "engine_options.neuron_config"


def native_configuration(spec: VersionSpec, degrees: Degrees) -> dict[str, Any]:
    """`neuron_config` of a version on checked degrees: what it states, once it is checked.

    Raises:
        InvalidVersion: a degree, a quantization or an adapter that this plugin has not here, or a key that is unknown,
            of a wrong form, or does not go together with the rest.
    """
    for name in ("cp", "dp", "pp"):
        if (degree := getattr(degrees, name)) > 1:
            raise InvalidVersion(
                f"{spec.reference}: {name} of parallelism is {degree}; on target {NATIVE_0_24.name} it must be 1"
            )
    if spec.quantization:
        raise InvalidVersion(
            f"{spec.reference}: quantization is {dict(spec.quantization)!r}; target {NATIVE_0_24.name} takes a "
            f"checkpoint as it was quantized (state {_WHERE}.quantization) and has no INT8, so it must be empty"
        )
    where = f"{spec.reference}: {_WHERE}"
    stated = spec.engine_options.get("neuron_config", {})
    fields = FieldReader(where, stated)
    for name in stated:
        if name not in NATIVE_KEYS:
            raise InvalidVersion(f"{where} names {name!r}; {one_of(sorted(NATIVE_KEYS), name)}")
        if (degree_name := SHARDING.get(name)) and stated[name] != 1 and stated[name] is not False:
            raise fields.wrong(name, f"a cell has one engine, so it must be left out, as {degree_name} is 1")
    for name in FLAGS:
        fields.flag(name)
    if fields.whole("ep_degree", default=1) > 1 and spec.engine_options.get("enable_expert_parallel") is not True:
        raise fields.wrong("ep_degree", "over 1 it needs engine_options.enable_expert_parallel")
    if fields.given("quantization") == "mxfp4":
        raise fields.wrong("quantization", "its worker takes mxfp4 on Trn3 alone; leave it out")
    _check_buckets(fields, spec)
    if stated.get(SAMPLING, {}) is not None:
        sampling = FieldReader(f"{where}.{SAMPLING}", stated.get(SAMPLING, {}))
        for name in SAMPLING_KEYS:
            sampling.given(name)
        sampling.finish()
    elif spec.speculation:
        raise InvalidVersion(f"{where}.{SAMPLING} is null; speculation samples on the device, so it must be an object")
    return dict(stated)


def _check_buckets(fields: FieldReader, spec: VersionSpec) -> None:
    """Rising lists; the largest of sequences is max_concurrency, of tokens max_num_batched_tokens."""
    batched = spec.engine_options.get("max_num_batched_tokens")
    largest = {"num_seqs_buckets": spec.max_concurrency, "num_batched_tokens_buckets": batched}
    for name in BUCKETS:
        if (buckets := fields.given(name)) is None:
            continue
        whole = isinstance(buckets, list) and bool(buckets) and all(type(size) is int and size > 0 for size in buckets)
        if not whole or buckets != sorted(set(buckets)):
            raise fields.wrong(name, "it must be a rising list of whole numbers")
        most = largest.get(name)
        if most is not None and buckets[-1] != most:
            field = "max_concurrency" if name == "num_seqs_buckets" else "engine_options.max_num_batched_tokens"
            raise fields.wrong(name, f"its largest must be {field}, {most}")
        if name == "num_batched_tokens_buckets" and most is None:
            raise fields.wrong(name, "state engine_options.max_num_batched_tokens, which its largest must be")
    _check_segments(fields, spec)


def _check_segments(fields: FieldReader, spec: VersionSpec) -> None:
    """A prompt that is longer than a step takes is read in segments, of a size that the kernel has."""
    sizes = ", ".join(map(str, SEGMENTS))
    batched, segments = spec.engine_options.get("max_num_batched_tokens"), fields.given("kv_segment_size_buckets")
    if segments is not None and (len(segments) != 1 or segments[0] not in SEGMENTS):
        raise fields.wrong("kv_segment_size_buckets", f"it must be a list of one of {sizes}")
    if isinstance(batched, int) and batched < spec.max_model_len and batched not in SEGMENTS:
        raise InvalidVersion(
            f"{spec.reference}: engine_options.max_num_batched_tokens is {batched}; below the context of "
            f"{spec.max_model_len} prompts are read in segments, so it must be one of {sizes}"
        )
    if isinstance(batched, int) and batched >= spec.max_model_len > SINGLE_SHOT_MOST:
        raise InvalidVersion(
            f"{spec.reference}: engine_options.max_num_batched_tokens is {batched}; a context of {spec.max_model_len} "
            f"is beyond {SINGLE_SHOT_MOST} tokens and read in segments, so it must be one of {sizes}"
        )
    is_segmented = segments or ([batched] if isinstance(batched, int) and batched < spec.max_model_len else None)
    if is_segmented and fields.given("num_batched_tokens_buckets") not in (None, is_segmented):
        raise fields.wrong("num_batched_tokens_buckets", f"prompts are read in segments, so it must be {is_segmented}")
    for size in fields.given("decode_context_length_buckets") or []:
        if size >= spec.max_model_len or size % CONTEXT_TILE:
            raise fields.wrong(
                "decode_context_length_buckets",
                f"each must be a multiple of {CONTEXT_TILE} below the context of {spec.max_model_len}",
            )
