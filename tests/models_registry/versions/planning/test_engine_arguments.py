"""A model version renders to the same plan everywhere, or to an error that names the field."""

from dataclasses import replace
from typing import Any

import pytest

from engine_agent.protocol.messages import Artifact
from models_registry.instance_types.planner import INSTANCE_TYPES
from models_registry.versions.planning.engine_arguments import check_engine_options, nodes_per_cell, render_engine_plan
from models_registry.versions.planning.spec import InvalidVersion, VersionSpec

SPEC = VersionSpec(
    model="llama",
    version="3",
    engine="vllm",
    artifact_uri="file:///weights",
    artifact_digest="sha256:ab",
    context_length=2048,
    max_concurrency=16,
    ready_timeout_s=120.0,
    parallelism={"local.cpu": {"nodes": 1}, "trn1.32xlarge": {"nodes": 2}},
    engine_options={"enforce_eager": True, "kv_cache_memory_bytes": 1024, "seed": None, "disable_log_stats": False},
    engine_env={"OMP_NUM_THREADS": "1"},
    golden_prompts=(("The capital of France is", "Paris"),),
)

LOCAL = INSTANCE_TYPES["local.cpu"]


def test_a_vllm_version_renders_flags_in_a_stable_order() -> None:
    plan = render_engine_plan(SPEC, LOCAL)
    assert plan.args == (
        *("--enable-prompt-tokens-details", "--enforce-eager", "--kv-cache-memory-bytes", "1024"),
        *("--max-model-len", "2048", "--max-num-seqs", "16"),
    )
    assert plan.artifact == Artifact("file:///weights", "sha256:ab")
    assert (plan.served_model, plan.max_concurrency, plan.ready_timeout_s) == ("llama", 16, 120.0)
    assert plan.env == {"OMP_NUM_THREADS": "1"}
    assert [golden.prompt for golden in plan.golden] == ["The capital of France is"]


def test_options_of_the_version_win_over_what_follows_from_it() -> None:
    plan = render_engine_plan(replace(SPEC, engine_options={"max_num_seqs": 4}), LOCAL)
    assert plan.args == ("--enable-prompt-tokens-details", "--max-model-len", "2048", "--max-num-seqs", "4")
    quiet = render_engine_plan(replace(SPEC, engine_options={"enable_prompt_tokens_details": False}), LOCAL)
    assert "--enable-prompt-tokens-details" not in quiet.args


def test_a_version_that_asks_for_priority_scheduling_gets_it() -> None:
    plan = render_engine_plan(replace(SPEC, engine_options={"scheduling_policy": "priority"}), LOCAL)
    assert plan.args[-2:] == ("--scheduling-policy", "priority")


def test_the_plan_names_what_admins_allow_and_the_version_uses() -> None:
    allowed = ("--middleware", "--trust-remote-code", "LD_PRELOAD", "PYTHONPATH")
    env = {"LD_PRELOAD": "x", "PYTHONPATH": "y"}
    spec = replace(SPEC, engine_options={"trust_remote_code": True}, engine_env=env, allowances={SPEC.engine: allowed})
    assert render_engine_plan(spec, LOCAL).widened == ("--trust-remote-code", "LD_PRELOAD")


@pytest.mark.parametrize("spelled", ["speculative_config", "speculative-config"])
def test_no_spelling_gets_around_the_field_that_states_an_option(spelled: str) -> None:
    with pytest.raises(InvalidVersion, match="state it in speculation"):
        render_engine_plan(replace(SPEC, engine_options={spelled: '{"method": "custom_class"}'}), LOCAL)


def test_a_cell_of_two_machines_gets_the_degree_of_the_whole_cell() -> None:
    spec = replace(SPEC, parallelism={"local.cpu": {"nodes": 2, "tp": 2}}, engine_options={})
    assert render_engine_plan(spec, LOCAL).args[-2:] == ("--tensor-parallel-size", "2")


