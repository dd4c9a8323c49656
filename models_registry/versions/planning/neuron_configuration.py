"""Renders a model version into `override_neuron_config` of the vLLM Neuron plugin with NxDI (plugins 0.4.1 and 0.5.0,
Neuron SDK 2.28 and 2.29), and into `neuron_config` of the plugin without NxDI. The result is the same on every rank:
the agent adds `start_rank_id`. It never renders an unknown key, because NxDI would ignore it. Pure."""

from collections.abc import Mapping
from typing import Any

from engine_agent.protocol.neuron_targets import (
    NATIVE_0_24,
    NATIVE_KEYS,
    NXDI_2_28,
    NXDI_2_29,
    NXDI_SETTINGS,
    NeuronTarget,
)
from models_registry.versions.planning.machines import Degrees
from models_registry.versions.planning.nxdi_rules import broken_rule
from models_registry.versions.planning.spec import FieldReader, InvalidVersion, NeuronQuantization, VersionSpec, one_of
from models_registry.versions.planning.speculation import MEDUSA_GUESSES, Draft, Medusa, Method, Speculation

_NAMES = """
    activation_quantization_type allow_input_truncation apply_seq_ids_mask async_mode attention_dp_degree
    attention_dtype attn_block_cte_nki_kernel_enabled attn_block_tkg_nki_kernel_cache_update
    attn_block_tkg_nki_kernel_cascaded_attention attn_block_tkg_nki_kernel_disable_gpsimd_sb2sb
    attn_block_tkg_nki_kernel_enabled attn_block_tkg_nki_kernel_use_online_softmax attn_kernel_enabled
    attn_tkg_builtin_kernel_enabled attn_tkg_nki_kernel_enabled batch_size blockwise_matmul_config
    bucket_n_active_tokens buckets capacity_factor cast_type cc_pipeline_tiling_factor chunked_prefill_config
    context_encoding_buckets cp_degree ctx_batch_size disable_argmax_kernel disable_kv_cache_tiling
    disable_normalize_top_k_affinities disable_numeric_cc_token dma_order_config draft_model_modules_to_not_convert
    eagle_rolling_buffer_kernel_enabled early_expert_affinity_modulation enable_bucketing enable_cte_modular_flow
    enable_eagle_draft_input_norm enable_eagle_speculation enable_fused_speculation
    enable_output_completion_notifications enable_spill_reload_dge enable_ve_data_parallel ep_degree
    ep_dispatch_cc_option expert_mlp_nki_kernel_enabled flash_decoding_enabled fused_qkv fused_rmsnorm_skip_gamma
    fused_shared_experts gate_clamp_lower_limit gate_clamp_upper_limit glu_mlp glu_type hidden_act_bias
    hidden_act_scaling_factor hybrid_sharding_config is_block_kv_layout is_continuous_batching is_eagle3
    is_eagle_draft is_full_model_shuffled is_medusa is_mxfp4_compute is_prefix_caching k_cache_transposed
    kv_cache_batch_size kv_cache_padding_size kv_cache_quant kv_quant_config layer_boundary_markers lm_head_pad
    lm_head_pad_alignment_size local_ranks_size logical_nc_config max_batch_size max_context_length
    max_length max_new_tokens medusa_speculation_length medusa_tree mlp_cp_degree mlp_kernel_enabled
    mlp_kernel_fuse_residual_add mlp_tkg_nki_kernel_enabled modules_to_not_convert moe_ep_degree
    moe_fused_nki_kernel_enabled moe_mask_padded_tokens moe_tp_degree n_active_tokens n_positions num_medusa_heads
    on_cpu on_device_sampling_config out_proj_kernel_enabled output_logits overrides_torch_dtype pa_block_size
    pa_num_blocks padded_hidden_size padded_intermediate_size padding_side pp_degree pre_rope_rmsnorm prefix_buckets
    qk_layernorm qkv_cte_nki_kernel_fuse_rope qkv_kernel_enabled qkv_kernel_fuse_residual_add qkv_kernel_nbsd_layout
    qkv_nki_kernel_enabled quantization_block_axis quantization_block_size quantization_dtype
    quantization_scale_dtype quantization_type quantize_clamp_bound quantized quantized_checkpoints_path
    quantized_mlp_kernel_enabled return_expert_index return_router_logits rmsnorm_quantize_kernel_enabled
    router_config router_topk_nki_kernel_enabled rpl_reduce_dtype save_sharded_checkpoint scratchpad_page_size
    seq_len seq_len_threshold_for_cc_tiling sequence_parallel_enabled shared_experts_sequence_parallel_enabled
    shared_mlp_nki_kernel_enabled skip_sharding skip_warmup spec_batch_size speculation_length start_rank_id
    strided_context_parallel_kernel_enabled switch_cc target
    tkg_batch_size token_generation_batches token_generation_buckets token_tree_config torch_dtype tp_degree
    transpose_shared_experts_weights up_clamp_lower_limit up_clamp_upper_limit use_index_calc_kernel vocab_parallel
    weight_gather_seq_len_threshold weights_to_skip_layout_optimization windowed_context_encoding_size world_size
"""
NEURON_CONFIG_KEYS = frozenset(_NAMES.split())
"""The names in NxDI's configuration: it ignores unknown names with a warning. Without those that name classes or files:
attn_cls, lora_config, tensor_capture_config, tensor_replacement_config. From NeuronConfig and MoENeuronConfig in the
library of Neuron SDK 2.29, the last that supports INT8, Medusa, Trn1 and Inf2: https://github.com/aws-neuron/neuronx-
distributed-inference, src/neuronx_distributed_inference/models/config.py."""

