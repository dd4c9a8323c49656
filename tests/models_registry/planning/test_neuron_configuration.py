"""What a version adds to NxDI's configuration is checked before a node compiles for an hour and then stops."""

import json
from dataclasses import replace
from typing import Any

import pytest

from lab.versions import LOCAL, P5, TRN1, spec
from models_registry.planning.engine_arguments import render_version
from models_registry.planning.instance_types import INSTANCE_TYPES
from models_registry.planning.version_spec import InvalidVersion

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
    assert note.startswith("2 nodes must sample alike, so NxDI draws no random numbers")
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
        ({"neuron": {"context_encoding_buckets": [512, 256]}}, r"it must be a rising list .* to context_length, 2048"),
        ({"neuron": {"token_generation_buckets": [4096]}}, r"it must be a rising list"),
        ({"neuron": {"token_generation_buckets": []}}, r"it must be a rising list"),
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
    with pytest.raises(InvalidVersion, match="engine sim has none, leave it empty"):
        render_version(spec("sim", LOCAL, quantization={"method": "fp8"}), LOCAL)
