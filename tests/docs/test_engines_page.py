"""The page on engines has no cell without evidence: each `real` and `rendered` has a test, and refused features are
`no`."""

import ast
from collections.abc import Callable, Mapping

import pytest

from models_registry.versions.planning.engine_arguments import ENGINES
from models_registry.versions.planning.roles import CONNECTORS
from models_registry.versions.planning.spec import ENGINES_WITH_ADAPTERS, InvalidVersion, read_quantization
from models_registry.versions.planning.speculation import METHODS_OF_ENGINE
from tests.docs.pages import text_of

AGENT, REGISTRY = "tests/engine_agent", "tests/models_registry/versions/planning"
VLLM = f"{AGENT}/engines/vllm/test_real_engine.py"
VLLM_TABLE = (VLLM, "test_requests_have_the_outcomes_that_they_have_with_the_simulator")
VLLM_PROXY = (VLLM, "test_the_proxy_controls_the_engine")
LLAMA_CPP = f"{AGENT}/engines/llama_cpp/test_real_engine.py"
ONE_NODE = f"{AGENT}/engines/one_node_cell.py"
TRITON = f"{AGENT}/engines/triton/test_real_engine.py"
SIM_TABLE = (f"{AGENT}/engines/sim/test_request_table.py", "test_every_request_has_the_outcome_that_it_has_with_vllm")
SIM_HTTP = f"{AGENT}/engines/sim/test_openai_http.py"
SIM_API = f"{AGENT}/engines/sim/test_api.py"
SIM_PROXY = f"{AGENT}/cell_proxy/test_with_the_simulator.py"
GENERIC = (f"{AGENT}/engines/generic/test_real_program.py", "test_a_program_serves_behind_the_cell_proxy")
SGLANG = (f"{AGENT}/engines/sglang/test_adapter.py", "test_sglangs_own_parser_takes_every_command_line")
TENSORRT_LLM = (
    f"{AGENT}/engines/tensorrt_llm/test_adapter.py",
    "test_the_documented_command_takes_the_command_line",
)
CUDA_ENGINES = f"{REGISTRY}/test_cuda_engines.py"
NEURON = (f"{AGENT}/engines/neuron/test_adapter.py", "test_a_rank_is_started_with_what_its_golden_file_has")
NEURON_DOCUMENTS = (
    f"{REGISTRY}/test_neuron_configuration.py",
    "test_everything_that_the_documentation_shows_is_rendered",
)

