"""Versions move on by somebody's word, and not while they are needed."""

import pytest

from fleet.models import Cell, Deployment, Rollout
from fleet.planning.policy import UpdatePolicy, policy_as_json
from fleet.planning.states import CellState, RolloutState
from kernel.models import Event
from kernel.refusals import Conflict, InvalidInput
from models_registry.models import ModelVersion
from models_registry.services.lifecycle import version_hold, version_release, version_retire
from tests.fleet import rows
from tests.fleet.rows import NOW
from tests.models_registry.drafts import stored

pytestmark = pytest.mark.django_db


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
        assert version_hold(version_id=row.pk, allow_unreleased=allow_unreleased) == row
    else:
        with pytest.raises(Conflict, match=f"toy@1 is {state} by now; it cannot be rolled out"):
            version_hold(version_id=row.pk, allow_unreleased=allow_unreleased)
