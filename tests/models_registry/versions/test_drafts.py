"""Drafts may change until they are validated, and versions in use never change. Versions that cannot be served are not
registered. Releases and retirements need an operator, and retirement an unused version.
"""

from typing import Any

import pytest

from fleet.cells.models import Cell
from fleet.deployments.models import Deployment
from fleet.deployments.planner import UpdatePolicy, policy_as_json
from fleet.reconcile.planning.states import CellState, RolloutState
from fleet.rollouts.models import Rollout
from kernel.models import Event
from kernel.refusals import Conflict, InvalidInput
from models_registry.instance_types.planner import INSTANCE_TYPES
from models_registry.versions.models import Model, ModelVersion
from models_registry.versions.planning.spec import InvalidVersion
from models_registry.versions.services.drafts import (
    draft_change,
    draft_create,
    draft_delete,
    model_create,
    version_lock,
    version_register,
    version_release,
    version_retire,
)
from models_registry.versions.services.validation import validation_start
from tests.fleet import rows
from tests.fleet.rows import NOW
from tests.models_registry.rows import draft, stored

pytestmark = pytest.mark.django_db


def change(row: ModelVersion, revision: int | None = None, **columns: Any) -> ModelVersion:
    return draft_change(version_id=row.pk, columns=columns, revision=revision, actor="bob", now=NOW)


def test_a_model_is_created_once() -> None:
    model_create(name="toy", description="a toy", actor="ada", now=NOW)
    with pytest.raises(Conflict, match="model 'toy' already exists"):
        model_create(name="toy", description="another", actor="ada", now=NOW)
    assert [event.message for event in Event.objects.all()] == ["toy created by ada"]


def test_a_draft_is_stored_with_who_made_it() -> None:
    row = draft()
    assert (row.reference, row.state, row.reason, row.revision) == ("toy@1", "draft", "drafted by ada", 1)
    event = Event.objects.get()
    assert (event.kind, event.actor, event.detail) == ("version.drafted", "ada", {"version": "toy@1"})


def test_a_draft_takes_what_it_leaves_unsaid_from_the_version_that_it_is_based_on() -> None:
    stored("released", "1", context_length=512, artifact_uri="file:///a")
    row = draft("2", based_on="toy@1", max_concurrency=4)
    assert (row.context_length, row.artifact_uri, row.max_concurrency) == (512, "file:///a", 4)
    assert (row.state, row.engine, row.reason) == ("draft", "sim", "drafted by ada from toy@1")


@pytest.mark.parametrize(
    ("changes", "field", "rule"),
    [
        ({"model": "llama"}, "model", "exists"),
        ({"based_on": "toy@9"}, "based_on", "exists"),
        ({"columns": {"engine": "vlm"}}, "engine", "choice"),
    ],
)
def test_a_draft_that_cannot_be_is_refused_by_name(changes: dict[str, Any], field: str, rule: str) -> None:
    rows.version()
    plain: dict[str, Any] = {"model": "sim-70b", "version": "9", "based_on": "", "columns": {"engine": "sim"}}
    with pytest.raises(InvalidInput) as refused:
        draft_create(**{**plain, **changes}, actor="ada", now=NOW)
    assert (refused.value.field, refused.value.rule) == (field, rule)
    assert not ModelVersion.objects.filter(version="9").exists()


def test_a_name_means_one_version_for_ever() -> None:
    draft()
    with pytest.raises(Conflict, match="toy already has a version '1'"):
        draft()


def test_a_draft_is_changed_and_says_what_of_it() -> None:
    changed = change(draft(), context_length=4096, engine="sim")
    assert (changed.context_length, changed.revision, changed.reason) == (4096, 2, "changed by bob: context_length")
    assert ModelVersion.objects.get().context_length == 4096


def test_a_change_that_changes_nothing_is_none() -> None:
    row = draft()
    assert change(row, engine="sim").revision == 1
    assert not Event.objects.filter(kind="version.changed").exists()


