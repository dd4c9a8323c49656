"""The autoscaler on rows: from ingress reports to the number of cells."""

from datetime import timedelta

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from fleet.autoscaling.models import ScalingDecision, ScalingState
from fleet.autoscaling.planning.policy import CellRange
from fleet.autoscaling.services import autoscaling_pause, autoscaling_resume
from fleet.cells.models import Cell
from fleet.deployments.models import Deployment, DeploymentRegion
from fleet.deployments.services.deployments import deployment_change, deployment_scale
from fleet.nodes.models import NodeReport
from fleet.reconcile.planning.states import CellState
from kernel.leases import lease_take
from kernel.models import Event
from tests.fleet import rows
from tests.traffic.rows import forecast_row
from tests.traffic.steered import EAST, WEST, Steered
from traffic.capacity.services import LEASE, autoscaling_run
from traffic.region_shares.models import TrafficMatrix, TrafficWindow

pytestmark = pytest.mark.django_db


class Scaled(Steered):
    """Two regions with ranges; wanted cells exist immediately."""

    REPORT_EVERY_S = 6

    def __init__(self, rates: dict[str, float], **policy: object) -> None:
        super().__init__({EAST: 3, WEST: 3}, rates)
        ranges = dict.fromkeys((EAST, WEST), CellRange(1, 9))
        deployment_scale(name="sim-70b", cells=ranges, actor="ada", now=self.now)
        deployment_change(
            name="sim-70b", actor="ada", now=self.now, scaling={"mode": "act", "start_up_s": 30, **policy}
        )
        self.classes = {"realtime": 5}
        Cell.objects.update(state_since=self.now - timedelta(hours=1))
        Event.objects.all().delete()

    def scale(self, seconds: float, *, every_s: int = 6) -> list[str]:
        """Advances time with a pass per step; returns the changed deployments of each pass with changes."""
        changed = []
        for _ in range(int(seconds / every_s)):
            self.run(every_s)
            self._report_classes()
            changed += autoscaling_run(now=self.now)
            self._obey()
        return changed

    def _report_classes(self) -> None:
        load = {"classes": {name: {"in_flight": count} for name, count in self.classes.items()}}
        for cell in Cell.objects.filter(state=CellState.READY.value).prefetch_related("members"):
            for member in cell.members.all():
                reports = NodeReport.objects.filter(node=member.node_id)
                reports.update(cell=cell.id, load=load, last_seen_at=self.now)

    def cells(self) -> tuple[int, int]:
        wanted = dict(DeploymentRegion.objects.values_list("region_id", "cells"))
        return wanted[EAST], wanted[WEST]

    def state(self, region: str = EAST) -> ScalingState:
        return ScalingState.objects.get(place__region=region)

    def _obey(self) -> None:
        for place in DeploymentRegion.objects.all():
            there = Cell.objects.filter(region=place.region_id, state=CellState.READY.value)
            for number in range(there.count(), place.cells):
                node = rows.node(f"n-{place.region_id[-1]}{Cell.objects.count():07x}", where=place.region_id)
                name = f"new-{place.region_id}-{number}-{Cell.objects.count()}"
                rows.cell(name, node, region=place.region, state_since=self.now)
            surplus = list(there.order_by("-id").values_list("pk", flat=True)[: max(0, there.count() - place.cells)])
            Cell.objects.filter(pk__in=surplus).update(state=CellState.STOPPED.value)


@pytest.mark.slow
def test_load_that_three_cells_do_not_carry_gets_more_at_once() -> None:
    fleet = Scaled({EAST: 20.0, WEST: 12.0})
    assert fleet.scale(30) == []
    fleet.rates = {EAST: 45.0, WEST: 12.0}
    assert fleet.scale(24)
    east, west = fleet.cells()
    assert east >= 4, "load above the cap spills until there is room"
    fleet.scale(150)
    assert fleet.cells()[0] == 7, "45 at 70 % of 10"
    decision = ScalingDecision.objects.filter(region=EAST).earliest("id")
    assert (decision.acted, decision.was) == (True, 3)
    assert "concurrent requests" in decision.reason
    event = Event.objects.filter(kind="deployment.scaled", region=EAST).earliest("id")
    assert (event.actor, decision.reason in event.message) == ("autoscaler", True)
    assert west <= 9


