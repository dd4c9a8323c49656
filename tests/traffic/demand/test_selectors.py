from datetime import timedelta
from math import isnan

import pytest

from tests.fleet import rows
from tests.traffic.rows import EAST, MADE, demand_days, forecast_row
from traffic.demand.models import DemandDay
from traffic.demand.selectors import expected_loads, forecasts, series_pasts
from traffic.region_shares.models import TrafficMatrix

pytestmark = pytest.mark.django_db

WEST = "us-west-2"
PLACE = ("sim-70b", EAST)


def test_a_past_begins_with_its_first_day_and_ends_where_it_is_asked_to() -> None:
    demand_days(2)

    (key, slots), *others = list(series_pasts(MADE))

    assert (str(key), others) == ("sim-70b from us-east-1, realtime", [])
    assert (len(slots), set(slots)) == (2 * 288 + 144, {20.0})


def test_what_is_not_there_is_a_hole() -> None:
    demand_days(3)
    DemandDay.objects.filter(day=(MADE - timedelta(days=2)).date()).delete()
    DemandDay.objects.filter(day=MADE.date()).update(loads=[1.0, None, 3.0])

    slots = dict(series_pasts(MADE)).popitem()[1]

    assert all(isnan(load) for load in slots[288 : 2 * 288])
    assert (slots[3 * 288], slots[3 * 288 + 2]) == (1.0, 3.0)
    assert isnan(slots[3 * 288 + 1])
    assert isnan(slots[-1])
    assert len(slots) == 3 * 288 + 144


def test_what_is_older_than_five_weeks_is_no_past() -> None:
    demand_days(1)

    assert not list(series_pasts(MADE + timedelta(days=37)))


def test_forecasts_older_than_twenty_minutes_are_none() -> None:
    forecast_row()

    assert len(forecasts(MADE + timedelta(minutes=20), "sim-70b")) == 1
    assert not forecasts(MADE + timedelta(minutes=21))
    assert not forecasts(MADE, "another")


def test_what_is_expected_follows_the_shares_in_force() -> None:
    forecast_row(load=30.0)
    forecast_row(load=10.0, serving_class="near_realtime")
    forecast_row(load=100.0, serving_class="batch")
    rows.region(WEST)
    TrafficMatrix.objects.create(deployment_id="sim-70b", shares={EAST: {EAST: 0.75, WEST: 0.25}})

    assert expected_loads(MADE, {"sim-70b": 1800.0}) == {
        PLACE: pytest.approx(36.0),
        ("sim-70b", WEST): pytest.approx(12.0),
    }


def test_without_shares_requests_stay_at_home() -> None:
    forecast_row()

    assert expected_loads(MADE, {"sim-70b": 60.0}) == {PLACE: 36.0}


@pytest.mark.parametrize(
    ("judged", "after", "within_s"),
    [(False, timedelta(), 60.0), (True, timedelta(minutes=21), 60.0), (True, timedelta(), 90_000.0)],
)
def test_nothing_is_expected_by_what_nobody_can_tell(judged: bool, after: timedelta, within_s: float) -> None:
    forecast_row(judged=judged)

    assert expected_loads(MADE + after, {"sim-70b": within_s}) == {}
