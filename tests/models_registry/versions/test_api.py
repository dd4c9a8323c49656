"""Model versions over HTTP: drafts, validation, release, retirement, and errors with reasons."""

from typing import Any

import pytest

from fleet.deployments.models import Deployment
from models_registry.artifacts.planner import ArtifactLimits
from models_registry.versions.models import ModelVersion, Validation
from models_registry.versions.services.validation import Slice, validations_advance
from tests.controlplane.api.client import bearer, rules
from tests.fleet import rows
from tests.models_registry.rows import SIM, draft, stored

pytestmark = [pytest.mark.django_db, pytest.mark.slow]

URL = "/api/v1/model-versions"


def post(path: str, body: dict[str, Any] | None = None) -> Any:
    return bearer("ada").post(f"{URL}{path}", body or {}, format="json")


def patch(reference: str, body: dict[str, Any]) -> Any:
    return bearer("ada").patch(f"{URL}/{reference}", body, format="json")


def detail(response: Any) -> str:
    assert response.status_code == 409, response.content
    return str(response.json()["detail"])


def test_a_draft_is_created_and_shows_what_a_cell_of_it_is() -> None:
    draft("1")
    made = post("", {"model": "toy", "version": "2", **SIM}).json()
    assert (made["id"], made["state"], made["tone"], made["revision"]) == ("toy@2", "draft", "idle", 1)
    assert made["reason"] == "drafted by ada"
    assert made["renderings"][0]["arguments"] == ["--decode-step-ms", "14", "--max-num-seqs", "16"]
    assert bearer().get(f"{URL}/toy@2").json() == made


def test_a_draft_may_be_based_on_another_version() -> None:
    stored("released", context_length=512)
    made = post("", {"model": "toy", "version": "2", "based_on": "toy@1", "max_concurrency": 4}).json()
    assert (made["context_length"], made["max_concurrency"], made["state"]) == (512, 4, "draft")


def test_adapters_are_written_shown_whole_and_taken_from_the_version_that_a_draft_is_based_on() -> None:
    draft("1")
    whole = {"name": "acme/tuned", "artifact_uri": "", "artifact_digest": "", "rank": None}
    assert post("", {"model": "toy", "version": "2", **SIM, "adapters": [{"name": "acme/tuned"}]}).json()[
        "adapters"
    ] == [whole]
    based = post("", {"model": "toy", "version": "3", "based_on": "toy@2"}).json()
    assert (based["adapters"], based["revision"]) == ([whole], 1)
    assert patch("toy@3", {"adapters": [whole], "revision": 1}).json()["revision"] == 1, "what was read changes nothing"
    assert bearer().get(f"{URL}/toy@3").json()["adapters"] == [whole]


def test_what_differs_by_instance_type_is_written_shown_and_taken_along() -> None:
    draft("1")
    by_type = {"p5.48xlarge": {"engine": "vllm", "artifact_uri": "file:///llama", "max_concurrency": 4}}
    both = {**SIM, "parallelism": {"local.cpu": {"nodes": 2}, "p5.48xlarge": {"tp": 1}}, "by_type": by_type}
    made = post("", {"model": "toy", "version": "2", **both}).json()
    assert made["by_type"] == by_type
    shown = [(one["instance_type"], one["engine"], one["max_concurrency"]) for one in made["renderings"]]
    assert shown == [("local.cpu", "sim", 16), ("p5.48xlarge", "vllm", 4)]
    based = post("", {"model": "toy", "version": "3", "based_on": "toy@2"}).json()
    assert based["by_type"] == by_type
    assert patch("toy@3", {"by_type": {}, "revision": 1}).json()["renderings"][1]["engine"] == "sim"


def test_a_draft_may_be_unfinished_and_says_what_is_wrong_where() -> None:
    draft("1")
    made = post("", {"model": "toy", "version": "2", "engine": "vllm", "parallelism": {"local.cpu": {}}}).json()
    assert made["renderings"][0]["problem"] == "toy@2: engine vllm needs artifact_uri, the location of the weights"


