"""Versions for SGLang and TensorRT-LLM: what renders, and what is refused by name."""

from dataclasses import replace
from typing import Any

import pytest

from lab.versions import LOCAL, P5, TRN1, spec
from models_registry.instance_types.planner import InstanceShape
from models_registry.versions.planning.engine_arguments import check_engine_options, render_engine_plan
from models_registry.versions.planning.roles import check_apart
from models_registry.versions.planning.spec import InvalidVersion

BOTH = ("sglang", "tensorrt-llm")


def test_an_sglang_version_states_degrees_lengths_concurrency_and_quantization() -> None:
    version = spec("sglang", P5, {"nodes": 4, "tp": 16, "pp": 2}, quantization={"method": "fp8"})
    assert render_engine_plan(version, P5).args == (
        *("--context-length", "2048", "--disable-radix-cache", "--enable-cache-report"),
        *("--max-running-requests", "16", "--pp-size", "2", "--quantization", "fp8", "--tp-size", "16"),
    )


def test_tenants_share_a_cache_only_if_the_version_says_so() -> None:
    shared = {"disable_radix_cache": False, "enable_hierarchical_cache": True, "hicache_size": 64}
    args = render_engine_plan(spec("sglang", P5, engine_options=shared), P5).args
    dashes = {name.replace("_", "-"): value for name, value in shared.items()}
    assert render_engine_plan(spec("sglang", P5, engine_options=dashes), P5).args == args
    assert "--disable-radix-cache" not in args
    assert args[2:5] == ("--enable-cache-report", "--enable-hierarchical-cache", "--hicache-size")
    assert "--enable-block-reuse" not in render_engine_plan(spec("tensorrt-llm", P5), P5).args


def test_a_tensorrt_llm_version_states_degrees_lengths_and_concurrency() -> None:
    assert render_engine_plan(spec("tensorrt-llm", P5), P5).args == (
        *("--max-batch-size", "16", "--max-seq-len", "2048", "--tp-size", "8"),
    )


@pytest.mark.parametrize(
    ("engine", "machine", "degrees", "change", "message"),
    [
        *(
            (each, LOCAL, {}, {}, f"engine is '{each}'; it runs on GPUs of NVIDIA, and local.cpu has cpu")
            for each in BOTH
        ),
        ("sglang", TRN1, {}, {}, "it runs on GPUs of NVIDIA, and trn1.32xlarge has trainium"),
        *((each, P5, {"dp": 2}, {}, f"dp is 2; engine {each} supports 1: add cells") for each in BOTH),
        *((each, P5, {"cp": 2}, {}, f"cp is 2; .* on engine {each} it must be 1") for each in BOTH),
        *((each, P5, {"tp": 7}, {}, "tp is 7; it must divide 64 attention heads") for each in BOTH),
        *((each, P5, {"tp": 16}, {}, "tp is 16; .* do not fit") for each in BOTH),
        ("tensorrt-llm", P5, {"nodes": 2}, {}, "nodes is 2; engine tensorrt-llm needs mpirun over several nodes"),
        ("sglang", P5, {"nodes": 2, "pp": 3, "tp": 4}, {}, "pp is 3; a stage is whole nodes, or a node whole stages"),
        *((each, P5, {}, {"artifact_uri": ""}, f"engine {each} needs artifact_uri") for each in BOTH),
        *((each, P5, {}, {"max_concurrency": 5000}, f"on engine {each} it must be .* to 4096") for each in BOTH),
        *((each, P5, {}, {"speculation": {"method": "ngram"}}, "does not support it, leave it empty") for each in BOTH),
        *((each, P5, {}, {"adapters": ({"name": "a"},)}, f"engine {each} does not support adapters") for each in BOTH),
        ("tensorrt-llm", P5, {}, {"quantization": {"method": "fp8"}}, "does not support it, leave it empty"),
        ("sglang", P5, {}, {"quantization": {"method": "fp9"}}, "quantization.method is 'fp9'; it must be one of "),
        ("sglang", P5, {}, {"engine_options": {"tp_size": 2}}, "tp_size is 2; state it in parallelism"),
        ("sglang", P5, {}, {"engine_options": {"context-length": 9}}, "state it in context_length"),
        ("tensorrt-llm", P5, {}, {"engine_options": {"max_seq_len": 9}}, "state it in context_length"),
        ("sglang", P5, {}, {"engine_options": {"dist_init_addr": "x"}}, "may not be given the option --dist-init-addr"),
        ("sglang", P5, {}, {"engine_options": {"kv_events_config": "{}"}}, "may not be given the option"),
        (
            *("sglang", P5, {}, {"engine_options": {"enable_hierarchical_cache": True}}),
            "enable_hierarchical_cache is true; it needs engine_options.disable_radix_cache to be false",
        ),
        (
            "tensorrt-llm",
            P5,
            {},
            {"engine_options": {"host_cache_gib": 8}},
            r"host_cache_gib .*enable_block_reuse to be true",
        ),
        ("sglang", P5, {}, {"engine_env": {"SGLANG_X": "1"}}, "may not be given the variable SGLANG_X"),
    ],
)
def test_what_these_engines_lack_is_refused_by_name(
    engine: str, machine: InstanceShape, degrees: dict[str, int], change: dict[str, Any], message: str
) -> None:
    version = replace(spec(engine, machine, degrees), **change)
    with pytest.raises(InvalidVersion, match=message):
        check_both(version, machine)