NOT_IN_TARGET: Mapping[str, frozenset[str]] = {NXDI_2_28.name: frozenset({"enable_ve_data_parallel"})}
"""Names that an older NxDI lacks: the same file at the commits of 0.8.0 and 0.9.0."""


JsonObject = dict[str, Any]

BUCKETS = ("context_encoding_buckets", "token_generation_buckets", "prefix_buckets")
SAMPLING_KEYS = (
    *("deterministic", "do_sample", "dynamic", "global_topk", "on_device_sampling_config"),
    *("sampling_dp_degree", "temperature", "top_k", "top_k_kernel_enabled", "top_p"),
)
SAMPLING = "on_device_sampling_config"
PREFIX_BLOCK_TOKENS = 32
"""The block size that the plugin's guide recommends for prefix caching (32 or 16)."""

DECIDED_ELSEWHERE: Mapping[str, str] = {
    **dict.fromkeys(("tp_degree", "cp_degree", "attention_dp_degree", "pp_degree", "world_size"), "parallelism"),
    **dict.fromkeys(("local_ranks_size", "start_rank_id"), "parallelism"),
    **dict.fromkeys(("batch_size", "max_batch_size", "tkg_batch_size", "is_continuous_batching"), "max_concurrency"),
    **dict.fromkeys(("seq_len", "max_context_length", "max_length"), "context_length"),
    **dict.fromkeys(("quantized", "quantized_checkpoints_path", "quantization_dtype"), "quantization"),
    **dict.fromkeys(("quantization_type", "modules_to_not_convert"), "quantization"),
    **dict.fromkeys(("is_medusa", "medusa_speculation_length", "num_medusa_heads", "medusa_tree"), "speculation"),
    **dict.fromkeys(("speculation_length", "enable_fused_speculation", "enable_eagle_speculation"), "speculation"),
    "is_eagle3": "speculation",
    **dict.fromkeys(("is_prefix_caching", "is_block_kv_layout"), "engine_options.enable_prefix_caching"),
    **dict.fromkeys(("pa_num_blocks", "pa_block_size"), "engine_options.enable_prefix_caching and block_size"),
}
"""Keys that have their own field of a version -> that field."""