@pytest.mark.parametrize(
    ("fields", "broken"),
    [
        ({"model": "llama"}, {"model": "exists"}),
        ({"version": "a/b"}, {"version": "invalid"}),
        ({"version": "a@b"}, {"version": "invalid"}),
        ({"engine": "vlm"}, {"engine": "invalid_choice"}),
        ({"adapters": [{"name": "a b"}]}, {"adapters": "readable"}),
        ({"adapters": [{"name": "toy"}]}, {"adapters": "readable"}),
        ({"based_on": "toy@9"}, {"based_on": "exists"}),
        ({"contxt_length": 1}, {"contxt_length": "unknown"}),
        ({"context_length": 0}, {"context_length": "min_value"}),
        ({"artifact_uri": "http://x"}, {"artifact_uri": "place"}),
        ({"artifact_digest": "sha256:1"}, {"artifact_digest": "digest"}),
        ({"parallelism": {"local.cpu": {"tp": 0}}}, {"parallelism.local.cpu.tp": "min_value"}),
        ({"parallelism": {"local.cpu": {"tq": 1}}}, {"parallelism": "readable"}),
        ({"speculation": {"method": "ngram"}}, {"speculation": "readable"}),
        ({"engine_options": {"a": [1]}}, {"engine_options.a": "type"}),
        ({"engine_options": {"a": "\x00"}}, {"engine_options.a": "storable"}),
        ({"engine_env": {"A": None}}, {"engine_env.A": "null"}),
        ({"golden_prompts": [{"prompt": "a"}]}, {"golden_prompts.0.expect": "required"}),
        ({"golden_prompts": [{"prompt": "a", "expect": "b", "c": 1}]}, {"golden_prompts.0.c": "unknown"}),
        ({"golden_waiver": "none needed"}, {"golden_waiver": "either"}),
        ({"by_type": {"p5.48xlarge": {}}}, {"by_type": "readable"}),
        ({"by_type": {"local.cpu": {"engin": "vllm"}}}, {"by_type.local.cpu.engin": "unknown"}),
        ({"by_type": {"local.cpu": {"context_length": 9}}}, {"by_type.local.cpu.context_length": "unknown"}),
        (
            {"by_type": {"local.cpu": {"speculation": {"method": "ngram"}}}},
            {"by_type.local.cpu.speculation": "readable"},
        ),
        ({"by_type": {"local.cpu": {"artifact_uri": "x"}}}, {"by_type.local.cpu.artifact_uri": "place"}),
        ({"by_type": {"local.cpu": {"engine_options": {"ab": 1}}}}, {"by_type.local.cpu.engine_options.ab": "allowed"}),
    ],
)
def test_what_breaks_a_rule_is_named_with_its_field(fields: dict[str, Any], broken: dict[str, str]) -> None:
    draft("1")
    response = post("", {"model": "toy", "version": "2", **SIM, **fields})
    assert rules(response) == broken
    assert not ModelVersion.objects.filter(version="2").exists()


def test_an_engine_is_needed_unless_a_version_has_one() -> None:
    draft("1")
    assert rules(post("", {"model": "toy", "version": "2"})) == {"engine": "required"}


def test_a_name_is_taken_once() -> None:
    draft("1")
    fields = {"model": "toy", "version": "1", **SIM}
    assert detail(post("", fields)) == "toy already has a version '1'; names of versions are never reused"


def test_a_draft_is_edited_at_the_revision_that_was_looked_at() -> None:
    draft()
    edited = patch("toy@1", {"context_length": 4096, "revision": 1}).json()
    assert (edited["context_length"], edited["revision"], edited["engine"]) == (4096, 2, "sim")
    again = patch("toy@1", {"context_length": 8192, "revision": 1})
    assert detail(again) == "toy@1 is at revision 2, not 1; read it again"
    assert rules(patch("toy@1", {"state": "released"})) == {"state": "unknown"}


@pytest.mark.parametrize("state", ["validated", "released", "retired"])
def test_what_was_validated_is_immutable(state: str) -> None:
    stored(state)
    assert f"toy@1 is {state}; only a draft can be changed" in detail(patch("toy@1", {"context_length": 4096}))
    assert "only a draft can be deleted" in detail(bearer().delete(f"{URL}/toy@1"))
    assert "only a draft can be validated" in detail(post("/toy@1/validate"))


def test_a_draft_is_deleted_and_answers_what_it_was() -> None:
    draft()
    assert bearer().delete(f"{URL}/toy@1").json()["id"] == "toy@1"
    assert bearer().get(f"{URL}/toy@1").status_code == 404


