"""The disruption ledger on real PostgreSQL: charged and closed with the cell's steps, and never overspent in a race."""

from dataclasses import replace
from datetime import timedelta
from functools import partial

import pytest

from fleet.cells.models import Cell, Disruption
from fleet.cells.services import cell_drain, cell_drain_charged, cell_move, cell_start, cell_stop
from fleet.deployments.models import Deployment
from fleet.deployments.services.deployments import deployment_scale
from fleet.reconcile.planning.decisions import DrainCell, MoveCell, StartCell, StopCell
from fleet.reconcile.planning.states import CellState, DisruptionCause
from fleet.rollouts.services import (
    Proposal,
    rollout_abort,
    rollout_pause,
    rollout_propose,
    rollout_resume,
    rollout_start,
)
from kernel.transitions import StaleDecision
from models_registry.versions.models import VersionState
from tests.fleet import rows
from tests.fleet.racing import race
from tests.fleet.rows import NOW

pytestmark = pytest.mark.slow

LATER = NOW + timedelta(minutes=5)


def drain(cell: str, cause: DisruptionCause = DisruptionCause.ROLLOUT) -> None:
    cell_drain_charged(DrainCell(cell, 1, cause, "to be moved"), now=LATER)


def open_entries() -> list[tuple[str, str]]:
    return list(Disruption.objects.filter(closed_at=None).values_list("cell_id", "cause").order_by("cell_id"))


@pytest.fixture
def three_cells() -> None:
    rows.deployment(cells=3)
    for name in "abc":
        rows.cell(name, rows.node(f"n-{name}"))


@pytest.mark.django_db
@pytest.mark.usefixtures("three_cells")
def test_a_cell_goes_down_with_its_entry_and_the_next_one_may_not() -> None:
    drain("a")
    assert open_entries() == [("a", "rollout")]
    with pytest.raises(StaleDecision, match="cell b stays: 1 cells of the deployment are down on purpose"):
        drain("b")
    assert Cell.objects.get(id="b").state == "ready"


@pytest.mark.django_db
@pytest.mark.usefixtures("three_cells")
def test_what_runs_on_a_machine_that_ends_goes_without_leave_and_is_charged() -> None:
    drain("a")
    forced = DrainCell("b", 1, DisruptionCause.REPAIR, "its machine ends", forced=True)
    cell_drain_charged(forced, now=LATER)
    assert open_entries() == [("a", "rollout"), ("b", "repair")]
    with pytest.raises(StaleDecision):
        cell_drain_charged(forced, now=LATER)


@pytest.mark.django_db
@pytest.mark.usefixtures("three_cells")
def test_the_entry_is_open_until_the_cell_is_ready_again() -> None:
    drain("a")
    cell_start(StartCell("a", CellState.DRAINING, 1, ("n-a",), "drained", "sim-70b@1"), now=LATER)
    assert open_entries() == [("a", "rollout")]
    cell_move(MoveCell("a", CellState.STARTING, 2, CellState.READY, "ready"), now=LATER)
    assert open_entries() == []
    with pytest.raises(StaleDecision, match="2 of 3 cells in the region are available"):
        drain("b")


@pytest.mark.django_db
@pytest.mark.usefixtures("three_cells")
def test_the_entry_of_a_cell_that_ends_is_closed() -> None:
    deployment_scale(name="sim-70b", cells={"us-east-1": 2}, actor="ada", now=LATER)
    drain("a", DisruptionCause.SCALE)
    cell_stop(StopCell("a", CellState.DRAINING, 1, "drained"), now=LATER)
    assert open_entries() == []


@pytest.mark.django_db
@pytest.mark.usefixtures("three_cells")
def test_what_a_person_takes_down_counts_for_whatever_asks_next() -> None:
    cell_drain(cell_id="a", actor="ada", now=LATER)
    assert open_entries() == [("a", "operator")]
    with pytest.raises(StaleDecision):
        drain("b")


