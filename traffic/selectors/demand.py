"""Series of demand with their past, as the forecasters take them, and what is expected of them."""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from itertools import groupby
from math import nan

from fleet.planning.forecast.series import HISTORY_SLOT_S, Forecast, SeriesKey, forecast_at
from traffic.models import DemandDay, DemandForecast, TrafficMatrix

HISTORY = timedelta(days=35)
"""Five weeks: as far back as shapes and models look."""
FORECAST_FRESH_FOR = timedelta(minutes=20)
"""Four rounds of the planner; an older forecast is none."""
SLOTS_A_DAY = 86_400 // HISTORY_SLOT_S


def series_pasts(until: datetime) -> Iterable[tuple[SeriesKey, "array[float]"]]:
    """Series -> its loads in slots of `HISTORY_SLOT_S` up to `until`, which ends a slot; NaN where there is a hole,
    from the first day that is known. Series of which nothing is known in that time are left out."""
    rows = DemandDay.objects.filter(day__gte=(until - HISTORY).date(), day__lte=until.date()).values_list(
        "deployment_id", "origin_id", "serving_class", "day", "loads"
    )
    ordered = rows.order_by("deployment_id", "origin_id", "serving_class", "day")
    for key, days in groupby(ordered.iterator(), key=lambda row: SeriesKey(*row[:3])):
        if slots := _slots([(day, loads) for *_, day, loads in days], until):
            yield key, slots


def _slots(days: Sequence[tuple[date, Sequence[float | None]]], until: datetime) -> "array[float]":
    begins = datetime.combine(days[0][0], datetime.min.time(), UTC)
    slots = array("d", [nan]) * max(0, int((until - begins).total_seconds() // HISTORY_SLOT_S))
    for day, loads in days:
        first = (day - days[0][0]).days * SLOTS_A_DAY
        for number, load in enumerate(loads[: max(0, len(slots) - first)], first):
            slots[number] = nan if load is None else load
    return slots


def forecast_of(row: DemandForecast) -> Forecast:
    """The row as planners take it."""
    return Forecast(row.key, row.made_at, row.slot_s, tuple(row.p50), tuple(row.p90), tuple(row.methods))


def forecasts(now: datetime, deployment: str = "") -> list[Forecast]:
    """The newest forecast of each series, of all deployments or this one, where it is not too old."""
    rows = DemandForecast.objects.filter(made_at__gte=now - FORECAST_FRESH_FOR).defer("model", "ledger", "p99")
    return [forecast_of(row) for row in (rows.filter(deployment=deployment) if deployment else rows)]


def expected_loads(
    now: datetime, within_s: Mapping[str, float], without: str = "batch"
) -> dict[tuple[str, str], float]:
    """Deployment, serving region -> requests at once, by the sum of the greatest p90 of its series within the time that
    is given for the deployment, shared among regions as its requests are now. Series of the class `without` are guests
    and count for nothing; nor do those whose quantiles rest on no errors yet."""
    rows = DemandForecast.objects.filter(
        made_at__gte=now - FORECAST_FRESH_FOR, deployment__in=list(within_s), is_judged=True
    )
    shares = dict(TrafficMatrix.objects.filter(deployment__in=list(within_s)).values_list("deployment_id", "shares"))
    loads: dict[tuple[str, str], float] = {}
    for row in rows.exclude(serving_class=without).defer("model", "ledger", "p99"):
        peak = forecast_at(forecast_of(row), now, within_s[row.deployment_id])
        for region, share in shares.get(row.deployment_id, {}).get(row.origin_id, {row.origin_id: 1.0}).items():
            if peak is not None:
                place = (row.deployment_id, region)
                loads[place] = loads.get(place, 0.0) + share * peak
    return loads
