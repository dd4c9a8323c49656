"""The loss of a region from the fleet's rows, for pages and the API."""

from datetime import timedelta

import pytest
from django.http import QueryDict

from controlplane.stress import LEAST_FACTOR, MOST_FACTOR, Question, question_of, what_if
from fleet.capacity.models import DayPlan, DayPlanPlace
from fleet.deployments.models import DeploymentRegion
from models_registry.versions.models import ModelVersion
from tests.controlplane.api.client import bearer
from tests.controlplane.dashboard.clients import fragment, signed_in
from tests.fleet import rows
from tests.traffic.rows import EAST, MADE, forecast_row
from traffic.region_shares.models import RegionLoss
from traffic.region_shares.services.losses import region_losses_store

pytestmark = pytest.mark.django_db

WEST = "us-west-2"
NOW = MADE + timedelta(seconds=20)


@pytest.fixture(autouse=True)
def _two_regions() -> None:
    """Two cells for 64 requests in the east, one in the west."""
    rows.deployment(cells=2, where=EAST)
    rows.deployment(cells=1, where=WEST)
    ModelVersion.objects.update(max_concurrency=64)


def test_a_loss_is_stored_shown_and_served() -> None:
    forecast_row(75)
    assert region_losses_store(now=NOW) == 1
    assert region_losses_store(now=NOW) == 1, "a second controller replaces the same rows"
    east, west = RegionLoss.objects.all()
    assert (east.region_id, west.shortages) == (EAST, [])
    assert east.shortages[0]["load"] == 90.0
    assert round(east.shortages[0]["unplaced"]) == round(90 - 0.8 * 64)
    said = "sim-70b lacks room for 39 of 90 requests at 12:00 UTC"
    for url, name in (("/", "map"), ("/regions/", "regions-table")):
        text = fragment(signed_in(), url, name)
        assert said in text
        assert "holds" in text
    details = " ".join(fragment(signed_in(), f"/regions/{EAST}/", "region").split())
    assert '<td class="number">90</td> <td class="number">39</td>' in details
    assert "The other regions have room." in fragment(signed_in(), f"/regions/{WEST}/", "region")
    found = bearer().get(f"/api/v1/traffic/losses/{EAST}").json()
    assert (found["deployments"], found["shortages"][0]["deployment"]) == (1, "sim-70b")


def test_cells_that_the_plan_of_the_day_has_then_count() -> None:
    forecast_row(75)
    DeploymentRegion.objects.filter(region=WEST).update(cells_min=1, cells_max=4)
    plan = DayPlan.objects.create(at=MADE, made_at=MADE, slot_s=900, solver="x", took_s=1, shifts=0, dollars=[])
    DayPlanPlace.objects.create(
        plan=plan, deployment_id="sim-70b", region_id=WEST, cells=[2] * 96, expected=[0.0] * 96, cover=[0.0] * 96
    )
    assert region_losses_store(now=NOW) == 0


def test_without_a_recent_forecast_nothing_is_said() -> None:
    forecast_row(75)
    region_losses_store(now=NOW)
    assert region_losses_store(now=NOW + timedelta(hours=1)) == 0
    assert not RegionLoss.objects.exists()
    assert "no forecast" in fragment(signed_in(), "/regions/", "regions-table")


def test_batches_wait_and_lack_nothing() -> None:
    forecast_row(750, serving_class="batch")
    assert region_losses_store(now=NOW) == 0


def test_the_page_says_how_much_the_fleet_carries_and_what_breaks_first() -> None:
    assert "No forecast of the next day yet" in fragment(signed_in(), f"/what-if/?lost={EAST}&factor=nan", "what-if")
    forecast_row(75)
    view = what_if(Question(1.2, (EAST, "unknown")), now=NOW, has_time=lambda: True)
    assert view.headline.startswith("the fleet without us-east-1 holds until 0.5x the forecast")
    assert view.headline.endswith("first to break: TTFT of sim-70b in us-east-1 at 12:00 UTC")
    assert (view.question.lost, view.rows[0].stress.breaks) == ((EAST,), True)


@pytest.mark.parametrize(
    ("text", "factor"), [("nan", 1), ("1e999", 1), ("-5", LEAST_FACTOR), ("99", MOST_FACTOR), ("x", 1), ("", 1)]
)
def test_an_impossible_multiple_is_brought_into_its_range(text: str, factor: float) -> None:
    assert question_of(QueryDict(f"factor={text}")).factor == factor


def test_the_page_simulates_the_loss_of_a_region() -> None:
    shown = fragment(signed_in(), f"/what-if/?simulate={WEST}", "what-if")
    assert f"If {WEST} is lost now" in shown
    assert "Machines launched" in shown
    assert "There is no region" in fragment(signed_in(), "/what-if/?simulate=mars", "what-if")