@pytest.mark.django_db
@pytest.mark.usefixtures("three_cells")
def test_a_start_carries_the_version_that_the_cell_runs_from_now_on() -> None:
    other = rows.version("2")
    drain("a")
    cell_start(StartCell("a", CellState.DRAINING, 1, ("n-a",), "drained", "sim-70b@2"), now=LATER)
    assert Cell.objects.get(id="a").model_version == other
    with pytest.raises(StaleDecision, match="no model version sim-70b@9"):
        cell_start(StartCell("a", CellState.STARTING, 2, ("n-a",), "x", "sim-70b@9"), now=LATER)


@pytest.mark.django_db
@pytest.mark.usefixtures("three_cells")
def test_a_rollouts_own_copy_of_the_policy_counts_while_it_is_active() -> None:
    rows.version("2", state=VersionState.RELEASED)
    proposal = rollout_propose(deployment="sim-70b", version="sim-70b@2", policy={"max_unavailable": 2})
    rollout_start(proposal=proposal, actor="ada", now=NOW)
    drain("a")
    drain("b")
    assert [cell for cell, _ in open_entries()] == ["a", "b"]


@pytest.mark.django_db
@pytest.mark.usefixtures("three_cells")
def test_a_rollout_that_was_superseded_or_aborted_meanwhile_takes_no_cell_down() -> None:
    rows.version("2", state=VersionState.RELEASED)
    rows.version("3", state=VersionState.RELEASED)
    first = rollout_start(proposal=_proposal("2"), actor="ada", now=NOW)
    decided = DrainCell("a", 1, DisruptionCause.ROLLOUT, "moves it to sim-70b@2", first.pk)
    second = rollout_start(proposal=_proposal("3"), actor="ada", now=NOW)
    with pytest.raises(StaleDecision, match=f"cell a stays: rollout {first.pk} is failed"):
        cell_drain_charged(decided, now=LATER)
    rollout_abort(rollout_id=second.pk, actor="ada", now=NOW)
    with pytest.raises(StaleDecision, match=f"rollout {second.pk} is failed"):
        cell_drain_charged(replace(decided, rollout=second.pk), now=LATER)
    assert Cell.objects.get(id="a").state == CellState.READY
    assert open_entries() == []


@pytest.mark.django_db
@pytest.mark.usefixtures("three_cells")
def test_a_drain_that_was_decided_just_before_a_pause_is_not_carried_out() -> None:
    rows.version("2", state=VersionState.RELEASED)
    rollout = rollout_start(proposal=_proposal("2"), actor="ada", now=NOW)
    decided = DrainCell("a", 1, DisruptionCause.ROLLOUT, "moves it to sim-70b@2", rollout.pk)
    rollout_pause(rollout_id=rollout.pk, actor="ada", now=NOW)
    with pytest.raises(StaleDecision, match=f"cell a stays: rollout {rollout.pk} is paused"):
        cell_drain_charged(decided, now=LATER)
    assert open_entries() == []
    rollout_resume(rollout_id=rollout.pk, actor="ada", now=NOW)
    cell_drain_charged(decided, now=LATER)
    assert open_entries() == [("a", "rollout")]


def _proposal(version: str) -> Proposal:
    return rollout_propose(deployment="sim-70b", version=f"sim-70b@{version}", policy={})


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("three_cells")
def test_two_reconcilers_cannot_spend_the_same_budget() -> None:
    assert race(partial(drain, "a"), partial(drain, "b")) == "StaleDecision"
    assert open_entries() == [("a", "rollout")]


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("three_cells")
def test_a_deployment_that_grows_meanwhile_keeps_its_cells() -> None:
    Deployment.objects.update(update_policy={"max_unavailable": 1})

    def grow() -> None:
        deployment_scale(name="sim-70b", cells={"us-east-1": 5}, actor="ada", now=LATER)

    assert race(grow, partial(drain, "a")) == "StaleDecision"
    assert open_entries() == []


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("three_cells")
def test_one_cell_is_taken_down_once() -> None:
    assert race(partial(drain, "a"), partial(drain, "a")) in {"StaleDecision", "IntegrityError"}
    assert open_entries() == [("a", "rollout")]
