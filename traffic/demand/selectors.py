"""Reads series with their past for forecasters, and expected loads. It never writes."""

from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from itertools import groupby
from math import nan

from django.db.models import F

from engine_agent.protocol.states import ServingClass
from fleet.capacity.planning.forecast_series import HISTORY_SLOT_S, Forecast, SeriesKey, forecast_at
from fleet.nodes.models import NodeReport, holds_since
from traffic.demand.models import DemandDay, DemandForecast
from traffic.demand.planner import Place, batch_work_share
from traffic.region_shares.models import TrafficMatrix

HISTORY = timedelta(days=9)
"""Methods need a week and an hour, ledgers a week of records and a day of lead."""
FORECAST_FRESH_FOR = timedelta(minutes=20)
"""Four rounds of the planner; older forecasts are ignored."""
FRESH_FOR = timedelta(seconds=15)
"""Age limit of reports, as in the region autopilot."""
CLASSES = frozenset(one.value for one in ServingClass)
"""Other classes in reports are ignored."""
SLOTS_A_DAY = 86_400 // HISTORY_SLOT_S


def series_pasts(until: datetime) -> Iterable[tuple[SeriesKey, "array[float]"]]:
    """Returns the loads of each series in slots of `HISTORY_SLOT_S` up to the slot end `until`, from its first known
    day; NaN marks a gap. Series without data in that time are omitted."""
    rows = DemandDay.objects.filter(day__gte=(until - HISTORY).date(), day__lte=until.date()).values_list(
        "deployment_id", "origin_id", "serving_class", "day", "loads"
    )
    ordered = rows.order_by("deployment_id", "origin_id", "serving_class", "day")
    for key, days in groupby(ordered.iterator(), key=lambda row: SeriesKey(*row[:3])):
        if slots := _slot_loads([(day, loads) for *_, day, loads in days], until):
            yield key, slots


def _slot_loads(days: Sequence[tuple[date, Sequence[float | None]]], until: datetime) -> "array[float]":
    begins = datetime.combine(days[0][0], datetime.min.time(), UTC)
    slots = array("d", [nan]) * max(0, int((until - begins).total_seconds() // HISTORY_SLOT_S))
    for day, loads in days:
        first = (day - days[0][0]).days * SLOTS_A_DAY
        for number, load in enumerate(loads[: max(0, len(slots) - first)], first):
            slots[number] = nan if load is None else load
    return slots


def forecast_of(row: DemandForecast) -> Forecast:
    return Forecast(row.key, row.made_at, row.slot_s, tuple(row.p50), tuple(row.p90), tuple(row.methods))


def forecasts(now: datetime, deployment: str = "") -> list[Forecast]:
    """Returns the newest, recent forecast of each series, of one or all deployments."""
    rows = DemandForecast.objects.filter(made_at__gte=now - FORECAST_FRESH_FOR).defer("ledger", "p99")
    return [forecast_of(row) for row in (rows.filter(deployment=deployment) if deployment else rows)]


def expected_loads(
    now: datetime, within_s: Mapping[str, float], without: str = "batch"
) -> dict[tuple[str, str], float]:
    """Returns (deployment, serving region) -> expected concurrent requests: the sum of the series' highest p90 within
    each deployment's lead time, at the present shares. Series of class `without`, and those without past errors, are
    excluded."""
    rows = DemandForecast.objects.filter(
        made_at__gte=now - FORECAST_FRESH_FOR, deployment__in=list(within_s), is_judged=True
    )
    shares = dict(TrafficMatrix.objects.filter(deployment__in=list(within_s)).values_list("deployment_id", "shares"))
    loads: dict[tuple[str, str], float] = {}
    for row in rows.exclude(serving_class=without).defer("ledger", "p99"):
        peak = forecast_at(forecast_of(row), now, within_s[row.deployment_id])
        for region, share in shares.get(row.deployment_id, {}).get(row.origin_id, {row.origin_id: 1.0}).items():
            if peak is not None:
                place = (row.deployment_id, region)
                loads[place] = loads.get(place, 0.0) + share * peak
    return loads


def in_cells_by_class(now: datetime) -> dict[Place, dict[str, float]]:
    """Returns concurrent requests by class, as each leader reports for its cell."""
    found: dict[Place, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for place, classes in _cells_by_class(now):
        for serving_class, count in classes.items():
            found[place][serving_class] += count
    return found


def batch_work_shares(now: datetime) -> dict[Place, float]:
    cells: dict[Place, list[Mapping[str, float]]] = defaultdict(list)
    for place, classes in _cells_by_class(now):
        cells[place].append(classes)
    return {place: batch_work_share(there) for place, there in cells.items()}


def _cells_by_class(now: datetime) -> Iterable[tuple[Place, Mapping[str, float]]]:
    cell = "node__member__cell__"
    reports = NodeReport.objects.filter(
        holds_since(now - FRESH_FOR), node__member__rank=0, cell=F("node__member__cell_id"), load__isnull=False
    )
    for deployment, region, classes in reports.values_list(f"{cell}deployment_id", f"{cell}region_id", "load__classes"):
        known = CLASSES & (classes or {}).keys()
        yield (deployment, region), {name: max(0, classes[name].get("in_flight", 0)) for name in known}
