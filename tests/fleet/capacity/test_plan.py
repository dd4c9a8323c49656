"""Plans as rows: the newest counts while fresh, old ones are deleted, and removed deployments are left out."""

from dataclasses import replace
from datetime import datetime, timedelta

import pytest

from fleet.autoscaling.selectors import newest_plan, place_plans, planned_place_cells
from fleet.autoscaling.services import autoscaling_pause
from fleet.capacity.models import DayPlan, DayPlanPlace
from fleet.capacity.planning.planner import plan_capacity
from fleet.capacity.planning.view import BatchWork, CapacityPlan
from fleet.deployments.models import Deployment, DeploymentRegion
from fleet.reconcile.selectors.cache import FleetCache
from fleet.reconcile.selectors.snapshot import fleet_view
from models_registry.instance_types.models import InstanceType
from tests.controlplane.api.client import bearer
from tests.fleet import rows
from tests.fleet.capacity.views import AT, EAST, deployment, flat, place, view
from traffic.capacity.services import PLANS_KEPT, day_plan_store

pytestmark = pytest.mark.django_db


def plan(at: datetime = AT) -> CapacityPlan:
    work = BatchWork(40 * 3600.0, 4 * 3600.0)
    return replace(plan_capacity(view(deployment("sim-70b", place(demand=flat(10.0), batch=(work,))))), at=at)


def store(at: datetime = AT) -> DayPlan:
    return day_plan_store(plan=plan(at), took_s=0.2, now=at + timedelta(seconds=20))


@pytest.fixture(autouse=True)
def fleet() -> None:
    rows.deployment(cells=2)


def test_a_place_reads_back_as_it_was_planned() -> None:
    store()
    found = place_plans(AT + timedelta(minutes=5), ["sim-70b"])["sim-70b", EAST]
    assert found.cells == plan().cells[0].cells
    assert (found.expected[0], found.cover[0]) == (10.0, 10.0)
    assert sum(found.due) * 900 == pytest.approx(40 * 3600.0, rel=0.01)


def test_an_old_plan_and_one_of_a_time_to_come_count_for_nothing() -> None:
    store()
    assert place_plans(AT + timedelta(minutes=44))
    assert not place_plans(AT + timedelta(minutes=45))
    assert not place_plans(AT - timedelta(seconds=1))
    assert not place_plans(AT, ["another"])


def test_a_plan_of_the_same_time_takes_the_others_place() -> None:
    store()
    store()
    assert DayPlan.objects.count() == DayPlanPlace.objects.count() == 1


def test_only_the_newest_are_kept() -> None:
    for number in range(PLANS_KEPT + 3):
        DayPlan.objects.create(
            at=AT + timedelta(minutes=number), made_at=AT, slot_s=900, solver="lp", took_s=1, shifts=0, dollars=[]
        )
    store(AT + timedelta(days=1))
    assert DayPlan.objects.count() == PLANS_KEPT
    newest = newest_plan()
    assert newest is not None
    assert newest.at == AT + timedelta(days=1)


def test_what_was_removed_meanwhile_is_left_out() -> None:
    other = view(deployment("gone", place(demand=flat(10.0))), deployment("sim-70b", place(demand=flat(10.0))))
    day_plan_store(plan=plan_capacity(other), took_s=0.2, now=AT)
    assert [row.deployment_id for row in DayPlanPlace.objects.all()] == ["sim-70b"]


class TestForTheReconciler:
    """Cells of places where the autoscaler acts."""

    @pytest.fixture(autouse=True)
    def acting(self) -> None:
        DeploymentRegion.objects.update(cells_min=1, cells_max=50)
        Deployment.objects.update(scaling={"mode": "act"})

    def test_cells_on_its_type(self) -> None:
        InstanceType.objects.create(name="trn1", accelerator="neuron")
        Deployment.objects.update(instance_types=["trn1"])
        store()
        (found,) = planned_place_cells()
        assert (found.deployment, found.region, found.at, found.slot_s) == ("sim-70b", EAST, AT, 900)
        assert (found.cells, found.start_up_s) == (plan().cells[0].cells, 600.0)

    def test_in_shadow_paused_or_without_a_range_there_are_none(self) -> None:
        InstanceType.objects.create(name="trn1", accelerator="neuron")
        Deployment.objects.update(instance_types=["trn1"])
        store()
        Deployment.objects.update(scaling={})
        assert planned_place_cells() == ()
        Deployment.objects.update(scaling={"mode": "act"})
        DeploymentRegion.objects.update(cells_min=None, cells_max=None)
        assert planned_place_cells() == ()
        DeploymentRegion.objects.update(cells_min=1, cells_max=50)
        autoscaling_pause(actor="ada", now=AT)
        assert planned_place_cells() == ()

    def test_cells_of_another_type_count_for_nothing(self) -> None:
        store()
        assert planned_place_cells() == ()

    def test_each_snapshot_has_the_newest(self) -> None:
        InstanceType.objects.create(name="trn1", accelerator="neuron")
        Deployment.objects.update(instance_types=["trn1"])
        cache = FleetCache()
        assert fleet_view(now=AT, cache=cache).planned == ()
        store()
        assert [one.at for one in fleet_view(now=AT, cache=cache).planned] == [AT]
        later = AT + timedelta(minutes=15)
        store(later)
        assert [one.at for one in fleet_view(now=later, cache=cache).planned] == [later]
        Deployment.objects.update(scaling={})
        assert fleet_view(now=later, cache=cache).planned == ()


class TestOverTheApi:
    def test_it_shows_the_newest_plan(self) -> None:
        row = store()
        shown = bearer("ada").get("/api/v1/capacity-plan").json()
        assert (shown["solver"], shown["total"]) == (row.solver, row.total)
        assert shown["places"][0]["cells"] == list(plan().cells[0].cells)
        assert shown["machines"][0]["pool"] == "on_demand"
        assert {order["kind"] for order in shown["orders"]} >= {"launch"}

    def test_before_the_first_one_it_says_so(self) -> None:
        assert bearer("ada").get("/api/v1/capacity-plan").json()["at"] is None