Evidence = tuple[str, str]
EVIDENCE: Mapping[str, Mapping[str, Evidence]] = {
    "completions": {
        "vllm": (VLLM, "greedy_text_is_what_the_weights_know"),
        "llama-cpp": (ONE_NODE, "it_serves_what_the_weights_know"),
        "triton": (ONE_NODE, "it_serves_what_the_weights_know"),
        "sim": (SIM_HTTP, "test_a_golden_prompt_gets_its_fixed_answer"),
        "generic": GENERIC,
        "neuron": NEURON,
        "sglang": SGLANG,
        "tensorrt-llm": TENSORRT_LLM,
    },
    "chat, streamed and whole": {
        "vllm": (VLLM, "a_chat_streams_tokens_and_ends_where_the_template_says"),
        "llama-cpp": (ONE_NODE, "a_chat_streams_tokens"),
        "triton": (ONE_NODE, "a_chat_streams_tokens"),
        "sim": (SIM_API, "test_a_streamed_chat_says_what_a_whole_one_says"),
        "neuron": NEURON,
        "sglang": SGLANG,
        "tensorrt-llm": TENSORRT_LLM,
    },
    "usage of every answered request, to the token": {
        "vllm": VLLM_PROXY,
        "llama-cpp": (LLAMA_CPP, "every_token_is_counted"),
        "triton": (TRITON, "every_token_is_counted"),
        "sim": (SIM_PROXY, "test_what_the_engine_counted_is_what_is_reported"),
        "generic": GENERIC,
        "neuron": NEURON,
    },
    "usage of a request whose client left, to the token": {
        "vllm": VLLM_PROXY,
        "sim": (f"{AGENT}/engines/sim/test_noted_usage.py", "test_of_an_answer_that_its_client_leaves"),
        "triton": (TRITON, "a_client_that_leaves_ends_its_request_and_its_tokens_are_known"),
    },
    "the engine's token counters compared with the proxy's": {
        "vllm": VLLM_PROXY,
        "llama-cpp": (LLAMA_CPP, "every_token_is_counted"),
        "triton": (TRITON, "every_token_is_counted"),
        "sim": (SIM_PROXY, "test_what_the_engine_counted_is_what_is_reported"),
        "sglang": (SGLANG[0], "test_the_proxy_reads_its_counters"),
        "tensorrt-llm": (TENSORRT_LLM[0], "test_the_proxy_reads_its_counters_with_and_without_their_prefix"),
    },
    "JSON schemas": {
        "vllm": VLLM_TABLE,
        "llama-cpp": (ONE_NODE, "a_schema_is_kept"),
        "triton": (ONE_NODE, "a_schema_is_kept"),
        "sim": SIM_TABLE,
    },
    "tools": {"vllm": VLLM_TABLE, "sim": SIM_TABLE},
    "log probabilities": {"vllm": VLLM_TABLE, "llama-cpp": (LLAMA_CPP, "probabilities_are_told"), "sim": SIM_TABLE},
    "several answers to a request": {"vllm": VLLM_PROXY, "sim": SIM_TABLE},
    "embeddings": {
        "llama-cpp": (LLAMA_CPP, "test_an_idle_engine_sleeps_and_wakes_for_a_request"),
        "sim": (SIM_API, "test_embeddings_are_vectors_in_both_encodings"),
    },
    "cells of several nodes": {
        "vllm": (
            f"{AGENT}/engines/vllm/cell/test_real_cell.py",
            "test_two_processes_give_the_text_of_one_with_speculation_until_a_follower_hangs",
        ),
        "sim": (
            f"{AGENT}/engines/sim/test_cell_death.py",
            "test_a_killed_follower_ends_the_cell_and_tells_every_client",
        ),
        "neuron": NEURON,
        "sglang": (SGLANG[0], "test_a_rank_is_started_with_what_its_golden_file_has"),
    },
    "LoRA adapters": {
        "vllm": (
            f"{AGENT}/engines/vllm/test_lora.py",
            "test_each_adapter_answers_as_its_weights_say_and_the_model_as_without_them",
        ),
        "sim": (SIM_API, "test_an_adapter_is_listed_under_its_model_and_answers_under_its_own_name"),
    },
    "speculation": {
        "vllm": (
            f"{AGENT}/engines/vllm/test_speculation.py",
            "test_a_draft_model_speeds_a_version_up_and_changes_no_text",
        ),
        "neuron": NEURON_DOCUMENTS,
    },
    "`quantization` of a version": {
        "vllm": (f"{REGISTRY}/test_neuron_configuration.py", "test_vllm_takes_a_quantization_by_its_own_name"),
        "neuron": NEURON_DOCUMENTS,
        "sglang": (CUDA_ENGINES, "test_an_sglang_version_states_degrees_lengths_concurrency_and_quantization"),
    },
    "prefill and decode cells": {
        "vllm": (
            f"{AGENT}/engines/vllm/continuation/test_real_roles.py",
            "test_a_stream_of_a_killed_decode_engine_continues_at_the_next_one",
        ),
        "sim": (f"{AGENT}/engines/sim/test_handover.py", "test_a_pair_answers_as_one_engine_does"),
    },
    "priorities of serving classes": {
        "vllm": VLLM_PROXY,
        "sim": (SIM_PROXY, "test_a_real_time_request_takes_the_place_of_batch_work"),
    },
    "streams continue at another cell": {
        "vllm": (
            f"{AGENT}/engines/vllm/continuation/test_real_continuation.py",
            "test_a_stream_continues_as_if_it_was_not_cut",
        ),
        "sim": (f"{AGENT}/engines/sim/test_continuing.py", "test_a_repeat_gives_the_same_events_and_usage"),
    },
    "cached prompts listed for routing": {
        "vllm": (VLLM, "test_the_index_is_what_the_engine_has_cached_and_tenants_find_their_own_prompts_only"),
        "sim": (SIM_PROXY, "test_the_proxy_lists_the_beginnings_of_what_the_engine_has_computed"),
    },
    "compile caches shared between nodes": {
        "vllm": (
            f"{AGENT}/engines/vllm/test_compile_cache.py",
            "test_a_second_node_starts_with_what_the_first_one_compiled",
        ),
        "neuron": (f"{AGENT}/engines/neuron/test_adapter.py", "test_neuron_gets_the_folders_of_its_compilers"),
    },
    "idle sleep": {
        "llama-cpp": (LLAMA_CPP, "test_an_idle_engine_sleeps_and_wakes_for_a_request"),
        "vllm": (CUDA_ENGINES, "test_warm_capacity_is_stated_in_the_options_of_vllm"),
    },
    "KV cache offloaded to host memory": {
        "vllm": (CUDA_ENGINES, "test_warm_capacity_is_stated_in_the_options_of_vllm"),
        "sglang": (CUDA_ENGINES, "test_tenants_share_a_cache_only_if_the_version_says_so"),
        "tensorrt-llm": (TENSORRT_LLM[0], "test_the_file_states_the_cache_and_turns_the_metrics_on"),
    },
    "KV cache stored in files": {
        "vllm": (
            f"{AGENT}/engines/vllm/test_kv_store.py",
            "test_an_engine_finds_what_a_killed_one_has_computed",
        ),
    },
    "a dead engine leaves the cell unhealthy": {
        "vllm": (VLLM, "when_its_core_is_killed_the_engine_is_unhealthy_and_ends"),
        "llama-cpp": (LLAMA_CPP, "a_dead_engine_is_seen"),
        "triton": (TRITON, "a_dead_model_is_seen"),
        "sim": (f"{AGENT}/engines/sim/test_cell_death.py", "test_a_frozen_follower_counts_as_dead"),
    },
}
"""Feature -> engine -> file and function of the test."""


