"""States of versions, the rules for fields of a draft, and the requirements of validation."""

import re
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from engine_agent.protocol.messages import Artifact
from lab.versions import LOCAL, P5, spec
from models_registry.instance_types.planner import INSTANCE_TYPES
from models_registry.versions.planning.lifecycle import (
    VERSION_ALLOWED,
    VERSION_TONE,
    BrokenRule,
    VersionState,
    artifacts_of,
    check_draft,
    evaluate_version,
    may_be_rolled_out,
    states_before,
)

ORDER = list(VersionState)


def test_every_state_says_where_it_goes_and_how_it_feels() -> None:
    assert set(VERSION_ALLOWED) == set(VERSION_TONE) == set(VersionState)


@pytest.mark.parametrize(("state", "to"), list(product(VersionState, VersionState)))
def test_no_version_goes_back(state: VersionState, to: VersionState) -> None:
    if to in VERSION_ALLOWED[state]:
        assert ORDER.index(to) > ORDER.index(state)
        assert state in states_before(to)


@pytest.mark.parametrize(
    ("state", "plainly", "with_the_flag"),
    [("draft", False, False), ("validated", False, True), ("released", True, True), ("retired", False, False)],
)
def test_released_versions_may_be_rolled_out_and_validated_ones_on_request(
    state: str, plainly: bool, with_the_flag: bool
) -> None:
    assert may_be_rolled_out(VersionState(state), allow_unreleased=False) is plainly
    assert may_be_rolled_out(VersionState(state), allow_unreleased=True) is with_the_flag


DIGEST = "sha256:" + "0" * 64
DRAFT = spec("vllm", LOCAL, artifact_uri="file:///weights", artifact_digest=DIGEST)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"artifact_uri": "", "artifact_digest": ""},
        {"artifact_digest": ""},
        {"parallelism": {}},
        {"parallelism": {"nowhere.yet": {"nodes": 2, "within": 1}}},
        {"parallelism": {"local.cpu": {"tp": 2}}},
        {"golden_prompts": (("2 + 2 =", "4"),)},
        {"golden_waiver": "a toy"},
        {"engine_options": {"seed": None, "enforce_eager": True, "tensor_parallel_size": 2}},
        {"engine": "neuron", "engine_options": {"neuron_config": {"buckets": [1]}}},
        {"engine_options": {"trust_remote_code": True}, "allowances": {"vllm": ["--trust-remote-code"]}},
        {"engine_env": {"LD_PRELOAD": "libtcmalloc.so"}, "allowances": {"vllm": ["LD_PRELOAD"]}},
    ],
)
def test_what_is_unfinished_is_no_mistake(changes: dict[str, Any]) -> None:
    check_draft(replace(DRAFT, **changes))