@pytest.mark.slow
def test_batch_work_in_cells_asks_for_none() -> None:
    fleet = Scaled({EAST: 28.0, WEST: 12.0})
    fleet.classes = {"realtime": 5, "batch": 5}
    fleet.scale(60)
    assert fleet.cells() == (3, 3), "14 of the 28 are opportunistic"
    fleet.classes = {"realtime": 5}
    fleet.scale(30)
    assert fleet.cells()[0] >= 4


@pytest.mark.slow
def test_where_batch_work_is_what_a_deployment_is_for_it_counts() -> None:
    fleet = Scaled({EAST: 28.0, WEST: 12.0})
    fleet.classes = {"batch": 5}
    Deployment.objects.update(serving_class="batch")
    fleet.scale(30)
    assert fleet.cells()[0] >= 4


@pytest.mark.slow
def test_fewer_come_after_the_agreement_and_not_before() -> None:
    fleet = Scaled({EAST: 20.0, WEST: 12.0}, down_after_s=60)
    fleet.scale(30)
    fleet.rates = {EAST: 5.0, WEST: 12.0}
    fleet.scale(60)
    assert fleet.cells()[0] == 3, "the previous load has not been absent for a minute"
    fleet.scale(90)
    assert fleet.cells() == (1, 2)
    assert "would have been enough for 60 s" in ScalingDecision.objects.filter(region=EAST).latest("id").reason


@pytest.mark.slow
def test_shadow_writes_down_what_it_would_do() -> None:
    fleet = Scaled({EAST: 28.0, WEST: 12.0}, mode="shadow")
    assert fleet.scale(60) == []
    assert fleet.cells() == (3, 3)
    assert not ScalingDecision.objects.filter(acted=True).exists()
    assert fleet.state().wanted == 4
    regret = ScalingDecision.objects.get(region=EAST)
    assert regret.observed_s > 0
    assert regret.in_force_cell_s == 3 * regret.observed_s


@pytest.mark.slow
def test_paused_nothing_is_set_and_resumed_it_is() -> None:
    fleet = Scaled({EAST: 28.0, WEST: 12.0})
    autoscaling_pause(actor="ada", now=fleet.now)
    assert fleet.scale(60) == []
    assert fleet.cells() == (3, 3)
    assert not fleet.state().acting
    autoscaling_resume(actor="ada", now=fleet.now)
    assert fleet.scale(6) == ["sim-70b"]
    assert fleet.cells()[0] == 4


@pytest.mark.long
def test_a_silent_ingress_holds_what_there_is() -> None:
    fleet = Scaled({EAST: 5.0, WEST: 5.0}, down_after_s=60)
    fleet.scale(30)
    fleet.silent.add(EAST)
    fleet.scale(120, every_s=10)
    east, west = fleet.cells()
    assert (east, fleet.state().rule, fleet.state().needed) == (3, "unknown_load", None)
    assert west == 1
    fleet.silent.clear()
    fleet.scale(30)
    assert fleet.cells()[0] == 3, "unobserved time does not count as agreement"


@pytest.mark.slow
def test_requests_that_wait_count_as_load() -> None:
    fleet = Scaled({EAST: 20.0, WEST: 12.0})
    fleet.scale(30)
    took_s = fleet.state().load["service_s"]
    assert took_s == pytest.approx(1.0, abs=0.05)
    assert waiting(fleet, 20.0, per_s=38.0) == (6, "queue")
    assert fleet.state().load["queued"] == 20.0
    assert fleet.state().load["service_s"] == took_s, "waiting requests do not change it"


