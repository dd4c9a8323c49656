"""A version is rendered for the build that its machines can run, and what that build cannot do is refused by name."""

import json
from typing import Any

import pytest

from engine_agent.protocol.engine_options import refused_in_plan
from engine_agent.protocol.neuron_targets import NATIVE_0_24, NXDI_2_28, NXDI_2_29
from lab.versions import INF2, TRN1, spec
from models_registry.planning.engine_arguments import check_engine_options, render_version
from models_registry.planning.instance_types import INSTANCE_TYPES
from models_registry.planning.nxdi_rules import target_on
from models_registry.planning.version_spec import InvalidVersion

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
        (TRN1, {}, {"engine_options": NATIVE}, r"has trainium, and that target is for trainium2: nxdi-2.28 would do"),
        (INF2, {}, {"engine_options": {"neuron_target": "nxdi-2.29"}}, r"for trainium2: nxdi-2.28 would do"),
        (INF2, {"nodes": 2}, {}, r"nodes is 2; inf2.48xlarge has no EFA, .* it must be 1, or the machine a trn1.32x"),
        (SMALL, {"nodes": 2}, {}, r"nodes is 2; trn1.2xlarge has no EFA"),
        (TRN2, {"nodes": 2, "tp": 64}, {"engine_options": NATIVE}, r"native-0.24 puts vLLM's own executor .* be 1, or"),
        (
            TRN1,
            {},
            {"engine_options": {"neuron_config": {"enable_ve_data_parallel": True}}},
            r"enable_ve_data_parallel is True; target nxdi-2.28 does not know it yet; nxdi-2.29 does",
        ),
        (
            TRN1,
            {},
            {"engine_options": {"neuron_config": {"num_seqs_buckets": [16]}}},
            r"names 'num_seqs_buckets'; only target native-0.24 has it",
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
        ({}, {"quantization": {"dtype": "int8", "checkpoints_path": "/q"}}, r"has no INT8, so it must be empty"),
        ({}, {"speculation": {**EAGLE3, "method": "eagle"}}, r"method is 'eagle'; target native-0.24 has eagle3"),
        ({}, {"speculation": {"method": "medusa", "heads": 1, "tree": [[0]]}}, r"method is 'medusa'; vLLM's plugins"),
        ({}, {"speculation": EAGLE3, "neuron": {"on_device_sampling_config": None}}, r"it must be an object"),
        ({}, {"neuron": {"fused_qkv": True}}, r"names 'fused_qkv'; it must be one of apply_prefill_dcp"),
        ({}, {"neuron": {"debug_logits_dir": "/x"}}, r"names 'debug_logits_dir'"),
        ({}, {"neuron": {"attention_dp_size": 2}}, r"a cell has one engine, so it must be left out, as dp is 1"),
        ({}, {"neuron": {"enable_structured_outputs": "yes"}}, r"it must be true or false"),
        ({}, {"neuron": {"ep_degree": 2}}, r"ep_degree is 2; over 1 it needs engine_options.enable_expert_parallel"),
        ({}, {"neuron": {"quantization": "mxfp4"}}, r"its worker takes mxfp4 on Trn3 alone"),
        ({}, {"neuron": {"num_seqs_buckets": [8, 4]}}, r"it must be a rising list"),
        ({}, {"neuron": {"num_seqs_buckets": [1, 8]}}, r"its largest must be max_concurrency, 16"),
        ({}, {"neuron": {"num_batched_tokens_buckets": [8]}}, r"state engine_options.max_num_batched_tokens"),
        (
            {},
            {"neuron": {"num_batched_tokens_buckets": [8]}, "options": {"max_num_batched_tokens": 512}},
            r"its largest must be engine_options.max_num_batched_tokens, 512",
        ),
        ({}, {"neuron": {"kv_segment_size_buckets": [512, 1024]}}, r"it must be a list of one of 512, 1024"),
        ({}, {"neuron": {"kv_segment_size_buckets": [700]}}, r"it must be a list of one of 512, 1024"),
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