def test_a_version_goes_its_whole_way() -> None:
    draft()
    fields = post("/toy@1/validate").json()
    assert (fields["state"], fields["validation"]["state"], fields["validation"]["actor"]) == (
        "draft",
        "running",
        "ada",
    )
    assert "is already being validated" in detail(post("/toy@1/validate"))
    validations_advance(Slice((), ArtifactLimits()))
    validated = bearer().get(f"{URL}/toy@1").json()
    assert (validated["state"], validated["validation"]["state"]) == ("validated", "passed")
    assert validated["validation"]["evidence"]["golden_prompts"] == 1
    released = post("/toy@1/release", {"why": "a week on canaries"}).json()
    assert (released["state"], released["tone"]) == ("released", "ok")
    assert released["reason"] == "released by ada: a week on canaries"
    assert post("/toy@1/retire", {"why": "superseded"}).json()["state"] == "retired"


def test_a_validation_that_failed_says_why() -> None:
    draft(golden_prompts=[])
    post("/toy@1/validate")
    validations_advance(Slice((), ArtifactLimits()))
    shown = bearer().get(f"{URL}/toy@1").json()
    assert (shown["state"], shown["validation"]["state"], shown["validation"]["tone"]) == ("draft", "failed", "bad")
    assert shown["validation"]["reason"].startswith("it has no golden prompts")


@pytest.mark.parametrize("action", ["release", "retire"])
def test_what_cannot_be_taken_back_needs_a_reason(action: str) -> None:
    stored("validated")
    assert rules(post(f"/toy@1/{action}")) == {"why": "required"}
    assert rules(post(f"/toy@1/{action}", {"why": " "})) == {"why": "blank"}


def test_steps_out_of_order_are_conflicts() -> None:
    draft()
    message = detail(post("/toy@1/release", {"why": "now"}))
    assert message == "toy@1 is draft; release needs one that is validated"
    assert "retire needs one that is released or validated" in detail(post("/toy@1/retire", {"why": "now"}))


def test_a_version_in_use_stays_and_says_for_whom() -> None:
    rows.deployment()
    Deployment.objects.update(model_version=stored("released"))
    message = detail(post("/toy@1/retire", {"why": "old"}))
    assert message == "toy@1 is in use by deployment sim-70b; it cannot be retired"


def test_only_the_last_validation_of_each_is_shown() -> None:
    for name in ("1", "2"):
        version = draft(name)
        for state in ("failed", "passed"):
            Validation.objects.create(
                version=version,
                version_revision=1,
                state=state,
                actor="ada",
                started_at=rows.NOW,
                seen_at=rows.NOW,
            )
    shown = bearer().get(URL).json()["results"]
    assert [version["validation"]["state"] for version in shown] == ["passed", "passed"]


def test_two_versions_are_compared() -> None:
    draft("1")
    draft("2", engine_options={"decode_step_ms": 12.5})
    found = bearer().get(f"{URL}/toy@2/diff", {"against": "toy@1"}).json()
    assert (found["before"], found["after"], found["same"]) == ("toy@1", "toy@2", False)
    line = {"before": 14, "after": 12.5, "change": "changed"}
    assert {"name": "engine_options.decode_step_ms", **line} in found["fields"]
    (kind,) = found["instance_types"]
    assert kind["change"] == "changed"
    assert {"name": "--decode-step-ms", "before": "14", "after": "12.5", "change": "changed"} in kind["arguments"]
    assert bearer().get(f"{URL}/toy@2/diff", {"against": "toy@2"}).json()["same"]


@pytest.mark.parametrize(
    ("query", "broken"),
    [
        ({}, {"against": "required"}),
        ({"against": "toy@9"}, {"against": "exists"}),
        ({"against": "toy@1", "with": "x"}, {"with": "unknown"}),
    ],
)
def test_a_comparison_with_nothing_is_refused(query: dict[str, str], broken: dict[str, str]) -> None:
    draft()
    assert rules(bearer().get(f"{URL}/toy@1/diff", query)) == broken


def test_a_comparison_of_nothing_is_not_found() -> None:
    draft()
    assert bearer().get(f"{URL}/toy@9/diff", {"against": "toy@1"}).status_code == 404
