"""Versions whose cells continue each other's streams."""

from dataclasses import replace
from typing import Any

import pytest

from engine_agent.protocol.engine_options import OPTIONS
from lab.versions import LOCAL, P5, spec
from models_registry.versions.planning.answers import PACE, answers_name
from models_registry.versions.planning.spec import HeadCounts

VLLM = spec("vllm", P5, {"nodes": 2, "tp": 2}, engine_options={"dtype": "float16", "max_num_seqs": 8})
SIM = spec("sim", LOCAL, artifact_uri="", artifact_digest="", engine_options={"decode_step_ms": 20})


@pytest.mark.parametrize("spec_of_engine", [VLLM, SIM])
def test_names_checks_and_limits_do_not_change_an_answer(spec_of_engine: Any) -> None:
    changed = replace(
        spec_of_engine,
        version="4",
        max_concurrency=32,
        ready_timeout_s=30.0,
        golden_prompts=(("2 + 2 =", "4"),),
        heads=HeadCounts(),
        allowances={"vllm": ("--x",)},
    )
    assert answers_name(changed) == answers_name(spec_of_engine) != ""


def test_the_pace_of_an_engine_does_not_change_an_answer() -> None:
    assert answers_name(replace(SIM, engine_options={"decode-step-ms": 5, "step_jitter": 0})) == answers_name(SIM)
    paced = {"dtype": "float16", "max-num-batched-tokens": 512}
    assert answers_name(replace(VLLM, engine_options=paced)) == answers_name(VLLM)


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "other"},
        {"engine": "sglang"},
        {"engine_build": "vllm-0.33"},
        {"artifact_uri": "s3://models/llama-4"},
        {"artifact_digest": "sha256:cd"},
        {"context_length": 4096},
        {"parallelism": {P5.name: {"nodes": 2, "tp": 4}}},
        {"engine_options": {"dtype": "bfloat16"}},
        {"engine_options": {"dtype": "float16", "reasoning_parser": "qwen3"}},
        {"engine_env": {"VLLM_ATTENTION_BACKEND": "FLASHINFER"}},
        {"speculation": {"method": "ngram", "tokens": 3}},
        {"quantization": {"method": "fp8"}},
        {"adapters": ({"name": "tuned", "artifact_uri": "s3://a", "artifact_digest": "sha256:1"},)},
        {"modalities": ("image",)},
        {"by_type": {P5.name: {"engine_options": {"dtype": "bfloat16"}}}},
    ],
)
def test_anything_else_makes_other_answers(changes: dict[str, Any]) -> None:
    assert answers_name(replace(VLLM, **changes)) not in ("", answers_name(VLLM))


@pytest.mark.parametrize(
    "changes",
    [
        {"artifact_digest": ""},
        {"adapters": ({"name": "tuned", "artifact_uri": "s3://a"},)},
        {"by_type": {P5.name: {"artifact_uri": "s3://b"}}},
        {"by_type": {"no-such-type": {}}},
        {"parallelism": {}},
    ],
)
def test_a_version_with_unnamed_contents_answers_like_no_other(changes: dict[str, Any]) -> None:
    assert answers_name(replace(VLLM, **changes)) == ""


def test_options_that_pace_an_engine_exist() -> None:
    for engine, names in PACE.items():
        assert names <= OPTIONS[engine]