@pytest.mark.parametrize(
    ("changes", "field", "rule", "message"),
    [
        ({"engine": "vlm"}, "engine", "choice", r"engine is 'vlm'; .* \(did you mean vllm\?\)"),
        ({"artifact_uri": "http://x"}, "artifact_uri", "place", "it must be file:///absolute/path or s3://"),
        ({"artifact_digest": "sha256:ab"}, "artifact_digest", "digest", "64 hexadecimal digits, or empty"),
        ({"artifact_uri": ""}, "artifact_digest", "place", "artifact_digest is set without artifact_uri"),
        ({"parallelism": {"a": {"tq": 1}}}, "parallelism", "readable", "names 'tq'"),
        ({"parallelism": {"a": {"tp": 0}}}, "parallelism", "readable", "it must be a whole number from 1"),
        ({"speculation": {"method": "mtp"}}, "speculation", "readable", "on engine vllm it must be one of"),
        ({"quantization": {"method": ""}}, "quantization", "readable", "a text that is not empty"),
        ({"engine_options": {"a": [1]}}, "engine_options.a", "type", "it must be text, a number or true/false"),
        ({"engine_env": {"1A": "x"}}, "engine_env", "name", "does not start with a digit"),
        (
            {"engine_options": {"trust_remote_code": True}},
            *("engine_options.trust_remote_code", "allowed", "an admin can allow it"),
        ),
        ({"engine_options": {"max-num-seq": 2}}, "engine_options.max-num-seq", "allowed", "nearest .* --max-num-seqs"),
        ({"engine_options": {"load_format": "pt"}}, "engine_options.load_format", "value", "auto, dummy, safetensors"),
        ({"engine_options": {"dtype": "--uds"}}, "engine_options.dtype", "value", "a value cannot begin with -"),
        ({"engine_env": {"LD_PRELOAD": "/x.so"}}, "engine_env.LD_PRELOAD", "allowed", "the variable LD_PRELOAD"),
        (
            {"engine_env": {"PYTHONPATH": "/x"}, "allowances": {"vllm": ["PYTHONPATH"]}},
            *("engine_env.PYTHONPATH", "allowed", "which the agent sets itself"),
        ),
        ({"golden_prompts": (("p", "e"),) * 17}, "golden_prompts", "count", "17 golden prompts; the limit is 16"),
        (
            {"golden_prompts": (("p", "e"),), "golden_waiver": "none needed"},
            *("golden_waiver", "either", "empty one of the two"),
        ),
        ({"engine_options": {"a": {"b": "\x00"}}}, "engine_options", "nul", "has a NUL character"),
        ({"engine_env": {"A": "\x00"}}, "engine_env", "nul", "has a NUL character"),
    ],
)
def test_a_mistake_is_named_with_its_field_and_rule(
    changes: dict[str, Any], field: str, rule: str, message: str
) -> None:
    with pytest.raises(BrokenRule, match=message) as raised:
        check_draft(replace(DRAFT, **changes))
    assert (raised.value.field, raised.value.rule) == (field, rule)


GOOD = spec("vllm", P5, artifact_uri="file:///weights", golden_prompts=(("2 + 2 =", "4"),))


@pytest.mark.parametrize("changes", [{}, {"golden_prompts": (), "golden_waiver": "random weights answer nothing"}])
def test_a_version_that_runs_somewhere_and_can_be_asked_something_is_fine(changes: dict[str, Any]) -> None:
    judged = evaluate_version(replace(GOOD, **changes), INSTANCE_TYPES)
    assert (judged.objection, judged.problems) == ("", {P5.name: ""})


def test_one_instance_type_is_enough_and_the_others_say_why_not() -> None:
    elsewhere = replace(GOOD, parallelism={P5.name: {}, LOCAL.name: {"tp": 2}, "own.gpu": {}})
    judged = evaluate_version(elsewhere, INSTANCE_TYPES)
    assert judged.objection == ""
    assert judged.problems[P5.name] == ""
    assert "local.cpu.tp is 2" in judged.problems[LOCAL.name]
    assert judged.problems["own.gpu"].startswith(
        "unknown instance type 'own.gpu'; `switchyard get instance-types` lists the known ones"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallelism": {}}, "parallelism names no instance type"),
        ({"parallelism": {LOCAL.name: {"tp": 2}, "own.gpu": {}}}, "local.cpu: .*; own.gpu: unknown instance type"),
        ({"golden_prompts": ()}, "it has no golden prompts; add some, or state the reason in golden_waiver"),
        ({"golden_prompts": (), "golden_waiver": "  "}, "it has no golden prompts"),
        ({"golden_prompts": (("p" * 200_000, "e"),)}, r"its engine plan has \d+ bytes; the limit of agents is 196608"),
        ({"engine_options": {"middleware": "a.b"}}, "may not be given the option --middleware"),
        ({"artifact_uri": ""}, "needs artifact_uri, the location of the weights"),
    ],
)
def test_what_is_missing_is_said(changes: dict[str, Any], message: str) -> None:
    assert re.search(message, evaluate_version(replace(GOOD, **changes), INSTANCE_TYPES).objection)


def test_a_draft_model_is_an_artifact_too() -> None:
    draft = {"method": "draft_model", "tokens": 3, "draft_uri": "file:///draft", "draft_digest": "sha256:cd"}
    found = artifacts_of(replace(GOOD, speculation=draft))
    assert found == (Artifact("file:///weights", "sha256:ab"), Artifact("file:///draft", "sha256:cd"))
    assert artifacts_of(replace(GOOD, engine="sim", artifact_uri="")) == ()
