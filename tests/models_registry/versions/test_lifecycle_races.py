"""Two concurrent transitions on real PostgreSQL: one wins, and the other gets the reason."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from fleet.rollouts.models import Rollout
from fleet.rollouts.services import rollout_propose, rollout_start
from kernel.refusals import Conflict
from models_registry.versions.models import ModelVersion
from models_registry.versions.services.drafts import draft_change, draft_delete, version_release, version_retire
from tests.fleet import rows
from tests.fleet.racing import race
from tests.fleet.rows import NOW
from tests.models_registry.rows import draft, stored

pytestmark = pytest.mark.django_db(transaction=True)

WHO: dict[str, Any] = {"actor": "ada", "now": NOW}


def refused(step: Callable[[], object], outcomes: list[str]) -> Callable[[], None]:
    """Runs the step and records its refusal."""

    def run() -> None:
        try:
            step()
        except Conflict as conflict:
            outcomes.append(str(conflict))

    return run


def test_of_two_releases_one_wins() -> None:
    row, outcomes = stored("validated"), list[str]()
    one = partial(version_release, version_id=row.pk, why="first", **WHO)
    other = partial(version_release, version_id=row.pk, why="second", **WHO)
    race(refused(one, outcomes), refused(other, outcomes))
    assert outcomes == ["toy@1 is released; release needs one that is validated"]
    assert ModelVersion.objects.get().reason == "released by ada: first"


def test_a_release_and_a_retirement_come_one_after_the_other() -> None:
    row, outcomes = stored("validated"), list[str]()
    one = partial(version_retire, version_id=row.pk, why="bad", **WHO)
    other = partial(version_release, version_id=row.pk, why="good", **WHO)
    race(refused(one, outcomes), refused(other, outcomes))
    assert outcomes == ["toy@1 is retired; release needs one that is validated"]


def test_of_a_change_and_a_deletion_the_later_one_sees_the_earlier() -> None:
    row, outcomes = draft(), list[str]()
    one = partial(draft_delete, version_id=row.pk, **WHO)
    other = partial(draft_change, version_id=row.pk, columns={"context_length": 1}, **WHO)
    race(refused(one, outcomes), refused(other, outcomes))
    assert outcomes == ["the version was deleted meanwhile"]


def test_of_two_changes_of_the_same_revision_one_wins() -> None:
    row, outcomes = draft(), list[str]()
    one = partial(draft_change, version_id=row.pk, columns={"context_length": 1}, revision=1, **WHO)
    other = partial(draft_change, version_id=row.pk, columns={"layers": 1}, revision=1, **WHO)
    race(refused(one, outcomes), refused(other, outcomes))
    assert outcomes == ["toy@1 is at revision 2, not 1; read it again"]
    assert ModelVersion.objects.get().layers is None


@pytest.mark.parametrize("first", ["rollout", "retirement"])
def test_a_version_is_never_rolled_out_and_retired(first: str) -> None:
    rows.deployment(cells=2)
    row, outcomes = rows.version("2"), list[str]()
    proposal = rollout_propose(deployment="sim-70b", version="sim-70b@2", policy={})
    steps = [
        refused(lambda: rollout_start(proposal=proposal, **WHO), outcomes),
        refused(lambda: version_retire(version_id=row.pk, why="bad", **WHO), outcomes),
    ]
    race(*(steps if first == "rollout" else reversed(steps)))
    row.refresh_from_db()
    (reason,) = outcomes
    if first == "rollout":
        assert "in use by rollout" in reason
        assert (row.state, Rollout.objects.count()) == ("released", 1)
    else:
        assert reason == "sim-70b@2 is retired now; it cannot be rolled out"
        assert (row.state, Rollout.objects.count()) == ("retired", 0)
