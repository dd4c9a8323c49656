"""From held and queued requests to a first cell, and the holds that ingresses get."""

from datetime import timedelta
from typing import Any

import pytest

from fleet.autoscaling.planning.needs import stepped_s
from fleet.autoscaling.planning.policy import CellRange
from fleet.autoscaling.services import autoscaling_pause
from fleet.cells.models import Cell
from fleet.deployments.models import DeploymentRegion
from fleet.deployments.services.deployments import deployment_scale
from fleet.reconcile.planning.states import CellState
from tests.fleet import rows
from tests.traffic.capacity.test_autoscaling import Scaled
from tests.traffic.steered import EAST, WEST
from traffic.async_requests.models import AsyncRequest
from traffic.batches.models import Batch, BatchRange
from traffic.batches.planning.batch import BatchState
from traffic.capacity.services import autoscaling_run
from traffic.region_shares.services.overrides import traffic_policy_change
from traffic.routing.models import IngressReport, PoolHold, RoutingTable
from traffic.routing.selectors import table_message
from traffic.routing.services.tables import tables_publish

pytestmark = [pytest.mark.django_db, pytest.mark.slow]


class Emptied(Scaled):
    """East may have no cells and has none; west never had any."""

    def __init__(self, ranges: dict[str, Any] | None = None, **policy: Any) -> None:
        super().__init__({EAST: 0.0, WEST: 0.0}, **policy)
        self.cells_of(ranges or {EAST: CellRange(0, 9), WEST: 0})
        Cell.objects.all().delete()
        DeploymentRegion.objects.update(cells=0)
        self.scale(12)

    def cells_of(self, cells: dict[str, Any]) -> None:
        deployment_scale(name="sim-70b", cells=cells, actor="ada", now=self.now)

    def hold(self, count: int, region: str = EAST) -> None:
        """Its ingress holds this many requests."""
        report = IngressReport.objects.get(ingress__region=region)
        report.telemetry.setdefault("pools", {}).setdefault("sim-70b", {})["held"] = count
        report.save()

    def look(self) -> tuple[int, str]:
        autoscaling_run(now=self.now)
        return self.cells()[0], self.state().rule


def test_without_demand_there_is_no_cell() -> None:
    assert Emptied().look() == (0, "min")


def test_a_held_request_starts_a_cell_in_the_next_pass() -> None:
    fleet = Emptied()
    fleet.hold(1)
    assert fleet.look() == (1, "waiting")


def test_one_that_came_in_where_no_cell_may_start_counts_for_the_nearest_region() -> None:
    fleet = Emptied()
    fleet.hold(20, WEST)
    assert fleet.look() == (3, "waiting")


def test_residency_leaves_it_to_nobody() -> None:
    fleet = Emptied()
    traffic_policy_change(deployment="sim-70b", actor="ada", now=fleet.now, stated={"residency": {WEST: [WEST]}})
    fleet.hold(20, WEST)
    assert fleet.look() == (0, "min")


def test_a_batch_starts_one_and_keeps_it() -> None:
    fleet = Emptied()
    batch = Batch.objects.create(
        region_id=EAST, endpoint="/v1/completions", lines_by_model={"sim-70b": 50}, input_file_id="file-1",
        window="24h", lines=50,
        state=BatchState.IN_PROGRESS.value, created_at=fleet.now, in_progress_at=fleet.now,
        expires_at=fleet.now + timedelta(hours=24),
    )  # fmt: skip
    assert fleet.look() == (1, "backlog")
    assert "(50 requests)" in fleet.state().reason
    BatchRange.objects.create(batch=batch, number=0, model="sim-70b", start=0, end=1, lines=50, completed=50)
    assert fleet.look() == (1, "idle")


def test_near_real_time_requests_ask_for_more_as_their_time_runs_out() -> None:
    fleet = Emptied()
    for number in range(30):
        AsyncRequest.objects.create(
            id=f"ar_{number}", region_id=WEST, path="/v1/completions", model="sim-70b", serving_class="near_realtime",
            digest="0", due_at=fleet.now, deadline_at=fleet.now + timedelta(seconds=60), created_at=fleet.now,
        )  # fmt: skip
    fleet.state().delete()
    assert fleet.look() == (1, "backlog"), "the service time is unknown"
    state = fleet.state()
    state.load["service_s"] = 30.0
    state.save()
    assert fleet.look() == (3, "backlog"), "30 requests of half a minute within a minute need a concurrency of 15"


def told(region: str = EAST) -> Any:
    table = RoutingTable.objects.filter(region=region).latest("revision")
    return table_message(table).pools[0].hold


def test_ingresses_are_told_while_the_autoscaler_would_start_one() -> None:
    fleet = Emptied()
    row = PoolHold.objects.get()
    assert (row.for_s, row.cold_start_s, row.ready_at) == (2 * stepped_s(30), stepped_s(30), 0)
    tables_publish(now=fleet.now)
    assert (told().for_s, told().ready_at) == (row.for_s, 0)
    autoscaling_pause(actor="ada", now=fleet.now)
    fleet.look()
    tables_publish(now=fleet.now)
    assert told() is None


def test_they_are_told_when_the_first_one_is_expected() -> None:
    fleet = Emptied()
    fleet.hold(1)
    fleet.look()
    node = rows.node("n-0a0a0a0a", where=EAST)
    cell = rows.cell("first", node, state=CellState.STARTING.value, created_at=fleet.now)
    fleet.look()
    assert PoolHold.objects.get().ready_at == int(fleet.now.timestamp()) + stepped_s(30)
    Cell.objects.filter(pk=cell.pk).update(state=CellState.READY.value)
    fleet.look()
    assert PoolHold.objects.get().ready_at == 0


@pytest.mark.parametrize(("rule", "by"), [("quota", "quota"), ("reclaim", "quota"), ("priority", "machines")])
def test_they_are_told_that_the_first_one_may_have_no_machines_until_it_may(rule: str, by: str) -> None:
    fleet = Emptied()
    fleet.hold(1)
    fleet.look()
    place = DeploymentRegion.objects.filter(region=EAST)
    place.update(cells_granted=0, grant_rule=rule)
    fleet.look()
    tables_publish(now=fleet.now)
    assert told().withheld == by
    place.update(cells_granted=None)
    fleet.look()
    tables_publish(now=fleet.now)
    assert told().withheld == ""


def test_a_range_that_is_ended_holds_nothing() -> None:
    fleet = Emptied()
    fleet.cells_of({EAST: 1})
    tables_publish(now=fleet.now)
    assert told() is None


def test_a_region_whose_requests_nobody_here_may_serve_holds_none() -> None:
    fleet = Emptied()
    traffic_policy_change(deployment="sim-70b", actor="ada", now=fleet.now, stated={"residency": {WEST: [WEST]}})
    tables_publish(now=fleet.now)
    assert told(WEST) is None
    assert told(EAST) is not None
