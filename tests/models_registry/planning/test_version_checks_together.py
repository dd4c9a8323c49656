"""What a draft must show before anything of it is read."""

import re
from dataclasses import replace
from typing import Any

import pytest

from engine_agent.protocol.messages import Artifact
from lab.versions import LOCAL, P5, spec
from models_registry.planning.instance_types import INSTANCE_TYPES
from models_registry.planning.version_checks import artifacts_of, judge_version

GOOD = spec("vllm", P5, artifact_uri="file:///weights", golden_prompts=(("2 + 2 =", "4"),))


@pytest.mark.parametrize("changes", [{}, {"golden_prompts": (), "golden_waiver": "random weights answer nothing"}])
def test_a_version_that_runs_somewhere_and_can_be_asked_something_is_fine(changes: dict[str, Any]) -> None:
    judged = judge_version(replace(GOOD, **changes), INSTANCE_TYPES)
    assert (judged.objection, judged.problems) == ("", {P5.name: ""})


def test_one_instance_type_is_enough_and_the_others_say_why_not() -> None:
    elsewhere = replace(GOOD, parallelism={P5.name: {}, LOCAL.name: {"tp": 2}, "own.gpu": {}})
    judged = judge_version(elsewhere, INSTANCE_TYPES)
    assert judged.objection == ""
    assert judged.problems[P5.name] == ""
    assert "local.cpu.tp is 2" in judged.problems[LOCAL.name]
    assert judged.problems["own.gpu"].startswith(
        "there is no instance type 'own.gpu'; there are c7i.2xlarge, g6.12xlarge, inf2.48xlarge"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallelism": {}}, "parallelism names no instance type"),
        ({"parallelism": {LOCAL.name: {"tp": 2}, "own.gpu": {}}}, "local.cpu: .*; own.gpu: there is no instance type"),
        ({"golden_prompts": ()}, "it has no golden prompts; add some, or say in golden_waiver why it has none"),
        ({"golden_prompts": (), "golden_waiver": "  "}, "it has no golden prompts"),
        ({"golden_prompts": (("p" * 200_000, "e"),)}, r"its engine plan has \d+ bytes; agents take 196608"),
        ({"engine_options": {"middleware": "a.b"}}, "may not be given the option --middleware"),
        ({"artifact_uri": ""}, "needs artifact_uri, the place of the weights"),
    ],
)
def test_what_is_missing_is_said(changes: dict[str, Any], message: str) -> None:
    assert re.search(message, judge_version(replace(GOOD, **changes), INSTANCE_TYPES).objection)


def test_a_draft_model_is_an_artifact_too() -> None:
    draft = {"method": "draft_model", "tokens": 3, "draft_uri": "file:///draft", "draft_digest": "sha256:cd"}
    found = artifacts_of(replace(GOOD, speculation=draft))
    assert found == (Artifact("file:///weights", "sha256:ab"), Artifact("file:///draft", "sha256:cd"))
    assert artifacts_of(replace(GOOD, engine="sim", artifact_uri="")) == ()