def table() -> dict[str, dict[str, str]]:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text_of("docs/engines.md").splitlines()
        if line.startswith("|")
    ]
    engines = [name.strip("`") for name in rows[0][1:]]
    return {row[0]: dict(zip(engines, row[1:], strict=True)) for row in rows[2:]}


def test_every_engine_has_a_column_and_every_cell_one_of_three_words() -> None:
    assert all(cells.keys() == set(ENGINES) for cells in table().values())
    assert {word for cells in table().values() for word in cells.values()} == {"real", "rendered", "no"}


def test_a_cell_is_shown_where_there_is_a_test_and_nowhere_else() -> None:
    shown = {name: {engine for engine, word in cells.items() if word != "no"} for name, cells in table().items()}
    assert shown == {name: set(found) for name, found in EVIDENCE.items()}


def test_every_test_that_shows_it_exists() -> None:
    for path, name in {each for found in EVIDENCE.values() for each in found.values()}:
        functions = [node.name for node in ast.parse(text_of(path)).body if isinstance(node, FUNCTIONS)]
        assert name in functions, f"{path} has no {name}"


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def test_what_runs_the_real_engine_is_real_and_nothing_else() -> None:
    for name, cells in table().items():
        for engine, evidence in EVIDENCE[name].items():
            is_planned = evidence[0].startswith(REGISTRY) or evidence[0].endswith("test_adapter.py")
            assert cells[engine] == ("rendered" if is_planned else "real"), (name, engine)


def refuses_quantization(engine: str) -> bool:
    try:
        read_quantization("m@1", engine, {"nonsense": True})
    except InvalidVersion as error:
        return "does not support it" in str(error)
    return False


@pytest.mark.parametrize(
    ("feature", "is_refused"),
    [
        ("LoRA adapters", lambda engine: engine not in ENGINES_WITH_ADAPTERS),
        ("speculation", lambda engine: not METHODS_OF_ENGINE[engine]),
        ("prefill and decode cells", lambda engine: engine not in CONNECTORS),
        ("`quantization` of a version", refuses_quantization),
    ],
)
def test_what_validation_refuses_is_no(feature: str, is_refused: Callable[[str], bool]) -> None:
    assert {engine: word == "no" for engine, word in table()[feature].items()} == {
        engine: is_refused(engine) for engine in ENGINES
    }
