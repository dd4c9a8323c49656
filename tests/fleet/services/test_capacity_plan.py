"""Plans as rows: the newest counts while it is fresh, old ones go, and what was removed meanwhile is left out."""

from dataclasses import replace
from datetime import datetime, timedelta

import pytest

from fleet.models import DayPlan, DayPlanPlace
from fleet.planning.capacity.planner import plan_capacity
from fleet.planning.capacity.view import BatchWork, CapacityPlan
from fleet.selectors.capacity_plan import newest_plan, place_plans
from fleet.services.capacity_plan import PLANS_KEPT, day_plan_store
from tests.controlplane.api.client import bearer
from tests.fleet import rows
from tests.fleet.planning.capacity.views import AT, EAST, deployment, flat, place, view

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
