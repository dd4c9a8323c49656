"""Memory: the arithmetic by kind of attention and degree, and what is refused for certain."""

from dataclasses import replace
from typing import Any

import pytest

from lab.checkpoints import CONFIGS
from lab.versions import LOCAL, P5, TRN1, spec
from models_registry.instance_types.planner import INSTANCE_TYPES, InstanceShape
from models_registry.versions.planning.checkpoint import Checkpoint, ModelShape, computed_weights, read_shape
from models_registry.versions.planning.lifecycle import evaluate_version
from models_registry.versions.planning.machines import Degrees
from models_registry.versions.planning.memory import GIB, MemoryEstimate, Source, estimate_memory
from models_registry.versions.planning.spec import HeadCounts
from tests.models_registry.versions.planning.test_checkpoint import DEEPSEEK_V3, LLAMA_8B, LLAMA_70B

SMOLLM2 = {
    **LLAMA_8B, "num_hidden_layers": 30, "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3,
    "intermediate_size": 1536, "vocab_size": 49152, "tie_word_embeddings": True,
}  # fmt: skip

DEVICE = "a device of p5.48xlarge has 73.60 GiB (80.00 GiB x gpu_memory_utilization 0.92)"


def checkpoint(config: dict[str, Any], *, from_headers: bool = True) -> Checkpoint:
    shape = read_shape(config)
    return Checkpoint(shape, replace(computed_weights(shape), from_headers=from_headers))


def estimate(
    config: dict[str, Any], degrees: Degrees, machine: InstanceShape = P5, engine: str = "vllm", **changes: Any
) -> MemoryEstimate:
    return estimate_memory(spec(engine, machine, **changes), checkpoint(config), degrees, machine)


@pytest.mark.parametrize(
    ("config", "degrees", "options", "kv_bytes"),
    [
        (SMOLLM2, Degrees(), {}, 23_040),
        (SMOLLM2, Degrees(), {"dtype": "float32"}, 46_080),
        ({**SMOLLM2, "num_key_value_heads": 4, "head_dim": 64}, Degrees(), {}, 30_720),
        (LLAMA_8B, Degrees(), {}, 131_072),
        (LLAMA_8B, Degrees(), {"kv_cache_dtype": "fp8"}, 65_536),
        (LLAMA_70B, Degrees(), {}, 327_680),
        (LLAMA_70B, Degrees(tp=8), {}, 40_960),
        (LLAMA_70B, Degrees(nodes=2, tp=16), {}, 40_960),
        (LLAMA_70B, Degrees(tp=4, pp=2), {}, 40_960),
        (DEEPSEEK_V3, Degrees(), {}, 70_272),
        (DEEPSEEK_V3, Degrees(tp=8), {}, 70_272),
    ],
)
def test_a_token_takes_what_vllm_says(
    config: dict[str, Any], degrees: Degrees, options: dict[str, Any], kv_bytes: int
) -> None:
    assert estimate(config, degrees, engine_options=options).kv_bytes_per_token == kv_bytes


def test_weights_are_shared_out_by_ranks_and_stages_and_norms_are_not() -> None:
    whole = estimate(LLAMA_70B, Degrees()).weights_bytes
    assert whole == 2 * 70_553_706_496
    norms = 2 * 8192 * 161
    assert estimate(LLAMA_70B, Degrees(tp=8)).weights_bytes == (whole - norms) // 8 + norms
    sixteen = estimate(LLAMA_70B, Degrees(nodes=2, tp=16)).weights_bytes
    copies = 2 * 80 * 2 * 8192 * 8 * 128 / 16  # 8 KV heads on 16 ranks: each has a copy
    assert sixteen == pytest.approx((whole - norms) / 16 + norms + copies, abs=2)
    vocabulary = 2 * 128256 * 8192
    assert estimate(LLAMA_70B, Degrees(pp=2)).weights_bytes == pytest.approx(whole / 2, rel=1e-4)
    tied = {**LLAMA_70B, "tie_word_embeddings": True}
    assert estimate(tied, Degrees()).weights_bytes == whole - vocabulary
    online = estimate(LLAMA_70B, Degrees(), quantization={"method": "fp8"}).weights_bytes
    assert online == (whole - norms - 2 * vocabulary) // 2 + norms + 2 * vocabulary


