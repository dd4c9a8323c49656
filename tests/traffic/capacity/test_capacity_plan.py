"""Plans of the day from the fleet's rows, made by a real child process, and their storage."""

import sys
from collections.abc import Iterator
from datetime import timedelta

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from fleet.autoscaling.models import ScalingState
from fleet.autoscaling.planning.policy import CellRange
from fleet.capacity.models import DayPlan, DayPlanPlace
from fleet.deployments.models import Deployment, DeploymentRegion
from fleet.deployments.services.deployments import deployment_scale
from fleet.regions.models import Rate
from models_registry.versions.models import ModelVersion
from tests.fleet import rows
from tests.hanging import HANGS
from tests.traffic.rows import EAST, MADE, forecast_row
from traffic.batches.models import Batch, BatchRange
from traffic.batches.selectors import batch_budgets, batch_jobs
from traffic.capacity.selectors.autoscaling import scaled_deployments
from traffic.capacity.selectors.plans import capacity_view
from traffic.capacity.services import ENDED_AFTER_S, DayPlanner, Planner
from traffic.region_shares.models import TrafficMatrix

pytestmark = [pytest.mark.django_db, pytest.mark.processes]

NOW = MADE + timedelta(seconds=20)
BREAKS = (sys.executable, "-c", "import sys; sys.exit('no such solver')")


@pytest.fixture
def day() -> Iterator[DayPlanner]:
    made = DayPlanner()
    yield made
    made.stop()


@pytest.fixture
def ranged() -> Deployment:
    """Cells for 64 concurrent requests on two nodes each, one to nine of them; two exist."""
    deployment = rows.deployment(cells=2, where=EAST)
    ModelVersion.objects.update(max_concurrency=64)
    deployment_scale(name=deployment.name, cells={EAST: CellRange(1, 9)}, actor="ada", now=NOW)
    for number in range(2):
        rows.cell(f"c-{number}", rows.node(f"n-{number}a"), rows.node(f"n-{number}b"))
    return deployment


def batch(lines: int, hours: float, service_s: float | None = 10.0) -> None:
    place = DeploymentRegion.objects.get()
    state = {"wanted": 2, "rule": "min", "acting": True, "looked_at": NOW}
    ScalingState.objects.update_or_create(place=place, defaults={**state, "load": {"service_s": service_s}})
    Batch.objects.create(
        region_id=EAST, lines_by_model={"sim-70b": lines}, lines=lines, window="24h", input_file_id="file-1",
        created_at=NOW, state="in_progress", expires_at=NOW + timedelta(hours=hours),
    )  # fmt: skip


def make(day: DayPlanner) -> DayPlan:
    assert day.begin(now=NOW)
    assert day.child is not None
    day.child.wait(timeout=120)
    assert day.poll(now=NOW + timedelta(seconds=5))
    return DayPlan.objects.get()


def test_a_child_plans_the_day_and_it_is_stored(day: DayPlanner, ranged: Deployment) -> None:
    forecast_row(load=100.0)
    row = make(day)
    assert (row.at, row.solver, row.slot_s, len(row.dollars)) == (MADE, "whole", 900, 96)
    (place,) = DayPlanPlace.objects.all()
    assert (place.deployment_id, place.cells[2]) == ("sim-70b", 3), "100 at 70 % of 64"
    assert place.start_up_s > 0
    assert (place.expected[0], place.cover[0]) == (100.0, 100.0), "120 are less than 90 % of these"
    assert place.budget[2] == pytest.approx(3 * 0.9 * 64 - 100.0, abs=0.1)


def test_the_autoscaler_sees_it_as_a_need(day: DayPlanner, ranged: Deployment) -> None:
    forecast_row(load=100.0)
    make(day)
    ((one,), _) = scaled_deployments(NOW + timedelta(minutes=5))
    planned = one.view.places[0].planned
    assert planned is not None
    assert planned.cells == 3
    ((one,), _) = scaled_deployments(NOW + timedelta(hours=1))
    assert one.view.places[0].planned is None, "too old"


def test_lines_that_wait_become_work_that_is_due(ranged: Deployment) -> None:
    forecast_row(load=20.0)
    batch(lines=3600, hours=4)
    view = capacity_view(NOW)
    assert view is not None
    (work,) = view.deployments[0].places[0].batch
    assert (work.work, work.within_s) == (36_000.0, 4 * 3600.0)


def test_a_batch_for_which_cells_were_asked_is_late_work(ranged: Deployment) -> None:
    forecast_row(load=20.0)
    batch(lines=3600, hours=4)
    Batch.objects.update(cells_asked_at=NOW)
    view = capacity_view(NOW)
    assert view is not None
    (work,) = view.deployments[0].places[0].batch
    assert work.is_late


