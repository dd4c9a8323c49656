"""Forecasts on a deployment's page: what was, what was said an hour before, and what is expected, with the errors."""

from dataclasses import dataclass
from datetime import date, datetime, timedelta

from controlplane.dashboard.charts import Band, Chart, Series
from fleet.planning.forecast.errors import HorizonErrors, horizon_errors
from fleet.planning.forecast.series import HISTORY_SLOT_S, LEADS, SLOT_S, SLOTS
from traffic.models import DemandDay, DemandForecast, ForecastRecord
from traffic.selectors.demand import FORECAST_FRESH_FOR

SERIES_SHOWN = 4
"""Those with most load; the API has all."""
PER_SLOT = SLOT_S // HISTORY_SLOT_S
HOUR = LEADS.index(3)
"""The horizon of an hour: its slot begins 45 minutes after the forecast."""
DAY = timedelta(days=1)
Values = list[float | None]


@dataclass(frozen=True, slots=True)
class ForecastRow:
    """A series. `errors`: of the method in force at each horizon; `is_old`: nobody goes by it any more."""

    forecast: DemandForecast
    chart: Chart
    errors: tuple[HorizonErrors, ...]
    is_old: bool


@dataclass(frozen=True, slots=True)
class Forecasts:
    """What a page shows of one deployment; `hidden`: series that it does not."""

    deployment: str
    rows: tuple[ForecastRow, ...]
    hidden: int


def forecasts_of(deployment: str, now: datetime) -> Forecasts:
    found = DemandForecast.objects.filter(deployment=deployment)
    ordered = sorted(found, key=lambda row: -max(row.p50, default=0.0))
    shown = ordered[:SERIES_SHOWN]
    begins = min((row.made_at for row in shown), default=now) - DAY
    records = ForecastRecord.objects.filter(series__in=shown, made_at__gte=begins - timedelta(hours=1))
    days = DemandDay.objects.filter(deployment=deployment, day__gte=begins.date())
    loads = {(day.origin_id, day.serving_class, day.day): day.loads for day in days}
    said: dict[int, list[ForecastRecord]] = {}
    for record in records:
        said.setdefault(record.series_id, []).append(record)
    return Forecasts(
        deployment,
        tuple(_row(row, loads, said.get(row.pk, []), now) for row in shown),
        len(ordered) - len(shown),
    )


def _row(
    row: DemandForecast,
    loads: dict[tuple[str, str, date], list[float | None]],
    records: list[ForecastRecord],
    now: datetime,
) -> ForecastRow:
    begins = row.made_at - DAY
    nothing: Values = [None] * SLOTS
    before, before_p90 = _said_an_hour_before(row, records, begins)
    chart = Chart(
        f"forecast-{row.pk}",
        f"From {row.origin_id}, {row.serving_class}",
        "requests at once",
        begins,
        SLOT_S,
        (
            Series("load", [*(_load(row, loads, begins, slot) for slot in range(SLOTS)), *nothing]),
            Series("p50", [*nothing, *row.p50]),
            Series("p90", [*nothing, *row.p90], dashed=True),
            Series("p50, an hour before", [*before, *nothing]),
            Series("p90, an hour before", [*before_p90, *nothing], dashed=True),
        ),
        bands=(Band("expected", row.made_at, row.made_at + DAY),),
    )
    errors = tuple(one for one in horizon_errors(row.ledger) if one.chosen)
    return ForecastRow(row, chart, errors, now - row.made_at > FORECAST_FRESH_FOR)


def _load(
    row: DemandForecast, loads: dict[tuple[str, str, date], list[float | None]], begins: datetime, slot: int
) -> float | None:
    """The mean of what is known of a slot."""
    known = []
    for part in range(PER_SLOT):
        at = begins + timedelta(seconds=slot * SLOT_S + part * HISTORY_SLOT_S)
        number = (at.hour * 3600 + at.minute * 60) // HISTORY_SLOT_S
        there = loads.get((row.origin_id, row.serving_class, at.date()), [])
        known += [load for load in there[number : number + 1] if load is not None]
    return sum(known) / len(known) if known else None


def _said_an_hour_before(row: DemandForecast, records: list[ForecastRecord], begins: datetime) -> tuple[Values, Values]:
    """p50 and p90 of the method in force now; each record stands for half an hour."""
    method = row.methods[LEADS[HOUR]]
    both: tuple[Values, Values] = ([None] * SLOTS, [None] * SLOTS)
    for record in records:
        first = round((record.made_at - begins).total_seconds() / SLOT_S) + LEADS[HOUR]
        for values, said in zip(both, (record.p50, record.p90), strict=True):
            for slot in range(max(0, first), min(SLOTS, first + 2)):
                values[slot] = said[method][HOUR] if method in said else None
    return both
