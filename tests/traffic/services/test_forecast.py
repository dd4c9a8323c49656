"""Rounds of the planner: real children, real rows."""

import sys
from collections.abc import Iterator
from datetime import datetime, timedelta

import pytest

from fleet.models import Cell, Deployment
from fleet.planning.forecast.series import LEADS, SLOTS
from kernel.leases import lease_take
from tests.hanging import HANGS
from tests.traffic.demand_rows import MADE, demand_days
from traffic.models import DemandDay, DemandForecast, ForecastRecord
from traffic.services.forecast import CHILD_ENDED_S, LEASE, WAITS_S, Forecaster, forecasts_trim
from traffic.services.planner import Planner

pytestmark = [pytest.mark.django_db, pytest.mark.processes]

BEGINS = MADE + timedelta(seconds=WAITS_S)
WRITES_HALF = (sys.executable, "-c", "import sys; sys.stdout.buffer.write(bytes([0, 0, 0, 9, 1]))")


class Rounds:
    """A planner whose children are waited for."""

    def __init__(self) -> None:
        self.forecaster = Forecaster()

    def make(self, now: datetime = BEGINS) -> int | None:
        """Begin a round and end it."""
        assert self.forecaster.look(now=now) is None
        if self.forecaster.child is None:
            return None
        self.forecaster.child.wait(timeout=120)
        return self.forecaster.look(now=now)


@pytest.fixture
def rounds() -> Iterator[Rounds]:
    made = Rounds()
    yield made
    made.forecaster.stop()


def test_a_round_forecasts_every_series(rounds: Rounds) -> None:
    demand_days(2)
    demand_days(2, load=5.0, serving_class="batch")

    assert rounds.make() == 2

    one = DemandForecast.objects.get(serving_class="realtime")
    assert (one.made_at, one.slot_s, len(one.p50), len(one.p90), len(one.methods)) == (MADE, 900, SLOTS, SLOTS, SLOTS)
    assert (one.p50[0], one.p50[-1]) == (20.0, 20.0)
    assert one.p90[0] > one.p50[0]
    assert not one.is_judged, "there are no errors to go by yet"
    assert one.ledger_at == BEGINS
    assert DemandForecast.objects.get(serving_class="batch").p50[0] == 5.0


def test_what_all_methods_said_is_kept_twice_an_hour(rounds: Rounds) -> None:
    demand_days(2)
    rounds.make()
    rounds.make(BEGINS + timedelta(minutes=5))

    record = ForecastRecord.objects.get()
    assert record.made_at == MADE
    assert record.p50["blend"] == [20.0] * len(LEADS)
    assert DemandForecast.objects.get().made_at == MADE + timedelta(minutes=5)


def test_records_make_a_ledger_and_quantiles_that_rest_on_errors(rounds: Rounds) -> None:
    demand_days(4)
    rounds.make()
    series = DemandForecast.objects.get()
    said = {"blend": [25.0] * len(LEADS), "last": [20.2] * len(LEADS)}
    ForecastRecord.objects.all().delete()
    ForecastRecord.objects.bulk_create(
        ForecastRecord(series=series, made_at=MADE - timedelta(minutes=30 * number), p50=said, p90=said)
        for number in range(1, 170)
    )

    rounds.make(BEGINS + timedelta(hours=1, minutes=5))

    series.refresh_from_db()
    assert series.is_judged
    assert set(series.methods[:60]) == {"last"}
    assert series.p90[0] == pytest.approx(series.p50[0], rel=0.01)
    assert series.ledger["scores"]["blend"][0]["wape"] == 0.25


def test_three_days_give_a_model_which_is_kept(rounds: Rounds) -> None:
    demand_days(4)
    rounds.make()
    model = bytes(DemandForecast.objects.get().model)
    assert model
    assert "lightgbm+blend" in ForecastRecord.objects.get().p50

    rounds.make(BEGINS + timedelta(minutes=5))

    assert bytes(DemandForecast.objects.get().model) == model
    assert DemandForecast.objects.get().ledger_at == BEGINS


def test_a_model_that_cannot_be_read_leaves_forecasts_without_it(rounds: Rounds) -> None:
    demand_days(4)
    rounds.make()
    DemandForecast.objects.update(model=b"spoilt", ledger={"chosen": 7})

    assert rounds.make(BEGINS + timedelta(minutes=5)) == 1
    assert "LightGBM has no say" in DemandForecast.objects.get().problem


def test_a_slot_is_forecast_from_once(rounds: Rounds) -> None:
    demand_days(1)
    assert rounds.make(MADE + timedelta(seconds=WAITS_S - 1)) is None, "the last slot may still be written"
    assert rounds.make() == 1
    assert rounds.make(BEGINS + timedelta(seconds=200)) is None


def test_one_planner_forecasts_at_a_time(rounds: Rounds) -> None:
    demand_days(1)
    lease_take(name=LEASE, holder="another", ttl_s=3600, now=BEGINS)

    assert rounds.make() is None


def test_without_demand_no_child_is_started(rounds: Rounds) -> None:
    assert rounds.make() is None
    assert rounds.forecaster.child is None


def test_a_child_that_hangs_is_ended_and_the_next_round_comes(rounds: Rounds) -> None:
    demand_days(1)
    hanging = Forecaster(HANGS)
    assert hanging.look(now=BEGINS) is None
    child = hanging.child
    assert child is not None
    assert hanging.look(now=BEGINS + timedelta(seconds=CHILD_ENDED_S - 1)) is None

    assert hanging.look(now=BEGINS + timedelta(seconds=CHILD_ENDED_S)) == 0

    assert child.returncode is not None
    assert rounds.make(BEGINS + timedelta(minutes=5)) == 1


def test_what_a_child_did_not_write_whole_counts_for_nothing() -> None:
    demand_days(1)
    broken = Forecaster(WRITES_HALF)
    broken.look(now=BEGINS)
    assert broken.child is not None
    broken.child.wait(timeout=60)

    assert broken.look(now=BEGINS) == 0
    assert not DemandForecast.objects.exists()


def test_a_planner_that_stops_ends_its_child() -> None:
    demand_days(1)
    forecaster = Forecaster(HANGS)
    planner = Planner(forecaster)
    assert planner.look(now=BEGINS) is False
    child = forecaster.child

    planner.stop()

    assert child is not None
    assert child.returncode is not None


def test_a_deployment_that_went_meanwhile_has_no_forecast(rounds: Rounds) -> None:
    demand_days(1)
    rounds.forecaster.look(now=BEGINS)
    Cell.objects.all().delete()
    Deployment.objects.all().delete()
    assert rounds.forecaster.child is not None
    rounds.forecaster.child.wait(timeout=120)

    assert rounds.forecaster.look(now=BEGINS) == 0


def test_records_are_kept_for_eight_days(rounds: Rounds) -> None:
    demand_days(1)
    rounds.make()
    forecasts_trim(now=MADE + timedelta(days=7))
    assert ForecastRecord.objects.count() == 1

    forecasts_trim(now=MADE + timedelta(days=9))

    assert not ForecastRecord.objects.exists()
    assert not DemandForecast.objects.exists()
    assert DemandDay.objects.exists()
