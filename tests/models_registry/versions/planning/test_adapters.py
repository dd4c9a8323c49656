"""Adapters: checks of a version, and each engine's options."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine_agent.engines.registry import check_plan
from engine_agent.protocol.messages import Artifact, PlanAdapter
from lab.versions import LOCAL, P5, TRN1, spec
from models_registry.versions.planning.diff import diff_versions
from models_registry.versions.planning.engine_arguments import render_version
from models_registry.versions.planning.lifecycle import BrokenRule, artifacts_of, check_draft
from models_registry.versions.planning.spec import ADAPTERS_MAX, InvalidVersion, VersionSpec

DIGEST = f"sha256:{'7' * 64}"
TUNED = {"name": "acme/tuned", "artifact_uri": "s3://models/tuned", "artifact_digest": DIGEST, "rank": 20}
OTHER = {"name": "other", "artifact_uri": "file:///models/other", "artifact_digest": DIGEST}
GOLDEN = Path(__file__).with_name("plan_with_adapters.json")


def version(*adapters: dict[str, Any], engine: str = "vllm", **changes: Any) -> VersionSpec:
    return spec(engine, P5, adapters=adapters, **changes)


def test_the_plan_of_a_version_with_adapters_is_the_golden_one() -> None:
    plan = render_version(version(TUNED, OTHER, engine_options={"enforce_eager": True}), P5).plan
    assert json.loads(msgspec.json.encode(plan)) == json.loads(GOLDEN.read_text())
    check_plan(plan)


def test_the_engine_makes_room_for_the_greatest_rank_that_it_knows_above_theirs() -> None:
    def rank(*stated: int | None) -> str:
        adapters = [{**TUNED, "name": f"a{at}", "rank": each} for at, each in enumerate(stated)]
        args = render_version(version(*adapters), P5).plan.args
        return args[args.index("--max-lora-rank") + 1]

    assert [rank(1), rank(4, 9), rank(None), rank(8, None), rank(33), rank(300), rank(512)] == [
        *("1", "16", "16", "16", "64", "320", "512")
    ]


def test_a_version_may_say_how_many_run_at_once() -> None:
    many = [{**TUNED, "name": f"a{at}"} for at in range(ADAPTERS_MAX)]
    args = " ".join(render_version(version(*many), P5).plan.args)
    assert "--max-cpu-loras 32" in args
    assert "--max-loras 8" in args
    args = " ".join(render_version(version(*many, engine_options={"max_loras": 2}), P5).plan.args)
    assert "--max-loras 2" in args


def test_the_simulator_serves_adapters_that_have_no_weights() -> None:
    plan = render_version(spec("sim", LOCAL, {"nodes": 2}, adapters=({"name": "tuned"},)), LOCAL).plan
    assert plan.adapters == (PlanAdapter("tuned", None),)
    assert plan.args == ("--max-num-seqs", "16")


def test_their_weights_are_the_versions_to_validate_each_once() -> None:
    same = {**OTHER, "name": "same"}
    assert artifacts_of(version(TUNED, OTHER, same)) == (
        Artifact("s3://models/llama-3", "sha256:ab"),
        Artifact("s3://models/tuned", DIGEST),
        Artifact("file:///models/other", DIGEST),
    )


def test_a_difference_names_the_adapter_and_the_field() -> None:
    before, after = version(TUNED), version({**TUNED, "rank": 21}, OTHER)
    lines = [line for line in diff_versions(before, after, {P5.name: P5}).fields if line.change != "same"]
    assert [f"{line.name} {line.change}" for line in lines] == [
        "adapters.1.rank changed",
        "adapters.2.artifact_digest added",
        "adapters.2.artifact_uri added",
        "adapters.2.name added",
    ]


@pytest.mark.parametrize(
    ("adapters", "message"),
    [
        ([{**TUNED, "name": "a b"}], r"adapters\.1\.name is 'a b'; it must be 1 to 64 letters, digits and"),
        ([{**TUNED, "name": "a=b"}], r"adapters\.1\.name is 'a=b'"),
        ([{**TUNED, "name": "a" * 65}], r"adapters\.1\.name is 'a+'; it must be 1 to 64"),
        ([{**TUNED, "name": ""}], r"adapters\.1\.name is ''; it must be a text that is not empty"),
        ([TUNED, TUNED], r"adapters\.2\.name is 'acme/tuned'; another adapter of this version has that name"),
        ([{**TUNED, "name": "llama"}], r"name is 'llama'; it is the name of the model llama itself"),
        ([{"name": "x"}], r"artifact_uri is None; it must be the URI of the adapter's weights"),
        ([{**TUNED, "artifact_uri": "/etc"}], r"artifact_uri: '/etc' is not an artifact URI; it must be file:///"),
        ([{**TUNED, "artifact_uri": "file:///a/../b"}], r"leaves its folder"),
        ([{**TUNED, "artifact_digest": "sha256:ab"}], r"artifact_digest is 'sha256:ab'; it must be sha256: and 64"),
        ([{**TUNED, "rank": 0}], r"rank is 0; it must be a whole number from 1"),
        ([{**TUNED, "rank": 513}], r"rank is 513; it must be at most 512"),
        ([{**TUNED, "rank": True}], r"rank is True; it must be a whole number"),
        ([{**TUNED, "ranks": 8}], r"adapters\.1 names 'ranks'; .* \(did you mean rank\?\)"),
        ([{**TUNED, "name": f"a{at}"} for at in range(33)], r"adapters has 33; the limit is 32"),
    ],
)
def test_what_is_wrong_is_named(adapters: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(InvalidVersion, match=message):
        render_version(version(*adapters), P5)
    with pytest.raises(BrokenRule, match=message) as broken:
        check_draft(version(*adapters, artifact_digest=DIGEST))
    assert broken.value.field == "adapters"


def test_engines_and_cells_that_serve_none_say_so() -> None:
    with pytest.raises(
        InvalidVersion, match="engine neuron does not support adapters, sim and vllm do; leave adapters empty"
    ):
        render_version(spec("neuron", TRN1, adapters=(TUNED,)), TRN1)
    with pytest.raises(InvalidVersion, match="adapters has 1, and cells there have 2 nodes; adapters need"):
        render_version(spec("vllm", P5, {"nodes": 2, "tp": 2}, adapters=(TUNED,)), P5)


@pytest.mark.parametrize("option", ["enable_lora", "lora-modules", "max_lora_rank"])
def test_what_follows_from_the_adapters_is_stated_there(option: str) -> None:
    with pytest.raises(InvalidVersion, match=f"engine_options.{option} is '1'; state it in adapters"):
        render_version(version(TUNED, engine_options={option: "1"}), P5)
