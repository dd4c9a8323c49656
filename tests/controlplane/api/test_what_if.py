"""What-if over HTTP."""

from datetime import timedelta
from typing import Any

import pytest

from fleet.capacity.models import DayPlan, DayPlanPlace
from fleet.cells.models import Cell
from fleet.deployments.models import Deployment, DeploymentRegion
from fleet.regions.models import Rate
from fleet.rollouts.models import Rollout
from kernel.models import Event
from tests.controlplane.api.client import bearer
from tests.fleet import rows
from tests.traffic.steered import EAST, WEST, Steered

pytestmark = [pytest.mark.django_db, pytest.mark.slow]

URL = "/api/v1/plan"


def plan(body: dict[str, Any], username: str = "operator") -> Any:
    return bearer(username).post(URL, body, format="json")


@pytest.fixture
def cell_in_service(monkeypatch: pytest.MonkeyPatch) -> Cell:
    monkeypatch.setattr("kernel.clock.now", lambda: rows.NOW)
    row = rows.cell("sim-70b-us-east-1-1", rows.node("n-1"), rows.node("n-2"))
    for kind, at in (("cell.starting", 0), ("cell.ready", 12)):
        Event.objects.create(
            at=rows.NOW - timedelta(seconds=60 - at), kind=kind, message="m", cell=row.id, deployment="sim-70b"
        )
    return row


def test_a_scaling_is_predicted_and_nothing_is_done(cell_in_service: Cell) -> None:
    rows.node("n-3")
    rows.node("n-4")

    answer = plan({"scale": {"deployment": "sim-70b", "regions": [{"region": "us-east-1", "cells": 2}]}})

    assert answer.status_code == 200, answer.json()
    found = answer.json()
    assert found["places"] == [
        {
            "deployment": "sim-70b",
            "region": "us-east-1",
            "wanted": 2,
            "ready_now": 1,
            "ready_least": 1,
            "least_at_s": 0.0,
            "ready_then": 2,
        }
    ]
    assert 12.0 < found["took_s"] < 30.0
    assert Cell.objects.count() == 1
    assert "local.cpu has no price in us-east-1: set a rate to see its cost" in found["warnings"]


def test_a_scaling_says_what_machines_would_cost_by_the_prices_in_force(cell_in_service: Cell) -> None:
    now = rows.NOW
    Rate.objects.create(
        kind="machine_price", subject=rows.KIND, value="2.5", valid_from=now, actor="ada", created_at=now
    )
    found = plan({"scale": {"deployment": "sim-70b", "regions": [{"region": "us-east-1", "cells": 2}]}}).json()
    assert "its machines cost $5.00 an hour now and $10.00 then, by prices that are measured" in found["warnings"]


def test_a_rollout_is_predicted_by_the_rules_for_starting_it(cell_in_service: Cell) -> None:
    rows.version("2", state="released")
    rows.cell("sim-70b-us-east-1-2", rows.node("n-3"), rows.node("n-4"))
    DeploymentRegion.objects.update(cells=2)

    answer = plan({"rollout": {"deployment": "sim-70b", "version": "sim-70b@2", "policy": {"canary_bake_s": 1}}})

    assert answer.status_code == 200, answer.json()
    assert not Rollout.objects.exists()
    refused = plan({"rollout": {"deployment": "sim-70b", "version": "sim-70b@9"}})
    assert refused.status_code == 400
    assert "unknown model version 'sim-70b@9'" in refused.content.decode()


def test_the_loss_of_a_region_is_predicted(cell_in_service: Cell) -> None:
    answer = plan({"lose_region": "us-east-1"})

    assert answer.status_code == 200
    assert answer.json()["places"][0]["ready_least"] == 0


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "give one of rollout, scale, load, lose_region; got 0"),
        ({"lose_region": "us-east-1", "scale": {"deployment": "a", "regions": []}}, "regions"),
        ({"lose_region": "mars"}, "there is no region 'mars'"),
        (
            {"scale": {"deployment": "b", "regions": [{"region": "us-east-1", "cells": 1}]}},
            "there is no deployment 'b'",
        ),
        (
            {
                "scale": {
                    "deployment": "sim-70b",
                    "regions": [{"region": "us-east-1", "cells": {"prefill": 1, "decode": 1}}],
                }
            },
            "cannot have prefill and decode cells",
        ),
        ({"loose_region": "us-east-1"}, "unknown field"),
    ],
)
def test_a_wrong_question_says_what_would_be_right(cell_in_service: Cell, body: dict[str, Any], says: str) -> None:
    answer = plan(body)

    assert answer.status_code == 400
    assert says in answer.content.decode()


