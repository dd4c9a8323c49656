"""Neuron configurations: checks of stated keys, golden files as in the documentation, builds for machines, and the
rules of NxDI's own class, all before a node compiles for an hour.
"""

import json
from dataclasses import replace
from typing import Any

import pytest

from engine_agent.protocol.engine_options import refused_in_plan
from engine_agent.protocol.neuron_targets import NATIVE_0_24, NXDI_2_28, NXDI_2_29, NXDI_SETTINGS
from lab.versions import EXAMPLES, INF2, LOCAL, NOT_SERVED, P5, TRN1, configured, example, rendered, spec
from models_registry.instance_types.planner import INSTANCE_TYPES
from models_registry.versions.planning.engine_arguments import check_engine_options, render_version
from models_registry.versions.planning.nxdi_rules import target_on
from models_registry.versions.planning.spec import InvalidVersion

INT8 = {"dtype": "int8", "checkpoints_path": "/var/quantized"}
MEDUSA = {"method": "medusa", "heads": 1, "tree": [[0]]}
EAGLE = {"method": "eagle", "tokens": 5, "draft_uri": "file:///models/draft", "draft_digest": "sha256:cd"}
HOST_SAMPLES = {"neuron_config": {"on_device_sampling_config": None}}


def override(**changes: Any) -> Any:
    args = render_version(spec("neuron", TRN1, **changes), TRN1).plan.args
    return json.loads(args[args.index("--additional-config") + 1])["override_neuron_config"]


def test_int8_weights_are_per_channel_unless_the_version_says_else() -> None:
    found = override(quantization={**INT8, "unconverted": ["lm_head"]})
    assert found["quantization_type"] == "per_channel_symmetric"
    assert found["modules_to_not_convert"] == ["lm_head"]


def test_without_quantization_nothing_is_said_of_it() -> None:
    assert not [key for key in override() if "quant" in key]


def test_a_host_may_sample_in_place_of_the_device_for_log_probabilities_and_structured_outputs() -> None:
    assert override(engine_options=HOST_SAMPLES)["on_device_sampling_config"] is None


def test_several_nodes_draw_no_random_numbers_and_say_so() -> None:
    two = spec("neuron", TRN1, {"nodes": 2})
    assert override(parallelism={TRN1.name: {"nodes": 2}})["on_device_sampling_config"]["deterministic"] is True
    assert override()["on_device_sampling_config"]["deterministic"] is False
    note = render_version(two, TRN1).notes[-2]
    assert note.startswith("2 nodes must sample the same tokens, so NxDI samples without randomness")
    assert not any("sample" in note for note in render_version(replace(two, engine_options=HOST_SAMPLES), TRN1).notes)


def test_a_prompt_beyond_the_largest_bucket_is_refused_by_the_server_and_ends_no_engine() -> None:
    buckets = {"context_encoding_buckets": [512, 1024], "token_generation_buckets": [1536, 2048]}
    args = render_version(spec("neuron", TRN1, engine_options={"neuron_config": buckets}), TRN1).plan.args
    config = json.loads(args[args.index("--additional-config") + 1])
    assert config["max_prompt_length"] == config["override_neuron_config"]["max_context_length"] == 1024
    assert config["override_neuron_config"]["seq_len"] == 2048


def test_options_of_vllm_itself_still_go_through() -> None:
    args = render_version(spec("neuron", TRN1, engine_options={"seed": 7}), TRN1).plan.args
    assert args[args.index("--seed") + 1] == "7"


