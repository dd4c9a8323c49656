"""Drafts change until they are validated; nothing that is in use ever does."""

from typing import Any

import pytest

from fleet.models import Deployment
from kernel.models import Event
from kernel.refusals import Conflict, InvalidInput
from models_registry.models import ModelVersion
from models_registry.services.draft import draft_change, draft_create, draft_delete, model_create
from models_registry.services.validation import validation_start
from tests.fleet import rows
from tests.fleet.rows import NOW
from tests.models_registry.drafts import draft, stored

pytestmark = pytest.mark.django_db


def change(row: ModelVersion, revision: int | None = None, **columns: Any) -> ModelVersion:
    return draft_change(version_id=row.pk, columns=columns, revision=revision, actor="bob", now=NOW)


def test_a_model_is_created_once() -> None:
    model_create(name="toy", description="a toy", actor="ada", now=NOW)
    with pytest.raises(Conflict, match="there is a model 'toy' already"):
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
    with pytest.raises(Conflict, match="toy has a version '1' already"):
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
    with pytest.raises(Conflict, match="toy@1 is at revision 2, not 1; look at it again"):
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
    with pytest.raises(Conflict, match="the version is gone"):
        draft_delete(version_id=row.pk, actor="bob", now=NOW)


def test_a_draft_that_somebody_uses_stays_as_it_is() -> None:
    row = draft()
    rows.deployment()
    Deployment.objects.update(model_version=row)
    with pytest.raises(Conflict, match="toy@1 is in use by deployment sim-70b; it cannot be changed"):
        change(row, context_length=4096)
    with pytest.raises(Conflict, match="it cannot be deleted"):
        draft_delete(version_id=row.pk, actor="bob", now=NOW)
