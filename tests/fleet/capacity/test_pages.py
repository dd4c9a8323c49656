"""The page of the day plan."""

from dataclasses import replace
from datetime import timedelta

import pytest

from fleet.autoscaling.services import autoscaling_pause
from fleet.capacity.planning.planner import plan_capacity
from fleet.capacity.planning.view import BatchWork, CapacitySettings, CellKind
from fleet.deployments.models import Deployment, DeploymentRegion
from kernel import clock
from tests.controlplane.dashboard.clients import fragment, signed_in
from tests.fleet import rows
from tests.fleet.capacity.views import deployment, flat, place, pool, view
from traffic.capacity.services import day_plan_store

pytestmark = pytest.mark.django_db


def show(query: str = "") -> str:
    return fragment(signed_in(), f"/plan/{query}", "day-plan")


def store(minutes_ago: int = 1) -> None:
    rows.deployment(cells=2)
    rows.deployment("another", cells=2)
    at = clock.now() - timedelta(minutes=minutes_ago)
    day = view(
        deployment("sim-70b", place(demand=flat(60.0), batch=(BatchWork(1e6, 3600.0),))),
        deployment("another", place(demand=flat(5.0))),
        pools=(pool(count=8),),
    )
    plan = plan_capacity(replace(day, at=at), CapacitySettings(whole_most=0))
    day_plan_store(plan=plan, took_s=0.2, now=at)


def test_before_the_first_plan_it_says_what_makes_one() -> None:
    text = show()
    assert "No plan yet" in text
    assert "switchyard autoscale plan" in text


def test_it_shows_cells_budgets_dollars_and_what_is_lacking() -> None:
    store()
    text = show()
    assert "planned-cells-figure" in text
    assert "for batches" in text
    assert "us-east-1 has 8 machines of trn1 then, all in use" in text
    assert "by rounding up" in text
    assert "start 5" in text


def test_it_can_be_narrowed_to_a_deployment() -> None:
    store()
    mine = '<td class="key">sim-70b</td>'
    assert mine in show()
    assert mine not in show("?deployment=another")


def test_an_old_plan_says_that_nothing_follows_it() -> None:
    store(minutes_ago=50)
    assert "so nothing follows it" in show()


class TestWhoFollowsIt:
    """Which deployments follow the plan, and which machines it keeps warm."""

    @pytest.fixture(autouse=True)
    def grown(self) -> None:
        """A plan of six cells where one is wanted."""
        rows.deployment(cells=1, nodes=1)
        rows.cell("sim-70b-us-east-1-1", rows.node("n-1"))
        DeploymentRegion.objects.update(cells_min=1, cells_max=50)
        grown = place(demand=flat(30.0), cells={rows.KIND: 1})
        kinds = (CellKind(rows.KIND, 10.0),)
        day = view(deployment("sim-70b", grown, kinds=kinds), pools=(pool(instance_type=rows.KIND),))
        at = clock.now() - timedelta(minutes=1)
        day_plan_store(plan=plan_capacity(replace(day, at=at)), took_s=0.2, now=at)

    def test_in_shadow_it_says_how_to_let_it(self) -> None:
        text = show()
        assert "It changes nothing yet" in text
        assert "kept warm for it now" not in text

    def test_where_the_autoscaler_acts_machines_are_warm(self) -> None:
        Deployment.objects.update(scaling={"mode": "act"})
        text = show()
        assert "follows it for sim-70b" in text
        assert "its cells need 5 machines more (+5 of sim-70b)" in text
        assert "planned-machines-figure" in text

    def test_paused_it_says_so(self) -> None:
        Deployment.objects.update(scaling={"mode": "act"})
        autoscaling_pause(actor="ada", now=clock.now())
        text = show()
        assert "autoscaling is paused" in text
        assert "kept warm for it now" not in text