def test_a_change_of_an_older_revision_is_refused() -> None:
    row = draft()
    change(row, revision=1, context_length=4096)
    with pytest.raises(Conflict, match="toy@1 is at revision 2, not 1; read it again"):
        change(row, revision=1, context_length=8192)


def test_a_change_that_breaks_a_rule_changes_nothing() -> None:
    row = draft()
    with pytest.raises(InvalidInput, match="it must be file:///absolute/path"):
        change(row, context_length=4096, artifact_uri="http://x")
    assert ModelVersion.objects.get().context_length == 2048


@pytest.mark.parametrize("state", ["validated", "released", "retired"])
def test_nothing_but_a_draft_changes_is_validated_or_goes(state: str) -> None:
    row = stored(state)
    with pytest.raises(Conflict, match=f"toy@1 is {state}; only a draft can be changed"):
        change(row, context_length=4096)
    with pytest.raises(Conflict, match="only a draft can be deleted"):
        draft_delete(version_id=row.pk, actor="bob", now=NOW)
    with pytest.raises(Conflict, match="only a draft can be validated"):
        validation_start(version_id=row.pk, actor="bob", now=NOW)


def test_a_draft_goes_with_its_validations() -> None:
    row = draft()
    validation_start(version_id=row.pk, actor="ada", now=NOW)
    draft_delete(version_id=row.pk, actor="bob", now=NOW)
    assert not ModelVersion.objects.exists()
    with pytest.raises(Conflict, match="the version was deleted"):
        draft_delete(version_id=row.pk, actor="bob", now=NOW)


def test_a_draft_that_somebody_uses_stays_as_it_is() -> None:
    row = draft()
    rows.deployment()
    Deployment.objects.update(model_version=row)
    with pytest.raises(Conflict, match="toy@1 is in use by deployment sim-70b; it cannot be changed"):
        change(row, context_length=4096)
    with pytest.raises(Conflict, match="it cannot be deleted"):
        draft_delete(version_id=row.pk, actor="bob", now=NOW)


SERVABLE: dict[str, Any] = {
    "engine": "vllm",
    "artifact_uri": "file:///weights",
    "artifact_digest": "sha256:1",
    "attention_heads": 12,
    "kv_heads": 4,
    "parallelism": {"local.cpu": {"nodes": 2, "tp": 2}},
    "speculation": {"method": "ngram", "tokens": 3},
}


def register(**changes: Any) -> ModelVersion:
    model = Model.objects.create(name="smollm2", created_at=NOW)
    return version_register(model=model, version="1", machines=INSTANCE_TYPES, now=NOW, **{**SERVABLE, **changes})


def test_a_version_that_can_be_served_is_stored_as_it_was_said() -> None:
    stored = ModelVersion.objects.get(pk=register().pk)
    assert stored.spec().speculation == {"method": "ngram", "tokens": 3}
    assert (stored.attention_heads, stored.kv_heads, stored.layers) == (12, 4, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallelism": {}}, r"smollm2@1: parallelism is empty; it must name an instance type"),
        (
            {"parallelism": {"a1": {}}},
            r"smollm2@1: parallelism: unknown instance type 'a1'; `switchyard get instance-types` lists the known ones",
        ),
        ({"parallelism": {"local.cpu": {"tp": 2}}}, r"local.cpu.tp is 2; .* do not fit: at most 1, or nodes = 2"),
        ({"attention_heads": 9}, r"local.cpu.tp is 2; it must divide 9 attention heads: no value fits 2 nodes"),
        ({"speculation": {"method": "mtp"}}, r"speculation.method is 'mtp'; on engine vllm it must be one of"),
    ],
)
def test_a_version_that_cannot_be_served_is_refused_whole(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidVersion, match=message):
        register(**changes)
    assert not ModelVersion.objects.exists()