def test_nobody_asks_without_a_token(client: Any) -> None:
    assert client.post(URL, {}, content_type="application/json").status_code in {401, 403}


class TestLoad:
    @pytest.fixture
    def loaded(self, monkeypatch: pytest.MonkeyPatch) -> Steered:
        fleet = Steered({EAST: 3, WEST: 3}, {EAST: 20.0, WEST: 5.0})
        fleet.run(30)
        monkeypatch.setattr("kernel.clock.now", lambda: fleet.now)
        DeploymentRegion.objects.filter(region=EAST).update(cells_min=1, cells_max=9)
        return fleet

    def test_it_says_what_the_autoscaler_would_come_to(self, loaded: Steered) -> None:
        found = plan({"load": {"deployment": "sim-70b", "factor": 2.0}}, "viewer").json()
        assert {place["region"]: place["wanted"] for place in found["places"]} == {EAST: 6, WEST: 3}
        assert (
            f"sim-70b in {EAST} would have 6: 40.0 concurrent requests need 6 cells at 70% of 10 each"
            in found["warnings"]
        )
        fewer = plan({"load": {"deployment": "sim-70b", "factor": 0}}).json()
        assert {place["region"]: place["wanted"] for place in fewer["places"]} == {EAST: 1, WEST: 3}
        assert DeploymentRegion.objects.get(region=EAST).cells == 3

    def test_the_plan_of_the_day_is_scaled_with_it(self, loaded: Steered) -> None:
        self.planned(loaded, cells=8)
        found = plan({"load": {"deployment": "sim-70b", "factor": 1.0}}).json()
        assert {place["region"]: place["wanted"] for place in found["places"]}[EAST] == 8
        assert any("the day plan has 8 cells there" in note for note in found["warnings"])
        half = plan({"load": {"deployment": "sim-70b", "factor": 0.5}}).json()
        assert {place["region"]: place["wanted"] for place in half["places"]}[EAST] == 4

    def test_a_scaling_says_where_the_plan_of_the_day_has_other_cells(self, loaded: Steered) -> None:
        self.planned(loaded, cells=5)
        body = {"scale": {"deployment": "sim-70b", "regions": [{"region": EAST, "cells": 3}]}}
        note = f"the plan of the day has 5 cells of sim-70b in {EAST}, not 3: from "
        assert any(one.startswith(note) for one in plan(body).json()["warnings"])
        loaded.now += timedelta(hours=1)
        assert not any("plan of the day" in one for one in plan(body).json()["warnings"]), "it is too old"

    def planned(self, loaded: Steered, cells: int) -> None:
        """A plan with a constant number of cells all day."""
        row = DayPlan.objects.create(
            at=loaded.now, made_at=loaded.now, slot_s=900, solver="lp", took_s=1, shifts=0, dollars=[]
        )
        DayPlanPlace.objects.create(
            plan=row,
            deployment_id="sim-70b",
            region_id=EAST,
            cells=[cells] * 96,
            by_type={rows.KIND: [cells] * 96},
            expected=[40.0] * 96,
            cover=[7.0 * cells] * 96,
            budget=[1.0] * 96,
        )

    def test_it_needs_a_range_and_a_load(self, loaded: Steered) -> None:
        assert "nobody has reported" not in str(plan({"load": {"deployment": "sim-70b", "factor": 1}}).json())
        assert "there is no deployment" in str(plan({"load": {"deployment": "x", "factor": 1}}).json())
        loaded.now += timedelta(minutes=5)
        assert "no load of sim-70b was reported" in str(plan({"load": {"deployment": "sim-70b", "factor": 1}}).json())
        DeploymentRegion.objects.update(cells_min=None, cells_max=None)
        assert "a range nowhere" in str(plan({"load": {"deployment": "sim-70b", "factor": 1}}).json())

    def test_other_forecasts_say_that_they_leave_it_out(self, loaded: Steered) -> None:
        Deployment.objects.update(scaling={"mode": "act"})
        body = {"scale": {"deployment": "sim-70b", "regions": [{"region": EAST, "cells": {"min": 2, "max": 4}}]}}
        note = f"sim-70b in {EAST} is scaled by load within 1 to 9; that is not part of this"
        found = plan(body).json()
        assert note in found["warnings"]
        assert [place["wanted"] for place in found["places"] if place["region"] == EAST] == [3]
        assert note in plan({"lose_region": WEST}).json()["warnings"]
        Deployment.objects.update(scaling={})
        assert note not in plan(body).json()["warnings"]