def check_both(version: Any, machine: InstanceShape) -> None:
    render_engine_plan(version, machine)
    check_engine_options(version, machine.name)


WARM = {"sleep_idle_seconds": 600, "sleep_level": 2, "kv_offloading_size": 64}


STORE = {"kv_store_size": 20, "kv_offloading_size": 2}


def test_warm_capacity_is_stated_in_the_options_of_vllm() -> None:
    version = spec("vllm", P5, engine_options=WARM)
    check_both(version, P5)
    args = render_engine_plan(version, P5).args
    assert args[1:3] == ("--kv-offloading-size", "64")
    assert args[-6:-2] == ("--sleep-idle-seconds", "600", "--sleep-level", "2")


@pytest.mark.parametrize(
    ("engine", "machine", "degrees", "options", "message"),
    [
        ("vllm", LOCAL, {}, {"sleep_idle_seconds": 600}, r"vLLM sleeps only on GPUs \(llama-cpp sleeps on a CPU\)"),
        ("vllm", LOCAL, {}, {"kv_offloading_size": 4}, "offloads its KV cache only from GPUs"),
        ("vllm", LOCAL, {}, {"kv_offloading_size": 4, "kv_store_size": None}, "offloads its KV cache only from GPUs"),
        (
            "vllm",
            P5,
            {"nodes": 2},
            {"sleep-idle-seconds": 600},
            "sleep_idle_seconds is 600; it needs cells of one node",
        ),
        ("vllm", P5, {"nodes": 2}, {"kv_offloading_size": 4}, "needs cells of one node, and cells there have 2"),
        ("vllm", P5, {}, {"sleep_level": 1}, "sleep_level is 1; it needs engine_options.sleep_idle_seconds"),
        ("vllm", P5, {}, {"kv_offloading_backend": "native"}, "needs engine_options.kv_offloading_size"),
        (
            *("vllm", P5, {}, {"kv_offloading_size": 4, "kv_offloading_backend": "lmcache"}),
            "it needs an LMCache server next to the engine, which agents do not start: use native",
        ),
        (
            "vllm",
            P5,
            {},
            {"sleep_idle_seconds": 600, "sleep_level": 3},
            "--sleep-level is 3; it must be .* from 1 to 2",
        ),
        ("vllm", P5, {}, {"sleep_idle_seconds": 0}, "--sleep-idle-seconds is 0; it must be a whole number"),
        ("vllm", P5, {}, {"kv_offloading_size": -1}, "--kv-offloading-size is -1"),
        ("vllm", P5, {}, {"enable_sleep_mode": True}, "may not be given the option --enable-sleep-mode"),
        ("neuron", TRN1, {}, {"sleep_idle_seconds": 600}, "engine neuron may not be given .* --sleep-idle-seconds"),
        ("neuron", TRN1, {}, {"kv_offloading_size": 4}, "engine neuron may not be given .* --kv-offloading-size"),
        *((each, P5, {}, {"sleep_idle_seconds": 9}, f"engine {each} may not be given the option") for each in BOTH),
        ("llama-cpp", LOCAL, {}, {"kv_offloading_size": 4}, "engine llama-cpp may not be given the option"),
        ("vllm", P5, {"nodes": 2}, {"kv_store_size": 4}, "kv_store_size is 4; it needs cells of one node"),
        ("vllm", P5, {}, {"kv_store_size": 0}, "--kv-store-size is 0; it must be a number from 0.1"),
        (
            "vllm",
            P5,
            {},
            {**STORE, "no_enable_prefix_caching": True},
            "needs the prefix cache, which the version",
        ),
        ("vllm", P5, {}, {**STORE, "enable_prefix_caching": False}, "needs the prefix cache, which the version"),
        ("vllm", P5, {}, {**STORE, "prefix_caching_hash_algo": "xxhash"}, "a store needs sha256 or sha256_cbor"),
        ("neuron", TRN1, {}, STORE, "engine neuron may not be given .* --kv-store-size"),
        *((each, P5, {}, STORE, f"engine {each} may not be given the option --kv-store-size") for each in BOTH),
        ("llama-cpp", LOCAL, {}, STORE, "engine llama-cpp may not be given the option --kv-store-size"),
    ],
)
def test_warm_capacity_that_an_engine_or_a_machine_lacks_is_refused_by_name(
    engine: str, machine: InstanceShape, degrees: dict[str, int], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidVersion, match=message):
        check_both(spec(engine, machine, degrees, engine_options=options), machine)


def test_a_store_of_kv_blocks_is_also_on_a_cpu() -> None:
    version = spec("vllm", LOCAL, engine_options=STORE)
    check_both(version, LOCAL)
    args = render_engine_plan(version, LOCAL).args
    assert args[1:5] == ("--kv-offloading-size", "2", "--kv-store-size", "20")
    drafts = replace(version, speculation={"method": "draft_model", "model": "small@1", "num_speculative_tokens": 3})
    with pytest.raises(InvalidVersion, match=r"speculation.method is 'draft_model', which has its own KV cache"):
        check_both(drafts, LOCAL)


@pytest.mark.parametrize("option", ["kv_offloading_size", "kv_store_size", "sleep_idle_seconds"])
def test_cells_that_hand_over_neither_sleep_nor_offload(option: str) -> None:
    version = spec("vllm", P5, engine_options={option: 600, "max_model_len": 2048})
    with pytest.raises(InvalidVersion, match=f"handover does not support engine_options.{option}"):
        check_apart(version, P5)