def release(row: ModelVersion, why: str = "a week on canaries") -> ModelVersion:
    return version_release(version_id=row.pk, why=why, actor="ada", now=NOW)


def retire(row: ModelVersion, why: str = "superseded") -> ModelVersion:
    return version_retire(version_id=row.pk, why=why, actor="ada", now=NOW)


def test_a_validated_version_is_released_with_a_reason() -> None:
    row = release(stored("validated"))
    assert (row.state, row.reason, row.state_since) == ("released", "released by ada: a week on canaries", NOW)
    event = Event.objects.get(kind="version.released")
    assert (event.message, event.tone, event.actor) == ("toy@1 is released by ada: a week on canaries", "ok", "ada")
    assert event.detail == {"version": "toy@1", "was": "validated"}


@pytest.mark.parametrize("state", ["draft", "released", "retired"])
def test_only_what_is_validated_can_be_released(state: str) -> None:
    with pytest.raises(Conflict, match=f"toy@1 is {state}; release needs one that is validated"):
        release(stored(state))


@pytest.mark.parametrize("state", ["validated", "released"])
def test_what_nobody_uses_can_be_retired(state: str) -> None:
    assert retire(stored(state)).state == "retired"


@pytest.mark.parametrize("state", ["draft", "retired"])
def test_only_what_was_validated_can_be_retired(state: str) -> None:
    with pytest.raises(Conflict, match=f"toy@1 is {state}; retire needs one that is released or validated"):
        retire(stored(state))


def test_a_reason_is_asked_for() -> None:
    with pytest.raises(InvalidInput, match="why should the version be released"):
        release(stored("validated"), why="  ")


def test_a_version_of_a_deployment_is_not_retired() -> None:
    row = stored("released")
    rows.deployment()
    Deployment.objects.update(model_version=row)
    with pytest.raises(Conflict, match="toy@1 is in use by deployment sim-70b; it cannot be retired"):
        retire(row)
    assert ModelVersion.objects.get(pk=row.pk).state == "released"


@pytest.mark.parametrize("side", ["from_version", "to_version"])
def test_neither_end_of_an_active_rollout_is_retired(side: str) -> None:
    row = stored("released")
    ends = {"from_version": rows.version("1"), "to_version": rows.version("2"), side: row}
    rollout = Rollout.objects.create(
        deployment=rows.deployment(),
        **ends,
        reason="r",
        region_order=[],
        policy=policy_as_json(UpdatePolicy()),
        actor="a",
        created_at=NOW,
        state_since=NOW,
    )
    with pytest.raises(Conflict, match=f"in use by rollout {rollout.pk} of sim-70b"):
        retire(row)
    Rollout.objects.update(state=RolloutState.SUCCEEDED.value)
    assert retire(row).state == "retired"


def test_a_version_of_a_live_cell_is_not_retired() -> None:
    row = stored("released")
    for number in range(7):
        rows.cell(f"cell-{number}", model_version=row)
    with pytest.raises(Conflict, match=r"in use by cell cell-0, .*, cell cell-4, 2 more; it cannot be retired"):
        retire(row)
    Cell.objects.update(state=CellState.STOPPED.value)
    assert retire(row).state == "retired"


@pytest.mark.parametrize(
    ("state", "allow_unreleased", "holds"),
    [
        ("released", False, True),
        ("validated", True, True),
        ("validated", False, False),
        ("draft", True, False),
        ("retired", True, False),
    ],
)
def test_what_is_about_to_be_used_must_be_fit_for_it(state: str, allow_unreleased: bool, holds: bool) -> None:
    row = stored(state)
    if holds:
        assert version_lock(version_id=row.pk, allow_unreleased=allow_unreleased) == row
    else:
        with pytest.raises(Conflict, match=f"toy@1 is {state} now; it cannot be rolled out"):
            version_lock(version_id=row.pk, allow_unreleased=allow_unreleased)