def test_a_window_limits_what_a_request_keeps() -> None:
    stated = {"kv_cache_memory_bytes": GIB, "max_num_batched_tokens": 1024}
    plain = estimate(dict(CONFIGS["gqa"]), Degrees(), LOCAL, context_length=8192, engine_options=stated)
    sliding = estimate(dict(CONFIGS["sliding"]), Degrees(), LOCAL, context_length=8192, engine_options=stated)
    blocks = 12 * 4 * 2 * 64 * 2 * 128
    assert plain.requests == pytest.approx(GIB // blocks / 64)
    assert sliding.requests == pytest.approx(GIB // blocks / (12 + 1))  # 512 - 1 + 1024 tokens, and a block
    hybrid = estimate(dict(CONFIGS["hybrid"]), Degrees(), LOCAL, context_length=8192, engine_options=stated)
    # Groups of 2 layers: one keeps everything, five slide.
    assert hybrid.requests == pytest.approx(GIB // (blocks / 6) / (64 + 5 * 13))


def test_every_line_has_a_source_and_says_how() -> None:
    found = estimate(LLAMA_70B, Degrees(tp=8), max_concurrency=256, context_length=8192)
    names = [line.name for line in found.lines]
    assert names == [
        "weights", "KV cache per token", "memory of a device", "usable by the engine", "overhead", "KV cache",
        "KV cache of one request", "tokens that fit", "requests that fit",
    ]  # fmt: skip
    assert all(line.how and line.source in Source for line in found.lines)
    by_name = {line.name: line for line in found.lines}
    left = by_name["usable by the engine"].value - found.weights_bytes - by_name["overhead"].value
    assert by_name["KV cache"].value == found.kv_bytes == left
    assert by_name["overhead"].source is Source.ESTIMATED
    assert found.notes == (
        "177.0 requests of 8,192 tokens fit at the same time; max_concurrency is 256, so long requests wait or are "
        "preempted",
    )


@pytest.mark.parametrize(
    ("config", "degrees", "machine", "engine", "changes", "message"),
    [
        (
            LLAMA_70B, {"tp": 1}, P5, "vllm", {},
            f"its weights need 131.42 GiB per device with tp = 1, and {DEVICE}; raise tp, or use larger devices",
        ),
        (
            DEEPSEEK_V3, {"tp": 8}, P5, "vllm", {},
            f"its weights need 157.92 GiB per device with tp = 8, and {DEVICE}; use more nodes, larger devices or quan",
        ),
        (
            LLAMA_8B, {"tp": 1}, P5, "vllm", {"context_length": 2**20},
            "weights of 14.96 GiB, 128.00 GiB of KV cache for one request of 1,048,576 tokens do not fit with tp = 1: ",
        ),
        (
            LLAMA_8B, {"tp": 8}, TRN1, "neuron", {"context_length": 32768, "max_concurrency": 64},
            "32.00 GiB of KV cache for max_concurrency = 64 requests of 32,768 tokens do not fit with tp = 8",
        ),
        (
            SMOLLM2, {"tp": 1}, LOCAL, "vllm", {"engine_options": {"kv_cache_memory_bytes": 2**20}},
            "one request of 2,048 tokens needs 0.04 GiB of KV cache, and the version states 0.00 GiB; state more",
        ),
        ({**LLAMA_8B, "num_hidden_layers": 4}, {"tp": 1, "pp": 5}, P5, "vllm", {}, "pp is 5; every stage needs a"),
        (
            {**LLAMA_8B, "max_position_embeddings": 8192}, {"tp": 1}, P5, "vllm", {"context_length": 8193},
            "context_length is 8193; it must be at most 8192, the model's max_position_embeddings, unless engine_env.",
        ),
        (SMOLLM2, {"tp": 2}, P5, "vllm", {}, "tp is 2; it must divide 9 attention heads: use one of 1, 3"),
    ],
)  # fmt: skip
def test_what_cannot_start_is_refused_with_its_arithmetic(
    config: dict[str, Any],
    degrees: dict[str, int],
    machine: InstanceShape,
    engine: str,
    changes: dict[str, Any],
    message: str,
) -> None:
    version = spec(engine, machine, degrees, heads=HeadCounts(), golden_waiver="none", **changes)
    found = evaluate_version(version, INSTANCE_TYPES, {version.artifact_uri: checkpoint(config)})
    assert message in found.problems[machine.name]
    assert message in found.objection


def test_only_what_is_certain_is_refused() -> None:
    one = spec("vllm", P5, {"tp": 1}, golden_waiver="none", heads=HeadCounts())
    for found in (checkpoint(LLAMA_70B, from_headers=False), checkpoint({**LLAMA_70B, "mamba_d_state": 16})):
        assert estimate_memory(one, found, Degrees(), P5).shortfall.startswith("its weights need")
        assert evaluate_version(one, INSTANCE_TYPES, {one.artifact_uri: found}).problems == {"p5.48xlarge": ""}
    # Weights and a request fit, but hardly with the overhead, which is an estimate.
    tight = spec("vllm", P5, {"tp": 1}, context_length=475_000, golden_waiver="none", heads=HeadCounts())
    hardly = estimate_memory(tight, checkpoint(LLAMA_8B), Degrees(), P5)
    assert "an estimated overhead of" in hardly.shortfall
    assert not hardly.is_certain
    local = spec("vllm", LOCAL, {}, golden_waiver="none", heads=HeadCounts())
    assert evaluate_version(local, INSTANCE_TYPES, {local.artifact_uri: checkpoint(LLAMA_70B)}).problems == {
        LOCAL.name: ""
    }


def test_cells_of_each_role_must_fit() -> None:
    roles = {"prefill": {"parallelism": {P5.name: {"tp": 1}}}, "decode": {}}
    apart = spec("vllm", P5, {"tp": 8}, roles=roles, golden_waiver="none", heads=HeadCounts())
    checkpoints = {apart.artifact_uri: checkpoint(LLAMA_70B)}
    assert "its weights need 131.42 GiB per device" in evaluate_version(apart, INSTANCE_TYPES, checkpoints).objection
    alike = replace(apart, roles={"prefill": {}, "decode": {}})
    assert evaluate_version(alike, INSTANCE_TYPES, checkpoints).objection == ""


def test_parts_that_are_not_counted_are_named() -> None:
    parts: dict[str, Any] = {"speculation": {"method": "eagle", "draft_uri": "s3://a/b"}, "adapters": ({"name": "a"},)}
    notes = estimate(LLAMA_8B, Degrees(), **parts).notes
    assert "not counted: its adapters, its draft model or heads" in notes


def test_unknown_memory_and_other_engines_are_not_checked() -> None:
    unknown = InstanceShape("own.gpu", "l4", cores=1)
    found = estimate(LLAMA_70B, Degrees(), unknown)
    assert (found.tokens, found.shortfall) == (0, "")
    assert found.notes == ("the memory of own.gpu is unknown, so nothing is checked against it",)
    sim = spec("sim", P5, {"tp": 1}, golden_waiver="none")
    assert evaluate_version(sim, INSTANCE_TYPES, {sim.artifact_uri: checkpoint(LLAMA_70B)}).problems == {
        "p5.48xlarge": ""
    }


@pytest.mark.parametrize("option", ["kv_offloading_size", "kv-offloading-size", "enable_sleep_mode"])
def test_options_that_a_cpu_lacks_are_refused_by_name(option: str) -> None:
    options, allowed = {option: 4}, {"vllm": [f"--{option.replace('_', '-')}"]}
    on_cpu = spec("vllm", LOCAL, engine_options=options, allowances=allowed, golden_waiver="none")
    problem = evaluate_version(on_cpu, INSTANCE_TYPES).problems[LOCAL.name]
    assert f"engine_options.{option} is 4; vLLM" in problem
    on_gpu = spec("vllm", P5, engine_options=options, allowances=allowed, golden_waiver="none")
    assert evaluate_version(on_gpu, INSTANCE_TYPES).problems == {P5.name: ""}


@pytest.mark.parametrize(
    ("options", "requests", "message"),
    [
        ({"dtype": "float64"}, 16, "engine_options.dtype is 'float64'; it must be one of auto, bfloat16, float, "),
        ({"gpu_memory_utilization": 1.5}, 16, "gpu_memory_utilization is 1.5; it must be over 0 and at most 1"),
        ({"gpu-memory-utilization": 0}, 16, "gpu_memory_utilization is 0; it must be over 0"),
        ({"max_num_batched_tokens": 256}, 300, "max_num_batched_tokens is 256; it must be at least 300, the concurr"),
        ({}, 5000, "max_concurrency is 5000; it must be at most 2048, the tokens of a step on local.cpu, or engine"),
        (
            {"max_num_batched_tokens": 256, "no_enable_chunked_prefill": True}, 16,
            "max_num_batched_tokens is 256; without chunked prefill it must be at least the context, 2048",
        ),
    ],
)  # fmt: skip
def test_values_that_vllm_refuses_are_refused_by_name(options: dict[str, Any], requests: int, message: str) -> None:
    version = spec("vllm", LOCAL, engine_options=options, max_concurrency=requests, golden_waiver="none")
    assert message in evaluate_version(version, INSTANCE_TYPES).problems[LOCAL.name]


def test_strange_options_do_not_break_the_arithmetic() -> None:
    strange = {"gpu_memory_utilization": "lots", "block_size": "0", "kv_cache_memory_bytes": "9" * 400, "dtype": []}
    env = {"VLLM_CPU_KVCACHE_SPACE": "many"}
    found = estimate(LLAMA_8B, Degrees(), LOCAL, engine_options=strange, engine_env=env)
    assert found.weights_bytes == 2 * 8_030_261_248


def test_a_shape_without_attention_keeps_nothing_per_token() -> None:
    shape = ModelShape("linear", 4, 64, 4, 4, 16, 128, 100, linear_layers=4, state_values=1000)
    found = estimate_memory(spec("vllm", P5), Checkpoint(shape, computed_weights(shape)), Degrees(), P5)
    assert found.kv_bytes_per_token == 0


def test_sglangs_share_is_of_weights_and_cache_and_tensorrts_of_what_is_free() -> None:
    weights = estimate(LLAMA_8B, Degrees()).weights_bytes
    stated = estimate(LLAMA_8B, Degrees(), engine="sglang", engine_options={"mem_fraction_static": 0.5})
    assert stated.kv_bytes == 40 * GIB - weights
    assert [line.how for line in stated.lines if line.name == "usable by the engine"] == [
        "mem_fraction_static 0.5 of it"
    ]
    free = estimate(LLAMA_8B, Degrees(), engine="sglang").kv_bytes
    quarter = {"kv_cache_free_gpu_memory_fraction": 0.25, "max_num_tokens": 8192}
    assert 70 * GIB < free + weights < 80 * GIB
    found = estimate(LLAMA_8B, Degrees(), engine="tensorrt-llm", engine_options=quarter).kv_bytes
    assert found == pytest.approx(free / 4, rel=0.01)


@pytest.mark.parametrize("engine", ["sglang", "tensorrt-llm"])
def test_versions_of_both_are_checked_against_their_checkpoint(engine: str) -> None:
    known = {"s3://models/llama-3": checkpoint(LLAMA_70B)}
    large = spec(engine, P5, {"tp": 1}, golden_waiver="none", heads=HeadCounts())
    assert "weights need 131.42 GiB" in evaluate_version(large, INSTANCE_TYPES, known).problems[P5.name]
    split = spec(engine, P5, {"tp": 3}, golden_waiver="none", heads=HeadCounts())
    assert "it must divide 64 attention heads" in evaluate_version(split, INSTANCE_TYPES, known).problems[P5.name]
    fits = spec(engine, P5, {"tp": 8}, golden_waiver="none", heads=HeadCounts())
    assert evaluate_version(fits, INSTANCE_TYPES, known).problems == {P5.name: ""}
