"""Passes with too few machines: grants, drains under the ledger, and events for both sides."""

from datetime import timedelta

import pytest

from fleet.cells.models import Cell, Disruption
from fleet.cells.services import cell_drain_charged
from fleet.deployments.models import Deployment, DeploymentRegion
from fleet.deployments.planner import GrantRule
from fleet.deployments.services.deployments import deployment_scale
from fleet.quotas.models import Quota
from fleet.quotas.services import cells_grant
from fleet.reconcile.planning.decisions import DrainCell, GrantCells
from fleet.reconcile.planning.settings import LedgerLimits
from fleet.reconcile.planning.states import DisruptionCause
from fleet.reconcile.selectors.snapshot import fleet_view
from kernel.models import Event
from kernel.transitions import StaleDecision
from tests.fleet import rows
from tests.fleet.rows import NOW

pytestmark = pytest.mark.django_db

LATER = NOW + timedelta(seconds=120)


def grant(asked: int = 3, seen: int | None = None, granted: int | None = 2, taker: str = "chat") -> GrantCells:
    return GrantCells("sim-70b", "us-east-1", asked, seen, granted, GrantRule.PRIORITY, "chat goes before", taker)


def three_cells() -> list[Cell]:
    rows.deployment(cells=3)
    Deployment.objects.update(serving_class="batch", team="search", priority=1)
    return [rows.cell(f"c-{n}", rows.node(f"n-{n}-0"), rows.node(f"n-{n}-1")) for n in range(3)]


def test_both_sides_are_told() -> None:
    three_cells()
    cells_grant(grant(), now=NOW)
    place = DeploymentRegion.objects.get()
    assert (place.cells, place.cells_granted, place.granted_at, place.grant_rule) == (3, 2, NOW, "priority")
    told = Event.objects.order_by("pk").values_list("kind", "deployment", "message")
    assert list(told) == [
        ("deployment.preempted", "sim-70b", "sim-70b may have 2 of 3 cells in us-east-1: chat goes before"),
        ("deployment.preempts", "chat", "sim-70b makes room for chat: it may have 2 of 3 cells in us-east-1"),
    ]


@pytest.mark.parametrize("stale", [grant(asked=4), grant(seen=2)], ids=["scaled meanwhile", "granted meanwhile"])
def test_what_has_changed_meanwhile_is_not_overwritten(stale: GrantCells) -> None:
    three_cells()
    with pytest.raises(StaleDecision):
        cells_grant(stale, now=NOW)
    assert DeploymentRegion.objects.get().cells_granted is None
    assert not Event.objects.exists()


def test_a_new_reason_alone_is_no_event() -> None:
    three_cells()
    cells_grant(grant(), now=NOW)
    cells_grant(grant(seen=2), now=LATER)
    assert Event.objects.count() == 2


def test_planners_see_what_was_granted_and_what_was_set() -> None:
    three_cells()
    Quota.objects.create(
        name="search:local.cpu",
        team="search",
        instance_type_id="local.cpu",
        machines=4,
        changed_by="op",
        changed_at=NOW,
    )
    cells_grant(grant(), now=NOW)
    view = fleet_view(now=LATER)
    spec = view.deployments["sim-70b"]
    assert (spec.cells_wanted, spec.team, spec.sharing.priority, spec.sharing.preemptible) == (
        {"us-east-1": 2}, "search", 1, True,
    )  # fmt: skip
    claim = spec.claim("us-east-1")
    assert (claim.asked, claim.least, claim.granted, claim.rule) == (3, 3, 2, GrantRule.PRIORITY)
    assert [(one.team, one.instance_type, one.machines) for one in view.quotas] == [("search", "local.cpu", 4)]


def drain(cell: Cell) -> DrainCell:
    return DrainCell(cell.id, cell.generation, DisruptionCause.PREEMPTION, "makes room")


def test_the_ledger_lets_only_what_is_not_granted_make_room_and_one_by_one() -> None:
    cells = three_cells()
    with pytest.raises(StaleDecision):
        cell_drain_charged(drain(cells[0]), now=LATER)
    cells_grant(grant(granted=1), now=NOW)
    cell_drain_charged(drain(cells[0]), now=LATER)
    with pytest.raises(StaleDecision, match="one by one"):
        cell_drain_charged(drain(cells[1]), now=LATER)
    assert [(entry.cell_id, entry.cause) for entry in Disruption.objects.all()] == [("c-0", "preemption")]


def test_what_makes_room_counts_against_the_budget_of_the_region() -> None:
    cells = three_cells()
    cells_grant(grant(granted=1), now=NOW)
    with pytest.raises(StaleDecision, match="its budget"):
        cell_drain_charged(drain(cells[0]), now=LATER, limits=LedgerLimits(region_floor=0, region_share=0.0))


def test_a_person_scales_what_was_set_and_the_grant_stays() -> None:
    three_cells()
    cells_grant(grant(), now=NOW)
    deployment_scale(name="sim-70b", cells={"us-east-1": 5}, actor="ada", now=NOW)
    place = DeploymentRegion.objects.get()
    assert (place.cells, place.cells_in_force) == (5, 2)
