"""Readiness of the fleet, the load of a cell from its leader's last report, and cells with different software (I2)."""

import msgspec
import pytest

from engine_agent.protocol.load_messages import Load
from engine_agent.protocol.messages import Observed, Report
from engine_agent.protocol.states import EngineState
from fleet.cells.models import Cell
from fleet.cells.planner import plan_health
from fleet.cells.selectors import cells_described, fleet_readiness
from fleet.load.selectors import CellLoad, cell_load
from fleet.nodes.services.reports import ReceivedReport, reports_store
from fleet.reconcile.planning.settings import FleetSettings
from fleet.reconcile.planning.states import CellState
from fleet.reconcile.selectors.snapshot import fleet_view
from fleet.reconcile.services import apply
from fleet.rollouts.selectors import counters_reported
from tests.controlplane.api.client import bearer
from tests.controlplane.dashboard.clients import fragment, signed_in
from tests.fleet import rows
from tests.fleet.rows import NOW

pytestmark = pytest.mark.django_db


def test_a_fleet_that_wants_nothing_is_ready() -> None:
    readiness = fleet_readiness()
    assert readiness.is_ready
    assert readiness.summary == "0 of 0 cells ready, 0 nodes joined"


def test_a_whole_fleet_is_ready() -> None:
    rows.deployment(cells=1)
    rows.cell("c1", rows.node("n-a"), rows.node("n-b"))
    readiness = fleet_readiness()
    assert readiness.is_ready
    assert readiness.summary == "1 of 1 cells ready, 2 nodes joined"


def test_what_is_missing_is_said_with_what_holds_it_up() -> None:
    rows.deployment(cells=2)
    rows.cell("c1", rows.node("n-a"))
    rows.cell("c2", state=CellState.PENDING, reason="waits for 2 nodes")
    assert fleet_readiness().waiting_for == (
        "sim-70b in us-east-1: 1 of 2 ready",
        "c2 is pending: waits for 2 nodes",
    )


def test_a_surplus_elsewhere_makes_up_for_nothing_and_is_not_counted() -> None:
    rows.deployment(cells=1)
    rows.deployment(cells=1, where="us-west-2")
    rows.cell("c1", rows.node("n-a"))
    rows.cell("c2", rows.node("n-b"))
    readiness = fleet_readiness()
    assert readiness.waiting_for == ("sim-70b in us-west-2: 0 of 1 ready",)
    assert readiness.summary.startswith("1 of 2 cells ready")


def test_more_to_wait_for_can_be_added() -> None:
    more = fleet_readiness().plus(("ingress i is not connected",))
    assert not more.is_ready
    assert more.summary.endswith("ingress i is not connected")


FULL = Load(
    in_flight=3,
    queued=1,
    tokens_per_s=41.5,
    ttft_p50_ms=48.0,
    requests_total=9,
    errors_total=2,
    ttft_counts={12: 4, 13: 5},
    itl_counts={3: 70},
)


def reported(load: Load | None, *, generation: int = 1) -> Cell:
    rows.cell("c1", rows.node("n-a"), rows.node("n-b"))
    observed = Observed(EngineState.READY, cell="c1", generation=generation, rank=0)
    reports_store([ReceivedReport("n-a", "k", True, NOW, NOW, Report(1, observed, load=load))])
    return cells_described().get()


def test_what_an_agent_reports_is_read_whatever_a_json_column_makes_of_it() -> None:
    load = cell_load(reported(FULL))
    assert (load.in_flight, load.queued, load.tokens_per_s, load.ttft_p50_ms) == (3, 1, 41.5, 48.0)
    assert (load.itl_p99_ms, load.reported_at) == (None, NOW)


def test_every_count_survives_the_way_through_the_database() -> None:
    leader = reported(FULL).members.all()[0].node.report
    counters = counters_reported(leader)
    assert counters is not None
    assert (counters.ttft, counters.itl) == (FULL.ttft_counts, FULL.itl_counts)


def test_a_load_of_another_generation_says_nothing_of_this_one() -> None:
    assert cell_load(reported(msgspec.structs.replace(FULL), generation=2)) == CellLoad()


def test_without_a_report_there_are_zeros() -> None:
    assert cell_load(reported(None)) == CellLoad()


SAME = {"neuron_driver": "2.27.4.0", "sim.engine": "sim 0.1.0"}
SAID = (
    "fingerprint mismatch: rank 1 (n-00000002) differs from rank 0 (n-00000001): "
    "neuron_driver is 2.26.5.0 instead of 2.27.4.0"
)


def judged(cell: Cell) -> Cell:
    """The cell after the health planner's decisions."""
    for decision in plan_health(fleet_view(now=NOW), FleetSettings(), NOW):
        apply(decision, NOW)
    cell.refresh_from_db()
    return cell


def starting(**other: str) -> Cell:
    """A cell of two nodes that both report a ready engine."""
    leader = rows.node("n-00000001", fingerprint=SAME)
    follower = rows.node("n-00000002", fingerprint={**SAME, **other})
    return rows.cell("sim-70b-us-east-1-1", leader, follower, state="starting")


def test_it_fails_and_everybody_who_looks_reads_why() -> None:
    cell = judged(starting(neuron_driver="2.26.5.0"))
    assert (cell.state, cell.reason) == ("failed", SAID)
    seen = bearer().get(f"/api/v1/cells/{cell.pk}").json()
    assert seen["reason"] == SAID
    assert seen["fingerprints"]["differing"] == [
        {"field": "neuron_driver", "values": {"n-00000001": "2.27.4.0", "n-00000002": "2.26.5.0"}}
    ]
    page = " ".join(fragment(signed_in(), f"/cells/{cell.pk}/", "cell-stack").split())
    assert "neuron_driver is 2.26.5.0 instead of 2.27.4.0" in page


def test_one_of_equal_software_becomes_ready() -> None:
    assert judged(starting()).state == "ready"