@pytest.mark.slow
def test_a_long_queue_asks_for_no_more_than_what_arrives_takes() -> None:
    fleet = Scaled({EAST: 20.0, WEST: 12.0})
    fleet.scale(30)
    assert waiting(fleet, 400.0, per_s=30.0) == (5, "queue")
    assert fleet.state().load["offered"] == pytest.approx(30.0, abs=1.5)


def waiting(fleet: Scaled, requests: float, *, per_s: float) -> tuple[int, str]:
    """Wanted cells, and the rule, for these waiting and arriving requests."""
    for window in TrafficWindow.objects.filter(region=EAST):
        window.samples = [[*row[:4], requests, per_s] for row in window.samples]
        window.save()
    autoscaling_run(now=fleet.now)
    return fleet.cells()[0], fleet.state().rule


def test_what_the_autopilot_sends_is_never_too_much() -> None:
    fleet = Scaled({EAST: 5.0, WEST: 5.0})
    fleet.scale(12)
    matrix = TrafficMatrix.objects.get()
    matrix.figures["regions"][WEST]["load"] = 41.0
    matrix.save()
    autoscaling_run(now=fleet.now)
    assert (fleet.cells()[1], fleet.state(WEST).rule) == (6, "autopilot")
    TrafficMatrix.objects.update(looked_at=fleet.now - timedelta(seconds=16))
    autoscaling_run(now=fleet.now)
    assert fleet.state(WEST).load["autopilot"] is None


def test_one_controller_at_a_time() -> None:
    fleet = Scaled({EAST: 28.0, WEST: 12.0})
    fleet.run(30)
    lease_take(name=LEASE, holder="another", ttl_s=60.0, now=fleet.now)
    assert autoscaling_run(now=fleet.now) == []
    assert not ScalingState.objects.exists()


@pytest.mark.slow
def test_a_broken_policy_stops_no_other(caplog: pytest.LogCaptureFixture) -> None:
    fleet = Scaled({EAST: 28.0, WEST: 12.0})
    fleet.run(30)
    rows.deployment("other", cells=1)
    deployment_scale(name="other", cells={EAST: CellRange(1, 2)}, actor="ada", now=fleet.now)
    Deployment.objects.filter(name="other").update(scaling={"mode": 3})
    assert autoscaling_run(now=fleet.now) == ["sim-70b"]
    assert "cannot scale other: mode is 3" in caplog.text


@pytest.mark.slow
def test_queries_do_not_grow_with_deployments() -> None:
    fleet = Scaled({EAST: 20.0, WEST: 12.0})
    fleet.scale(12)
    with CaptureQueriesContext(
        connection,
    ) as few:
        autoscaling_run(now=fleet.now)
    for number in range(5):
        rows.deployment(f"d-{number}", cells=1)
        deployment_scale(name=f"d-{number}", cells={EAST: CellRange(1, 2)}, actor="ada", now=fleet.now)
    with CaptureQueriesContext(connection) as many:
        autoscaling_run(now=fleet.now)
    assert ScalingState.objects.count() == 7
    assert len(many) == len(few)


def test_without_a_range_a_pass_asks_next_to_nothing() -> None:
    Steered({EAST: 3, WEST: 3}, {EAST: 5.0, WEST: 5.0})
    with CaptureQueriesContext(connection) as queries:
        assert autoscaling_run(now=rows.NOW) == []
    assert len(queries) == 1, "no query for a lease"


@pytest.mark.slow
def test_cells_are_there_before_a_load_that_is_forecast() -> None:
    fleet = Scaled({EAST: 20.0, WEST: 12.0})
    fleet.scale(30)
    forecast_row(load=40.0, made_at=fleet.now)

    fleet.scale(6)

    assert fleet.cells() == (7, 3), "48 at 70 % of 10, in its origin"
    assert (fleet.state().rule, fleet.state().load["forecast"]) == ("forecast", 48.0)