def test_the_plan_is_the_same_on_every_rank() -> None:
    assert "start_rank_id" not in json.dumps(override(parallelism={TRN1.name: {"nodes": 2}}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization": {"dtype": "int8"}}, r"quantization.checkpoints_path is None; it must be a text"),
        ({"quantization": {**INT8, "checkpoints_path": "q"}}, r"checkpoints_path is 'q'; it must be an absolute path"),
        ({"quantization": {**INT8, "dtype": "int4"}}, r"quantization.dtype is 'int4'; it must be one of int8, f8e4m3"),
        ({"quantization": {**INT8, "scheme": "x"}}, r"scheme is 'x'; it must be one of per_tensor_symmetric, per_ch"),
        ({"quantization": {**INT8, "unconverted": "lm_head"}}, r"unconverted is 'lm_head'; it must be a list of texts"),
        (
            {"quantization": {**INT8, "scheme": "per_tensor_symmetric", "unconverted": ["lm_head"]}},
            r"unconverted is \['lm_head'\]; with scheme per_tensor_symmetric NxDI quantizes all modules",
        ),
        ({"quantization": {"method": "fp8"}}, r"quantization.checkpoints_path is None"),
        ({"neuron": {"tp_degree": 8}}, r"neuron_config.tp_degree is 8; it follows from parallelism; state it there"),
        ({"neuron": {"is_medusa": True}}, r"is_medusa is True; it follows from speculation"),
        ({"neuron": {"context_buckets": [1]}}, r"names 'context_buckets'; NxDI would ignore it: .* did you mean c"),
        ({"neuron": {"zzz": 1}}, r"names 'zzz'; NxDI would ignore it: its NeuronConfig has no such key$"),
        ({"neuron": {"context_encoding_buckets": [512, 256]}}, r"an increasing list .* to context_length, 2048"),
        ({"neuron": {"token_generation_buckets": [4096]}}, r"it must be an increasing list"),
        ({"neuron": {"token_generation_buckets": []}}, r"it must be an increasing list"),
        ({"neuron": {"on_device_sampling_config": {"topk": 1}}}, r"names 'topk'; .* \(did you mean top_k"),
        ({"neuron": {"on_device_sampling_config": []}}, r"on_device_sampling_config is \[\]; it must be an object"),
        (
            {"neuron": {"on_device_sampling_config": {"dynamic": True}}, "parallelism": {TRN1.name: {"nodes": 2}}},
            r"on_device_sampling_config.deterministic is None; over 2 nodes it must be true, or .* null",
        ),
        (
            {"neuron": {"on_device_sampling_config": None}, "speculation": EAGLE},
            r"on_device_sampling_config is null; speculation samples on the device, so it must be an object",
        ),
        (
            {"neuron": {"on_device_sampling_config": {}}, "speculation": MEDUSA, "max_concurrency": 1},
            r"global_topk is None; with speculation.method medusa it must be 10",
        ),
        ({"neuron": {"mlp_cp_degree": 2}}, r"mlp_cp_degree is 2; over 1 it needs sequence_parallel_enabled"),
        ({"neuron": {"strided_context_parallel_kernel_enabled": True}}, r"it needs parallelism cp over 1"),
        ({"neuron": {"chunked_prefill_config": {}}}, r"the plugin does not support chunked prefill, leave it out"),
        ({"neuron": {"moe_tp_degree": 2, "moe_ep_degree": 8}}, r"moe_tp_degree x moe_ep_degree is 16; .* tp = 32"),
        ({"neuron": []}, r"engine_options.neuron_config is \[\]; it must be an object"),
        ({"engine_options": {"additional_config": "{}"}}, r"additional_config is '{}'; state it in engine_opt"),
        ({"engine_options": {"tensor_parallel_size": 2}}, r"tensor_parallel_size is 2; state it in parallelism"),
        ({"engine_options": {"enable_prefix_caching": "yes"}}, r"is 'yes'; it must be true or false"),
        ({"speculation": MEDUSA, "max_concurrency": 1, "neuron": {"async_mode": True}}, r"async_mode is True"),
        (
            {"engine_options": {"enable_prefix_caching": True, "neuron_config": {"token_generation_batches": [1]}}},
            r"token_generation_batches is stated; it goes neither with speculation nor with prefix caching",
        ),
        ({"artifact_uri": ""}, r"engine neuron needs artifact_uri"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(changes: dict[str, Any], message: str) -> None:
    given = dict(changes)
    if "neuron" in given:
        given["engine_options"] = {"neuron_config": given.pop("neuron")}
    with pytest.raises(InvalidVersion, match=message):
        override(**given)


def test_vllm_takes_a_quantization_by_its_own_name() -> None:
    args = render_version(spec("vllm", P5, quantization={"method": "fp8"}), INSTANCE_TYPES["p5.48xlarge"]).plan.args
    assert args[args.index("--quantization") + 1] == "fp8"


def test_the_simulator_has_no_quantization() -> None:
    with pytest.raises(InvalidVersion, match="engine sim does not support it, leave it empty"):
        render_version(spec("sim", LOCAL, quantization={"method": "fp8"}), LOCAL)


@pytest.mark.parametrize("name", EXAMPLES)
def test_everything_that_the_documentation_shows_is_rendered(name: str) -> None:
    given = example(name)
    ours = rendered(given)
    assert given.documented["flags"].items() <= ours.items()
    settings = given.documented.get("settings", NXDI_SETTINGS)
    override = ours["--additional-config"][settings]
    shown = given.documented[settings]
    assert {key: override.get(key) for key in shown} == shown
    speculative = given.documented.get("speculative_config", {})
    assert speculative.items() <= ours.get("--speculative-config", {}).items()


@pytest.mark.parametrize("name", EXAMPLES)
def test_nothing_else_is_rendered_than_the_golden_file_has(name: str) -> None:
    given = example(name)
    assert rendered(given) == given.rendered


def test_nxdi_is_configured_for_medusa_as_its_documentation_shows() -> None:
    given = example(NOT_SERVED)
    assert configured(given) == given.rendered["--additional-config"]["override_neuron_config"]
    shown = given.documented["override_neuron_config"]
    assert {key: configured(given).get(key) for key in shown} == shown


def test_the_examples_cover_what_a_version_can_state() -> None:
    assert {*EXAMPLES, NOT_SERVED} == {
        "buckets", "prefix_caching", "eagle", "context_and_data_parallel", "int8", "medusa", "two_nodes",
        "inf2", "native_buckets", "native_eagle3", "trn2",
    }  # fmt: skip


TRN2 = INSTANCE_TYPES["trn2.48xlarge"]
SMALL = INSTANCE_TYPES["trn1.2xlarge"]
NATIVE = {"neuron_target": "native-0.24"}
EAGLE3 = {"method": "eagle3", "tokens": 5, "draft_uri": "file:///models/draft", "draft_digest": "sha256:cd"}


def native(degrees: dict[str, Any] | None = None, **changes: Any) -> list[str]:
    neuron = {"neuron_config": changes.pop("neuron")} if "neuron" in changes else {}
    options = {**NATIVE, **neuron, **changes.pop("options", {})}
    return list(render_version(spec("neuron", TRN2, degrees, engine_options=options, **changes), TRN2).plan.args)


def test_machines_have_a_build_of_their_own_unless_a_version_names_another() -> None:
    assert target_on(spec("neuron", TRN1), TRN1) is NXDI_2_28
    assert target_on(spec("neuron", INF2), INF2) is NXDI_2_28
    assert target_on(spec("neuron", TRN2), TRN2) is NXDI_2_29
    assert target_on(spec("neuron", TRN2, engine_options=NATIVE), TRN2) is NATIVE_0_24
    assert target_on(spec("neuron", TRN2, engine_options={"neuron_target": "nxdi-2.28"}), TRN2) is NXDI_2_28


def test_the_native_plugin_is_told_what_is_stated_and_nothing_of_nxdi() -> None:
    args = native(neuron={"num_seqs_buckets": [1, 16], "on_device_sampling_config": None})
    config = json.loads(args[args.index("--additional-config") + 1])
    assert config == {"neuron_config": {"num_seqs_buckets": [1, 16], "on_device_sampling_config": None}}
    assert "--num-gpu-blocks-override" not in args
    assert "--additional-config" not in native()
    kept = native(options={"enable_prefix_caching": False, "block_size": 32, "num_gpu_blocks_override": 64})
    assert kept[kept.index("--num-gpu-blocks-override") + 1] == "64"
    assert refused_in_plan("neuron", args, {}) is None


def test_options_of_the_native_plugin_are_on_the_list_of_agents() -> None:
    check_engine_options(spec("neuron", TRN2, engine_options={**NATIVE, "neuron_config": {"ep_degree": 1}}), TRN2.name)
    harmful = ["--additional-config", json.dumps({"neuron_config": {"tensor_replacement": {"tensors_path": "/x"}}})]
    refused = refused_in_plan("neuron", harmful, {})
    assert refused is not None
    assert "has 'tensor_replacement' in neuron_config" in refused.message


@pytest.mark.parametrize(
    ("machine", "degrees", "changes", "message"),
    [
        (TRN1, {}, {"engine_options": {"neuron_target": "nxdi-2.27"}}, r"neuron_target is 'nxdi-2.27'; .*you mean n"),
        (TRN1, {}, {"engine_options": NATIVE}, r"has trainium, and that target is for trainium2: use nxdi-2.28"),
        (INF2, {}, {"engine_options": {"neuron_target": "nxdi-2.29"}}, r"for trainium2: use nxdi-2.28"),
        (INF2, {"nodes": 2}, {}, r"nodes is 2; inf2.48xlarge has no EFA, .* it must be 1, or the machine a trn1.32x"),
        (SMALL, {"nodes": 2}, {}, r"nodes is 2; trn1.2xlarge has no EFA"),
        (TRN2, {"nodes": 2, "tp": 64}, {"engine_options": NATIVE}, r"native-0.24 replaces .* be 1, or"),
        (
            TRN1,
            {},
            {"engine_options": {"neuron_config": {"enable_ve_data_parallel": True}}},
            r"enable_ve_data_parallel is True; target nxdi-2.28 does not support it; nxdi-2.29 does",
        ),
        (
            TRN1,
            {},
            {"engine_options": {"neuron_config": {"num_seqs_buckets": [16]}}},
            r"names 'num_seqs_buckets'; only target native-0.24 supports it",
        ),
    ],
)  # fmt: skip
def test_what_a_machine_or_a_build_cannot_do_is_refused(
    machine: Any, degrees: dict[str, int], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidVersion, match=message):
        render_version(spec("neuron", machine, degrees, **changes), machine)


@pytest.mark.parametrize(
    ("degrees", "changes", "message"),
    [
        ({"cp": 2}, {}, r"cp of parallelism is 2; on target native-0.24 it must be 1"),
        ({"dp": 2}, {}, r"dp of parallelism is 2"),
        ({}, {"quantization": {"dtype": "int8", "checkpoints_path": "/q"}}, r"not support INT8, so it must be empty"),
        ({}, {"speculation": {**EAGLE3, "method": "eagle"}}, r"method is 'eagle'; target native-0.24 supports eagle3"),
        ({}, {"speculation": {"method": "medusa", "heads": 1, "tree": [[0]]}}, r"is 'medusa'; vLLM's .* plugins"),
        ({}, {"speculation": EAGLE3, "neuron": {"on_device_sampling_config": None}}, r"it must be an object"),
        ({}, {"neuron": {"fused_qkv": True}}, r"names 'fused_qkv'; it must be one of apply_prefill_dcp"),
        ({}, {"neuron": {"debug_logits_dir": "/x"}}, r"names 'debug_logits_dir'"),
        ({}, {"neuron": {"attention_dp_size": 2}}, r"a cell has one engine, so it must be left out, as dp is 1"),
        ({}, {"neuron": {"enable_structured_outputs": "yes"}}, r"it must be true or false"),
        ({}, {"neuron": {"ep_degree": 2}}, r"ep_degree is 2; over 1 it needs engine_options.enable_expert_parallel"),
        ({}, {"neuron": {"quantization": "mxfp4"}}, r"its worker supports mxfp4 only on Trn3"),
        ({}, {"neuron": {"num_seqs_buckets": [8, 4]}}, r"it must be an increasing list"),
        ({}, {"neuron": {"num_seqs_buckets": [1, 8]}}, r"its largest must be max_concurrency, 16"),
        ({}, {"neuron": {"num_batched_tokens_buckets": [8]}}, r"state engine_options.max_num_batched_tokens"),
        (
            {},
            {"neuron": {"num_batched_tokens_buckets": [8]}, "options": {"max_num_batched_tokens": 512}},
            r"its largest must be engine_options.max_num_batched_tokens, 512",
        ),
        ({}, {"neuron": {"kv_segment_size_buckets": [512, 1024]}}, r"it must be a list with one of 512, 1024"),
        ({}, {"neuron": {"kv_segment_size_buckets": [700]}}, r"it must be a list with one of 512, 1024"),
        ({}, {"options": {"max_num_batched_tokens": 700}}, r"tokens is 700; below the context of 2048"),
        (
            {},
            {"context_length": 32768, "options": {"max_num_batched_tokens": 32768}},
            r"a context of 32768 is beyond 16384 tokens and read in segments",
        ),
        (
            {},
            {"options": {"max_num_batched_tokens": 512}, "neuron": {"num_batched_tokens_buckets": [128, 512]}},
            r"prompts are read in segments, so it must be \[512\]",
        ),
        ({}, {"neuron": {"decode_context_length_buckets": [1000]}}, r"a multiple of 128 below the context of 2048"),
        ({}, {"neuron": {"on_device_sampling_config": {"top_k": 1}}}, r"names 'top_k'; .* max_top_k"),
    ],
)  # fmt: skip
def test_what_the_native_plugin_would_not_take_is_refused(
    degrees: dict[str, int], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidVersion, match=message):
        native(degrees, **changes)


def render(neuron: dict[str, Any], **changes: Any) -> None:
    options = {"neuron_config": neuron, **changes.pop("options", {})}
    render_version(spec("neuron", TRN1, {"tp": 8}, engine_options=options, **changes), TRN1)


@pytest.mark.parametrize(
    ("neuron", "message"),
    [
        ({"cast_type": "other"}, r"cast_type is 'other'; it must be config or as-declared"),
        ({"attention_dtype": "float32"}, r"attention_dtype is 'float32'; another type .* needs cast_type as-declared"),
        ({"activation_quantization_type": "x"}, r"activation_quantization_type is 'x'; it must be dynamic or static"),
        (
            {"activation_quantization_type": "dynamic", "mlp_kernel_enabled": True},
            r"it conflicts with mlp_kernel_enabled and quantized_mlp_kernel_enabled",
        ),
        ({"rmsnorm_quantize_kernel_enabled": True}, r"it needs quantized_mlp_kernel_enabled"),
        ({"qkv_cte_nki_kernel_fuse_rope": True}, r"it needs qkv_kernel_enabled and qkv_nki_kernel_enabled"),
        (
            {"attn_block_cte_nki_kernel_enabled": True},
            r"and out_proj_kernel_enabled true, and attn_kernel_enabled not f",
        ),
        ({"attn_block_tkg_nki_kernel_enabled": True}, r"it needs qkv_kernel_enabled or qkv_nki_kernel_enabled"),
        (
            {"attn_tkg_nki_kernel_enabled": True, "flash_decoding_enabled": True},
            r"attn_tkg_nki_kernel_enabled is True; it conflicts with flash_decoding_enabled",
        ),
        ({"attn_block_tkg_nki_kernel_cache_update": True}, r"it needs attn_block_tkg_nki_kernel_enabled"),
        ({"k_cache_transposed": True, "flash_decoding_enabled": True}, r"it conflicts with flash_decoding_enabled"),
        ({"is_full_model_shuffled": True}, r"it needs is_mxfp4_compute or is_eagle_draft"),
        ({"token_generation_batches": [4, 32]}, r"its largest must be at most max_concurrency"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(neuron: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidVersion, match=message):
        render(neuron)


def test_int8_beside_a_kernel_of_qkv_names_what_stays_as_it_is() -> None:
    int8 = {"dtype": "int8", "checkpoints_path": "/q"}
    with pytest.raises(InvalidVersion, match=r"quantized is True; with qkv_kernel_enabled .* needs quantization.uncon"):
        render({"qkv_kernel_enabled": True}, quantization=int8)
    render({"qkv_kernel_enabled": True}, quantization={**int8, "unconverted": ["lm_head"]})


@pytest.mark.parametrize(
    "neuron",
    [
        {"attention_dtype": "float32", "cast_type": "as-declared"},
        {"attn_block_tkg_nki_kernel_enabled": True, "qkv_nki_kernel_enabled": True},
        {"attn_tkg_builtin_kernel_enabled": True},
        {"activation_quantization_type": "static"},
        {"token_generation_batches": [4, 16]},
        {"k_cache_transposed": True},
    ],
)
def test_what_goes_together_is_rendered(neuron: dict[str, Any]) -> None:
    render(neuron)