def prefix_caching(spec: VersionSpec) -> tuple[int, int] | None:
    """Block size in tokens and number of blocks if the version uses prefix caching, else None. Raises InvalidVersion if
    the option is not a boolean, or the block size is not a whole number."""
    options = FieldReader(f"{spec.reference}: engine_options", spec.engine_options)
    if not options.flag("enable_prefix_caching"):
        return None
    block = options.whole("block_size", default=PREFIX_BLOCK_TOKENS)
    return block, -(-spec.context_length // block) * spec.max_concurrency


def longest_prompt(spec: VersionSpec) -> int:
    """Tokens of the longest prompt that the compiled model accepts: its largest stated bucket.

    Requires checked NxDI settings."""
    buckets: list[int] = spec.engine_options.get("neuron_config", {}).get("context_encoding_buckets") or []
    return max(buckets, default=spec.context_length)


def additional_config(spec: VersionSpec, override: JsonObject) -> JsonObject:
    """The value of `--additional-config` for a rendered configuration.

    If prompts must be shorter than the context, plugin 0.4.1 needs the limit to answer 400 to longer ones, which would
    crash the engine. Plugin 0.5.0 has no such option, so the cell proxy checks the length (`longest_prompt`)."""
    longest = longest_prompt(spec)
    limit = {"max_prompt_length": longest} if longest < spec.context_length else {}
    return {NXDI_SETTINGS: override, **limit}


def neuron_configuration(
    spec: VersionSpec,
    degrees: Degrees,
    speculation: Speculation | None,
    quantization: NeuronQuantization | None,
    target: NeuronTarget = NXDI_2_29,
) -> JsonObject:
    """`override_neuron_config` of a version on checked degrees. Raises InvalidVersion if a key in
    `engine_options.neuron_config` is unknown, follows from another field, has an invalid value, or conflicts with
    another key."""
    added = _with_stated_keys(spec, target)
    rendered: JsonObject = {
        **_parallel(degrees),
        **_batching(spec),
        "enable_bucketing": True,
        SAMPLING: _sampling(degrees, speculation),
        **_prefix(spec),
        **_quantized(quantization),
        **_speculative(speculation),
        **added,
    }
    _check_together(spec, degrees, speculation, rendered)
    return rendered


def _parallel(degrees: Degrees) -> JsonObject:
    several = {"world_size": degrees.world_size, "local_ranks_size": degrees.ranks_per_node}
    return {
        "tp_degree": degrees.tp,
        **({"cp_degree": degrees.cp} if degrees.cp > 1 else {}),
        **({"attention_dp_degree": degrees.dp} if degrees.dp > 1 else {}),
        **({"pp_degree": degrees.pp} if degrees.pp > 1 else {}),
        **(several if degrees.nodes > 1 else {}),
    }


def _batching(spec: VersionSpec) -> JsonObject:
    return {
        "batch_size": spec.max_concurrency,
        "ctx_batch_size": 1,
        "tkg_batch_size": spec.max_concurrency,
        "is_continuous_batching": spec.max_concurrency > 1,
        "max_context_length": longest_prompt(spec),
        "seq_len": spec.context_length,
    }


def _sampling(degrees: Degrees, speculation: Speculation | None) -> JsonObject:
    """Each request's own temperature, top-k and top-p, as by default in the plugin.

    Over several nodes random sampling is off: each node would draw different tokens, so their shares of one sequence
    would diverge. Medusa needs the number of guesses that its library reads."""
    guesses = {"global_topk": MEDUSA_GUESSES} if isinstance(speculation, Medusa) else {}
    return {"dynamic": True, "deterministic": degrees.nodes > 1, **guesses}


def sampling_notes(spec: VersionSpec, degrees: Degrees, target: NeuronTarget) -> tuple[str, ...]:
    """Warnings about sampling over several nodes, for a checked version."""
    if (
        degrees.nodes == 1
        or target.settings != NXDI_SETTINGS
        or spec.engine_options.get("neuron_config", {}).get(SAMPLING, {}) is None
    ):
        return ()
    return (
        (
            f"{degrees.nodes} nodes must sample the same tokens, so NxDI samples without randomness: a prompt "
            f"always gets the same answer at any temperature. With engine_options.neuron_config.{SAMPLING} null "
            "the hosts sample with a common seed"
        ),
    )


def _prefix(spec: VersionSpec) -> JsonObject:
    cached = prefix_caching(spec)
    if cached is None:
        return {}
    block, blocks = cached
    return {"is_prefix_caching": True, "is_block_kv_layout": True, "pa_block_size": block, "pa_num_blocks": blocks}


def _quantized(quantization: NeuronQuantization | None) -> JsonObject:
    if quantization is None:
        return {}
    unconverted = {"modules_to_not_convert": list(quantization.unconverted)} if quantization.unconverted else {}
    return {
        "quantized": True,
        "quantized_checkpoints_path": quantization.checkpoints_path,
        "quantization_dtype": quantization.dtype,
        "quantization_type": quantization.scheme,
        **unconverted,
    }


def _speculative(speculation: Speculation | None) -> JsonObject:
    if isinstance(speculation, Medusa):
        return {
            "is_medusa": True,
            "medusa_speculation_length": speculation.length,
            "num_medusa_heads": speculation.heads,
            "medusa_tree": [list(path) for path in speculation.tree],
        }
    if isinstance(speculation, Draft):
        return {
            "enable_eagle_speculation": True,
            "enable_fused_speculation": True,
            "speculation_length": speculation.tokens,
            **({"is_eagle3": True} if speculation.method is Method.EAGLE3 else {}),
        }
    return {}


def _with_stated_keys(spec: VersionSpec, target: NeuronTarget) -> JsonObject:
    where = f"{spec.reference}: engine_options.neuron_config"
    stated = spec.engine_options.get("neuron_config", {})
    fields = FieldReader(where, stated)
    for name in stated:
        if name in DECIDED_ELSEWHERE:
            raise fields.wrong(name, f"it follows from {DECIDED_ELSEWHERE[name]}; state it there")
        if name not in NEURON_CONFIG_KEYS:
            raise InvalidVersion(f"{where} names {name!r}; {_support_note(name)}")
        if name in NOT_IN_TARGET.get(target.name, ()):
            raise fields.wrong(name, f"target {target.name} does not support it; {NXDI_2_29.name} does")
    for name in BUCKETS:
        _check_buckets(fields, name, spec.context_length)
    if stated.get(SAMPLING, {}) is not None:  # null: the host samples
        sampling = FieldReader(f"{where}.{SAMPLING}", stated.get(SAMPLING, {}))
        for name in SAMPLING_KEYS:
            sampling.given(name)
        sampling.finish()
    return dict(stated)


def _support_note(name: str) -> str:
    if name in NATIVE_KEYS:
        return f"only target {NATIVE_0_24.name} supports it: state engine_options.neuron_target"
    near = one_of(sorted(NEURON_CONFIG_KEYS), name).rpartition("(")[2].rstrip("?)")
    hint = f", {near}?" if near.startswith("did you mean") else ""
    return f"NxDI would ignore it: its NeuronConfig has no such key{hint}"


def _check_buckets(fields: FieldReader, name: str, longest: int) -> None:
    buckets = fields.given(name)
    if buckets is None:
        return
    whole = isinstance(buckets, list) and all(isinstance(size, int) and 0 < size <= longest for size in buckets)
    if not whole or not buckets or buckets != sorted(set(buckets)):
        raise fields.wrong(name, f"it must be an increasing list of whole numbers from 1 to context_length, {longest}")


def _check_together(
    spec: VersionSpec, degrees: Degrees, speculation: Speculation | None, rendered: Mapping[str, Any]
) -> None:
    """NeuronConfig's rules between keys. Each violation would be an exception on every node."""
    if isinstance(speculation, Medusa):
        _check_medusa(spec, rendered)
    _check_sampling(spec, degrees, speculation, rendered[SAMPLING])
    experts = rendered.get("moe_tp_degree", 1) * rendered.get("moe_ep_degree", 1)
    rules = (
        (
            rendered.get("mlp_cp_degree", 1) > 1 and not rendered.get("sequence_parallel_enabled"),
            f"mlp_cp_degree is {rendered.get('mlp_cp_degree')}; over 1 it needs sequence_parallel_enabled",
        ),
        (
            rendered.get("strided_context_parallel_kernel_enabled") and degrees.cp == 1,
            "strided_context_parallel_kernel_enabled is True; it needs parallelism cp over 1",
        ),
        (
            "chunked_prefill_config" in rendered,
            "chunked_prefill_config is stated; the plugin does not support chunked prefill, leave it out",
        ),
        (
            "token_generation_batches" in rendered and (speculation is not None or "is_prefix_caching" in rendered),
            "token_generation_batches is stated; it goes neither with speculation nor with prefix caching",
        ),
        (
            experts > 1 and experts != degrees.tp,
            f"moe_tp_degree x moe_ep_degree is {experts}; it must be tp = {degrees.tp}",
        ),
    )
    for broken, rule in rules:
        if broken:
            raise InvalidVersion(f"{spec.reference}: engine_options.neuron_config.{rule}")
    if rule := broken_rule(rendered):
        raise InvalidVersion(f"{spec.reference}: engine_options.neuron_config.{rule}")


def _check_sampling(
    spec: VersionSpec, degrees: Degrees, speculation: Speculation | None, sampling: Mapping[str, Any] | None
) -> None:
    where = f"{spec.reference}: engine_options.neuron_config.{SAMPLING}"
    if sampling is None:
        if speculation is not None:
            raise InvalidVersion(f"{where} is null; speculation samples on the device, so it must be an object")
        return
    if degrees.nodes > 1 and sampling.get("deterministic") is not True:
        raise InvalidVersion(
            f"{where}.deterministic is {sampling.get('deterministic')}; over {degrees.nodes} nodes it must be "
            f"true, or {SAMPLING} null: otherwise each node would sample different tokens"
        )
    if isinstance(speculation, Medusa) and sampling.get("global_topk") != MEDUSA_GUESSES:
        raise InvalidVersion(
            f"{where}.global_topk is {sampling.get('global_topk')}; with speculation.method medusa it must be "
            f"{MEDUSA_GUESSES}, the number of guesses that NxD reads per head"
        )


def _check_medusa(spec: VersionSpec, rendered: Mapping[str, Any]) -> None:
    method = "with speculation.method medusa it must be"
    if spec.max_concurrency != 1:
        raise InvalidVersion(
            f"{spec.reference}: max_concurrency is {spec.max_concurrency}; Medusa runs one sequence at a time, so "
            f"{method} 1"
        )
    if rendered.get("async_mode"):
        raise InvalidVersion(f"{spec.reference}: engine_options.neuron_config.async_mode is True; {method} false")


NATIVE_SAMPLING_KEYS = ("all_greedy", "deterministic", "max_top_k", "sampling_dp_degree")
NATIVE_BUCKETS = (
    "decode_context_length_buckets",
    "kv_segment_size_buckets",
    "num_batched_tokens_buckets",
    "num_seqs_buckets",
)
FLAGS = ("apply_prefill_dcp", "enable_structured_outputs", "fp8_packed_kv")
SHARDING: Mapping[str, str] = {
    **dict.fromkeys(("attention_dp_size", "embedding_dp_size", "lm_head_dp_size", "mlp_dp_size"), "dp"),
    "apply_prefill_dcp": "cp",
}
"""Keys that divide a replica beyond tensor parallelism, and the degree that corresponds. Each needs more engines than
the one of a cell."""
SEGMENTS = (512, 1024, 2048, 4096, 8192)
SINGLE_SHOT_MOST = 16 * 1024
CONTEXT_TILE = 128
"""`SUPPORTED_KV_SEGMENT_SIZES`, `MAX_MODEL_LEN_SINGLE_SHOT` and the attention kernel's tile in the plugin's
vllm_neuron/utils/bucket_utils.py."""
_WHERE = "engine_options.neuron_config"


def native_configuration(spec: VersionSpec, degrees: Degrees) -> dict[str, Any]:
    """`neuron_config` of a version on checked degrees: its stated keys, checked. Raises InvalidVersion if the plugin
    does not support a degree, quantization or adapter, or a key is unknown, has an invalid value, or conflicts with
    another key."""
    for name in ("cp", "dp", "pp"):
        if (degree := getattr(degrees, name)) > 1:
            raise InvalidVersion(
                f"{spec.reference}: {name} of parallelism is {degree}; on target {NATIVE_0_24.name} it must be 1"
            )
    if spec.quantization:
        raise InvalidVersion(
            f"{spec.reference}: quantization is {dict(spec.quantization)!r}; target {NATIVE_0_24.name} uses "
            f"the checkpoint's own quantization (state {_WHERE}.quantization) and does not support INT8, so "
            "it must be empty"
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
        raise fields.wrong("quantization", "its worker supports mxfp4 only on Trn3; leave it out")
    _check_native_buckets(fields, spec)
    if stated.get(SAMPLING, {}) is not None:
        sampling = FieldReader(f"{where}.{SAMPLING}", stated.get(SAMPLING, {}))
        for name in NATIVE_SAMPLING_KEYS:
            sampling.given(name)
        sampling.finish()
    elif spec.speculation:
        raise InvalidVersion(f"{where}.{SAMPLING} is null; speculation samples on the device, so it must be an object")
    return dict(stated)


def _check_native_buckets(fields: FieldReader, spec: VersionSpec) -> None:
    """Increasing lists; the largest number of sequences is max_concurrency, of tokens max_num_batched_tokens."""
    batched = spec.engine_options.get("max_num_batched_tokens")
    largest = {"num_seqs_buckets": spec.max_concurrency, "num_batched_tokens_buckets": batched}
    for name in NATIVE_BUCKETS:
        if (buckets := fields.given(name)) is None:
            continue
        whole = isinstance(buckets, list) and bool(buckets) and all(type(size) is int and size > 0 for size in buckets)
        if not whole or buckets != sorted(set(buckets)):
            raise fields.wrong(name, "it must be an increasing list of whole numbers")
        most = largest.get(name)
        if most is not None and buckets[-1] != most:
            field = "max_concurrency" if name == "num_seqs_buckets" else "engine_options.max_num_batched_tokens"
            raise fields.wrong(name, f"its largest must be {field}, {most}")
        if name == "num_batched_tokens_buckets" and most is None:
            raise fields.wrong(name, "state engine_options.max_num_batched_tokens, which its largest must be")
    _check_segments(fields, spec)


def _check_segments(fields: FieldReader, spec: VersionSpec) -> None:
    """A prompt longer than a step is read in segments of a size that the kernel supports."""
    sizes = ", ".join(map(str, SEGMENTS))
    batched, segments = spec.engine_options.get("max_num_batched_tokens"), fields.given("kv_segment_size_buckets")
    if segments is not None and (len(segments) != 1 or segments[0] not in SEGMENTS):
        raise fields.wrong("kv_segment_size_buckets", f"it must be a list with one of {sizes}")
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