def test_no_more_cells_are_planned_than_the_budget_pays_for(ranged: Deployment) -> None:
    forecast_row(load=100.0)
    Rate.objects.create(
        kind="machine_price", subject=rows.KIND, value="2.5", valid_from=NOW, actor="ada", created_at=NOW
    )
    Deployment.objects.update(scaling={"budget_per_hour": 17.0})
    view = capacity_view(NOW)
    assert view is not None
    place = view.deployments[0].places[0]
    assert (place.least, place.most, place.is_bound_by_budget) == (1, 3, True), "two machines of $2.50 each"


def test_where_nobody_knows_how_long_a_line_takes_nothing_is_planned_for_them(ranged: Deployment) -> None:
    forecast_row(load=20.0)
    batch(lines=3600, hours=4, service_s=None)
    view = capacity_view(NOW)
    assert view is not None
    assert view.deployments[0].places[0].batch == ()


def test_demand_is_shared_among_regions_as_requests_are(ranged: Deployment) -> None:
    forecast_row(load=100.0)
    forecast_row(load=50.0, serving_class="near_realtime")
    forecast_row(load=500.0, serving_class="batch")
    west = rows.region("us-west-2")
    DeploymentRegion.objects.create(deployment=ranged, region=west, cells=1)
    shares = {EAST: {EAST: 0.6, "us-west-2": 0.4}}
    TrafficMatrix.objects.create(deployment=ranged, shares=shares, looked_at=NOW)
    view = capacity_view(NOW)
    assert view is not None
    demands = {place.region: place.demand for place in view.deployments[0].places}
    east = demands[EAST]
    assert east is not None
    assert east.p50[0] == pytest.approx(90.0), "opportunistic batch work is excluded"
    fixed = view.deployments[0].places[1]
    assert (fixed.region, fixed.least, fixed.most) == ("us-west-2", 1, 1)
    assert fixed.demand is not None
    assert fixed.demand.p90[95] == pytest.approx(72.0)


def test_without_a_forecast_that_counts_there_is_no_plan(day: DayPlanner, ranged: Deployment) -> None:
    assert not day.begin(now=NOW)
    forecast_row(judged=False)
    assert not day.begin(now=NOW)
    forecast_row(origin="us-west-2", made_at=MADE - timedelta(hours=1))
    assert not day.begin(now=NOW)


def test_a_child_that_hangs_is_ended_and_the_next_plan_is_made(ranged: Deployment) -> None:
    forecast_row()
    day = DayPlanner(HANGS)
    assert day.begin(now=NOW)
    assert not day.begin(now=NOW), "one at a time"
    child = day.child
    assert not day.poll(now=NOW + timedelta(seconds=ENDED_AFTER_S - 1))
    assert not day.poll(now=NOW + timedelta(seconds=ENDED_AFTER_S))
    assert child is not None
    assert child.poll() is not None
    assert day.begin(now=NOW)
    day.stop()


def test_a_child_that_breaks_is_told_of(ranged: Deployment, caplog: pytest.LogCaptureFixture) -> None:
    forecast_row()
    day = DayPlanner(BREAKS)
    assert day.begin(now=NOW)
    assert day.child is not None
    day.child.wait(timeout=60)
    assert not day.poll(now=NOW)
    assert "no such solver" in caplog.text
    assert not DayPlan.objects.exists()


def test_the_process_plans_after_each_round_of_forecasts(day: DayPlanner, ranged: Deployment) -> None:
    class Round:
        def run_if_due(self, *, now: object) -> int:
            return 1

    forecast_row()
    Planner(Round(), day).run(now=NOW)  # type: ignore[arg-type]
    assert day.child is not None


def test_queries_do_not_grow_with_deployments(ranged: Deployment) -> None:
    forecast_row()

    def queries() -> int:
        with CaptureQueriesContext(connection) as found:
            assert capacity_view(NOW) is not None
        return len(found)

    before = queries()
    for number in range(3):
        rows.deployment(f"other-{number}", where=EAST)
    assert queries() == before


def test_batches_count_on_what_the_plan_leaves_them(day: DayPlanner, ranged: Deployment) -> None:
    forecast_row(load=100.0)
    batch(lines=10, hours=4)
    make(day)
    budgets = batch_budgets(NOW)
    free = 3 * 0.9 * 64 - 100.0
    until = NOW + timedelta(hours=40)
    assert budgets.rate(EAST, "sim-70b", until) == pytest.approx(free / 10.0, rel=0.02), "a line takes ten seconds"
    assert budgets.time_s(EAST, "sim-70b", 36_000) == pytest.approx(900 + (400_000 - 900 * 15.2) / free, rel=0.02), (
        "first two cells"
    )
    assert budgets.rate(EAST, "another", until) is None
    assert batch_budgets(NOW + timedelta(hours=1)).rate(EAST, "sim-70b", until) is None, "too old"
    BatchRange.objects.create(batch=Batch.objects.get(), model="sim-70b", number=0, start=0, end=1, lines=10)
    (job,) = batch_jobs(NOW, {f"{EAST} sim-70b": 99.0})
    assert job.rate == pytest.approx(free / 10.0, rel=0.2), "not its present rate"