def test_a_simulated_version_needs_no_artifact_and_no_context_flag() -> None:
    plan = render_engine_plan(replace(SPEC, engine="sim", artifact_uri="", engine_options={"seed": 7}), LOCAL)
    assert plan.artifact is None
    assert plan.args == ("--max-num-seqs", "16", "--seed", "7")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"engine": "tgi"},
            r"llama@3: engine is 'tgi'; it must be one of generic, .*, sim, tensorrt-llm, triton, vllm",
        ),
        ({"artifact_uri": ""}, r"llama@3: engine vllm needs artifact_uri"),
        (
            {"engine_options": {"scheduling_policy": "fifo"}},
            r"engine_options\.scheduling_policy is 'fifo'; it must be one of fcfs, priority",
        ),
        (
            {"engine_options": {"scheduling_policy": "priority", "batch_prompt_tokens": 8}},
            r"engine_options\.batch_prompt_tokens is 8; it must be a whole number of 16 or more, or 0 for off",
        ),
        (
            {"engine_options": {"batch_prompt_tokens": 64}},
            r"engine_options\.batch_prompt_tokens is 64; it needs engine_options\.scheduling_policy to be priority",
        ),
        ({"engine_options": {"stop": ["a"]}}, r"engine_options\.stop is list; it must be text, a number or true/false"),
    ],
)
def test_a_version_that_cannot_run_says_field_value_and_rule(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidVersion, match=message):
        render_engine_plan(replace(SPEC, **change), LOCAL)


LLAMA_CPP = replace(SPEC, engine="llama-cpp", engine_options={"threads": 2, "kv_unified": True}, engine_env={})


def test_a_llama_cpp_version_renders_its_slots_and_their_context() -> None:
    args = ("--context-length", "2048", "--kv-unified", "--parallel", "16", "--threads", "2")
    assert render_engine_plan(LLAMA_CPP, LOCAL).args == args
    assert render_engine_plan(replace(LLAMA_CPP, engine="triton"), LOCAL).args == args


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parallelism": {LOCAL.name: {"nodes": 2}}}, "nodes is 2; engine llama-cpp runs one process on one node"),
        ({"parallelism": {LOCAL.name: {"tp": 2}}}, "tp is 2; engine llama-cpp runs one process on one node"),
        ({"artifact_uri": ""}, "engine llama-cpp needs artifact_uri"),
        ({"max_concurrency": 257}, "max_concurrency is 257; on engine llama-cpp it must be .* from 1 to 256"),
        ({"engine_options": {"context-length": 9}}, r"engine_options\.context-length is 9; state it in context_length"),
        ({"engine_options": {"parallel": 9}}, r"engine_options\.parallel is 9; state it in max_concurrency"),
        ({"engine_options": {"threads": 0}}, "--threads is 0; it must be a whole number from 1 to 512"),
        ({"engine_options": {"cache_type_k": "q9"}}, "--cache-type-k is 'q9'; it must be one of bf16"),
        ({"engine_options": {"mmproj": "x"}}, "may not be given the option --mmproj"),
        ({"speculation": {"method": "ngram"}}, "engine llama-cpp does not support it, leave it empty"),
        ({"quantization": {"method": "fp8"}}, "engine llama-cpp does not support it, leave it empty"),
        ({"adapters": ({"name": "a", "artifact_uri": "file:///a"},)}, "engine llama-cpp does not support adapters"),
    ],
)
@pytest.mark.parametrize("engine", ["llama-cpp", "triton"])
def test_what_llama_cpp_and_triton_lack_is_refused_by_name(engine: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidVersion, match=message.replace("llama-cpp", engine)):
        validate(replace(LLAMA_CPP, engine=engine, **change))


def validate(spec: VersionSpec) -> None:
    render_engine_plan(spec, LOCAL)
    check_engine_options(spec, LOCAL.name)


def test_the_size_of_a_cell_depends_on_the_instance_type() -> None:
    assert nodes_per_cell(SPEC, "trn1.32xlarge") == 2
    with pytest.raises(InvalidVersion, match=r"no entry for instance type 'p5' \(it has: local.cpu, trn1.32xlarge\)"):
        nodes_per_cell(SPEC, "p5")
    with pytest.raises(InvalidVersion, match="nodes is 0; it must be a whole number from 1"):
        nodes_per_cell(replace(SPEC, parallelism={"p5": {"nodes": 0}}), "p5")


def test_modalities_are_part_of_the_plan_of_engines_that_serve_them() -> None:
    plan = render_engine_plan(replace(SPEC, modalities=("video", "image", "image")), LOCAL)
    assert plan.modalities == ("image", "video")
    with pytest.raises(InvalidVersion, match="modalities has 'smell'"):
        render_engine_plan(replace(SPEC, modalities=("smell",)), LOCAL)
    with pytest.raises(InvalidVersion, match="engine llama-cpp serve text alone"):
        render_engine_plan(replace(SPEC, engine="llama-cpp", engine_options={}, modalities=("image",)), LOCAL)
