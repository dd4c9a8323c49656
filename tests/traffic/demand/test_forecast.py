"""Rounds of the forecaster on rows."""

from collections.abc import Iterable
from datetime import datetime, timedelta

import pytest

from fleet.capacity.planning import forecast as ledger
from fleet.capacity.planning.forecast import Past
from fleet.capacity.planning.forecast_series import LEADS, SLOTS, Calibration, Record
from fleet.cells.models import Cell
from fleet.deployments.models import Deployment
from kernel.leases import lease_take
from tests.traffic.rows import MADE, demand_days
from traffic.demand.models import DemandDay, DemandForecast, ForecastRecord
from traffic.demand.services import FORECAST_LEASE, WAITS_S, Forecaster, forecasts_trim

pytestmark = pytest.mark.django_db

BEGINS = MADE + timedelta(seconds=WAITS_S)


def make(now: datetime = BEGINS) -> int | None:
    """A round of a forecaster that has just started."""
    return Forecaster().run_if_due(now=now)


def test_a_round_forecasts_every_series() -> None:
    demand_days(2)
    demand_days(2, load=5.0, serving_class="batch")

    assert make() == 2

    one = DemandForecast.objects.get(serving_class="realtime")
    assert (one.made_at, one.slot_s, len(one.p50), len(one.p90), len(one.methods)) == (MADE, 900, SLOTS, SLOTS, SLOTS)
    assert (one.p50[0], one.p50[-1]) == (20.0, 20.0)
    assert one.p90[0] > one.p50[0]
    assert not one.is_judged, "there are no past errors yet"
    assert one.ledger_at == BEGINS
    assert DemandForecast.objects.get(serving_class="batch").p50[0] == 5.0


def test_what_all_methods_said_is_kept_twice_an_hour() -> None:
    demand_days(2)
    make()
    make(BEGINS + timedelta(minutes=5))

    record = ForecastRecord.objects.get()
    assert record.made_at == MADE
    assert record.p50["blend"] == [20.0] * len(LEADS)
    assert DemandForecast.objects.get().made_at == MADE + timedelta(minutes=5)


def test_records_make_a_ledger_and_quantiles_that_rest_on_errors() -> None:
    demand_days(4)
    make()
    series = DemandForecast.objects.get()
    said = {"blend": [25.0] * len(LEADS), "last": [20.2] * len(LEADS)}
    ForecastRecord.objects.all().delete()
    ForecastRecord.objects.bulk_create(
        ForecastRecord(series=series, made_at=MADE - timedelta(minutes=30 * number), p50=said, p90=said)
        for number in range(1, 170)
    )

    make(BEGINS + timedelta(hours=1, minutes=5))

    series.refresh_from_db()
    assert series.is_judged
    assert set(series.methods[:60]) == {"last"}
    assert series.p90[0] == pytest.approx(series.p50[0], rel=0.01)
    assert series.ledger["scores"]["blend"][0]["wape"] == 0.25


def test_ledgers_are_renewed_once_an_hour() -> None:
    demand_days(4)
    make()
    make(BEGINS + timedelta(minutes=55))
    assert DemandForecast.objects.get().ledger_at == BEGINS

    make(BEGINS + timedelta(minutes=60))

    assert DemandForecast.objects.get().ledger_at == BEGINS + timedelta(minutes=60)


def test_a_ledger_of_another_form_begins_again() -> None:
    demand_days(4)
    make()
    DemandForecast.objects.update(ledger={"chosen": 7})

    assert make(BEGINS + timedelta(minutes=5)) == 1
    assert set(DemandForecast.objects.get().methods) == {"blend"}


def test_a_slot_is_forecast_from_once() -> None:
    demand_days(1)
    forecaster = Forecaster()
    assert forecaster.run_if_due(now=MADE + timedelta(seconds=WAITS_S - 1)) is None, (
        "the last slot may still be written"
    )
    assert forecaster.run_if_due(now=BEGINS) == 1
    assert forecaster.run_if_due(now=BEGINS + timedelta(seconds=200)) is None


def test_one_planner_forecasts_at_a_time() -> None:
    demand_days(1)
    lease_take(name=FORECAST_LEASE, holder="another", ttl_s=3600, now=BEGINS)

    assert make() is None
    assert not DemandForecast.objects.exists()


def test_without_demand_there_is_no_round() -> None:
    assert make() is None


def test_a_series_that_cannot_be_forecast_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    demand_days(1)
    demand_days(1, serving_class="batch")
    calibrate = ledger.calibrate

    def breaks_for_batch(past: Past, records: Iterable[Record], before: Calibration) -> Calibration:
        if past.key.serving_class == "batch":
            raise ArithmeticError("no such load")
        return calibrate(past, records, before)

    monkeypatch.setattr(ledger, "calibrate", breaks_for_batch)

    assert make() == 1
    assert DemandForecast.objects.get().serving_class == "realtime"


def test_a_deployment_that_was_removed_during_the_round_has_no_forecast(monkeypatch: pytest.MonkeyPatch) -> None:
    demand_days(1)
    calibrate = ledger.calibrate

    def removes(past: Past, records: Iterable[Record], before: Calibration) -> Calibration:
        DemandDay.objects.all().delete()
        Cell.objects.all().delete()
        Deployment.objects.all().delete()
        return calibrate(past, records, before)

    monkeypatch.setattr(ledger, "calibrate", removes)

    assert make() == 0


def test_records_are_kept_for_eight_days() -> None:
    demand_days(1)
    make()
    forecasts_trim(now=MADE + timedelta(days=7))
    assert ForecastRecord.objects.count() == 1

    forecasts_trim(now=MADE + timedelta(days=9))

    assert not ForecastRecord.objects.exists()
    assert not DemandForecast.objects.exists()
    assert DemandDay.objects.exists()
