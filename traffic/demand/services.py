"""Measures the demand of each series, writes the mean of each past slot, and forecasts all series every five minutes.
Samples come from stored reports, and those of the current slot are in memory only, so a killed planner leaves a gap. A
round takes about 1 ms per series and 30 ms per renewed error ledger. A series that cannot be forecast is logged and
skipped."""

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import msgspec
from django.db import connection, transaction

from fleet.capacity.planning.forecast_series import HISTORY_SLOT_S, SLOT_S, Calibration, Record, SeriesKey
from fleet.deployments.models import Deployment
from fleet.regions.models import Region
from kernel import live, wake_ups
from kernel.leases import lease_during, lease_take, this_holder
from traffic.demand.models import DemandDay, DemandForecast, ForecastRecord
from traffic.demand.planner import Place, PoolSample, SlotMeans, origin_loads, series_loads, slot_of
from traffic.demand.selectors import FRESH_FOR, in_cells_by_class, series_pasts
from traffic.region_shares.selectors.traffic import IngressView, ingress_views

if TYPE_CHECKING:
    from fleet.capacity.planning.forecast import Made


LEASE = "traffic:demand"
LEASE_S = 20.0
"""After this time another planner may measure. A sample takes tens of milliseconds, every 5 s."""
DAYS_KEPT = timedelta(days=36)
"""Five weeks and the current day."""
SLOTS_A_DAY = 86_400 // HISTORY_SLOT_S
_WRITE = """
    INSERT INTO traffic_demandday (deployment_id, origin_id, serving_class, day, loads)
    SELECT seen.deployment, seen.origin, seen.class, %(day)s,
        array_fill(NULL::float8, ARRAY[%(number)s - 1]) || seen.load
    FROM unnest(%(deployments)s::text[], %(origins)s::text[], %(classes)s::text[], %(loads)s::float8[])
        AS seen(deployment, origin, class, load)
    JOIN fleet_deployment ON fleet_deployment.name = seen.deployment
    JOIN fleet_region ON fleet_region.name = seen.origin
    ON CONFLICT (deployment_id, origin_id, serving_class, day)
    DO UPDATE SET loads[%(number)s] = EXCLUDED.loads[%(number)s]
"""


@dataclass(frozen=True, slots=True)
class _Sample:
    """A sample by deployment: its pools in regions that have fully reported, and its loads."""

    pools: Mapping[str, Mapping[str, PoolSample]]
    loads: Mapping[SeriesKey, float]

    @property
    def places(self) -> list[Place]:
        return [(deployment, region) for deployment, regions in self.pools.items() for region in regions]


class DemandMeter:
    """Measurements of one planner; a lease admits one planner at a time."""

    def __init__(self) -> None:
        self._open: SlotMeans | None = None
        self._before: Mapping[str, Mapping[str, PoolSample]] = {}

    def sample(self, *, now: datetime) -> int:
        """Takes a sample. Returns the number of series whose past slot was written."""
        if lease_take(name=LEASE, holder=this_holder(), ttl_s=LEASE_S, now=now) is None:
            self._open = None
            return 0
        index, written = slot_of(now.timestamp()), 0
        if self._open is not None and self._open.index != index:
            ended, self._open = self._open, None
            if ended.index == index - 1:
                written = slot_write(ended)
        seen = _sample_pools(self._before, now)
        self._open, self._before = self._open or SlotMeans(index), seen.pools
        self._open.add(now.timestamp(), seen.places, seen.loads)
        return written


def slot_write(slot: SlotMeans) -> int:
    """Writes the means of a slot in one statement. Returns their number."""
    starts_at = datetime.fromtimestamp(slot.index * HISTORY_SLOT_S, UTC)
    days = DemandDay.objects.filter(day__gte=(starts_at - timedelta(days=1)).date())
    known = {SeriesKey(*row) for row in days.values_list("deployment_id", "origin_id", "serving_class")}
    means = sorted(slot.means(known).items())
    if not means:
        return 0
    with connection.cursor() as cursor:
        cursor.execute(
            _WRITE,
            {
                "day": starts_at.date(),
                "number": slot.index % SLOTS_A_DAY + 1,
                "deployments": [key.deployment for key, _ in means],
                "origins": [key.origin for key, _ in means],
                "classes": [key.serving_class for key, _ in means],
                "loads": [load for _, load in means],
            },
        )
    wake_ups.send("traffic.plan")
    return len(means)


def demand_trim(*, now: datetime) -> None:
    """Deletes days that no forecast reads."""
    DemandDay.objects.filter(day__lt=(now - DAYS_KEPT).date()).delete()


def _sample_pools(before: Mapping[str, Mapping[str, PoolSample]], now: datetime) -> _Sample:
    views, in_cells = ingress_views(), in_cells_by_class(now)
    pools: dict[str, dict[str, PoolSample]] = {}
    loads: dict[SeriesKey, float] = {}
    for name, own_class in Deployment.objects.values_list("name", "serving_class"):
        pools[name] = {
            region: pool for region, there in views.items() if (pool := _pool_sample(there, name, now)) is not None
        }
        origins = origin_loads(pools[name], before.get(name, {}))
        loads |= series_loads(name, own_class, origins, in_cells)
    return _Sample(pools, loads)


def _pool_sample(ingresses: list[IngressView], deployment: str, now: datetime) -> PoolSample | None:
    """Returns None if an ingress of the region has no recent report of this deployment."""
    whole = PoolSample(0.0)
    for ingress in ingresses:
        row = ingress.telemetry.get("pools", {}).get(deployment)
        if row is None or ingress.seen_at is None or now - ingress.seen_at > FRESH_FOR:
            return None
        # HAProxy's sessions of a backend are those on a server and those in its queue.
        whole += PoolSample(row.get("in_flight", 0), row.get("spilled_in_flight", 0), row.get("spilled_to", {}))
    return whole


FORECAST_LEASE = "traffic:forecast"
FORECAST_LEASE_S = 120.0
WAITS_S = 12.0
"""Delay after a slot's end until its means are written."""
LEDGER_DUE_AFTER = timedelta(hours=1)
LEDGERS_LEAST, LEDGERS_SHARE = 4, 4
"""A round renews at least this many due ledgers, or this share of them, to spread the work."""
NEVER = datetime.fromtimestamp(0, UTC)
RECORD_EVERY_S = 1_800
RECORDS_KEPT = timedelta(days=8)
"""A week, and the day of the last horizon."""
_RENEWED = ("made_at", "slot_s", "p50", "p90", "p99", "methods", "is_judged")

log = logging.getLogger(__name__)


class Forecaster:
    """Rounds of one controller; a lease admits one at a time."""

    def __init__(self) -> None:
        self._last: datetime | None = None

    def run_if_due(self, *, now: datetime) -> int | None:
        """Runs a round if it is due. Returns the number of stored forecasts, or None if it is not due or there is no
        series."""
        made_at = datetime.fromtimestamp(now.timestamp() // HISTORY_SLOT_S * HISTORY_SLOT_S, UTC)
        is_due = made_at != self._last and (now - made_at).total_seconds() >= WAITS_S
        if not is_due:
            return None
        with lease_during(name=FORECAST_LEASE, ttl_s=FORECAST_LEASE_S, now=now) as is_ours:
            if not is_ours:
                return None
            self._last = made_at
            return forecasts_make(made_at=made_at, now=now)


def forecasts_make(*, made_at: datetime, now: datetime) -> int | None:
    """Forecasts all series from `made_at` on. Returns the number of stored forecasts, or None if there is no series."""
    rows = {row.key: row for row in DemandForecast.objects.defer("p50", "p90", "p99", "methods")}
    pasts = dict(series_pasts(made_at))
    if not pasts:
        return None
    due = _ledgers_due(pasts, rows, now)
    records = _error_records([rows[key].pk for key in due if key in rows])
    made: list[tuple[Made, Calibration | None]] = []
    for key, slots in pasts.items():
        row = rows.get(key)
        seen = records.get(row.pk, []) if row else []
        try:
            one, ledger = _series_forecast(key, made_at, slots, _stored_ledger(row), seen if key in due else None)
        except Exception:
            log.exception("%s: not forecast", key)
            continue
        if one is not None:
            made.append((one, ledger))
    return forecasts_store(made, made_at=made_at, now=now)


def forecasts_store(made: Iterable[tuple["Made", Calibration | None]], *, made_at: datetime, now: datetime) -> int:
    """Stores forecasts, with renewed ledgers. Returns their number. Series of deleted deployments and regions are
    skipped."""
    deployments = set(Deployment.objects.values_list("name", flat=True))
    regions = set(Region.objects.values_list("name", flat=True))
    stored = [
        (_forecast_row(one, ledger, now), one)
        for one, ledger in made
        if one.forecast.key.deployment in deployments and one.forecast.key.origin in regions
    ]
    with transaction.atomic():
        for has_ledger in (False, True):
            DemandForecast.objects.bulk_create(
                [row for row, _ in stored if (row.ledger_at is not None) is has_ledger],
                update_conflicts=True,
                unique_fields=["deployment", "origin", "serving_class"],
                update_fields=[*_RENEWED, *(("ledger", "ledger_at") if has_ledger else ())],
            )
        if made_at.timestamp() % RECORD_EVERY_S == 0:
            kept = [
                ForecastRecord(series=row, made_at=made_at, p50=dict(one.record.p50), p90=dict(one.record.p90))
                for row, one in stored
            ]
            ForecastRecord.objects.bulk_create(kept, ignore_conflicts=True)
    if stored:
        live.push("forecast")
    return len(stored)


def forecasts_trim(*, now: datetime) -> None:
    """Deletes records that are too old for the ledger, and forecasts of series that ended long ago."""
    ForecastRecord.objects.filter(made_at__lt=now - RECORDS_KEPT).delete()
    DemandForecast.objects.filter(made_at__lt=now - RECORDS_KEPT).delete()


def _series_forecast(
    key: SeriesKey, made_at: datetime, slots: Sequence[float], before: Calibration, records: Sequence[Record] | None
) -> tuple["Made | None", Calibration | None]:
    """Returns the forecast, and the ledger if `records` are given to renew it. Imports numpy here, because other Django
    processes do not need it."""
    import numpy as np

    from fleet.capacity.planning.forecast import calibrate, forecast_series, past_of

    past = past_of(key, made_at, np.asarray(slots, dtype=np.float64))
    ledger = None if records is None else calibrate(past, records, before)
    return forecast_series(past, ledger or before), ledger


def _forecast_row(one: "Made", ledger: Calibration | None, now: datetime) -> DemandForecast:
    return DemandForecast(
        deployment_id=one.forecast.key.deployment,
        origin_id=one.forecast.key.origin,
        serving_class=one.forecast.key.serving_class,
        made_at=one.forecast.made_at,
        slot_s=SLOT_S,
        p50=list(one.forecast.p50),
        p90=list(one.forecast.p90),
        p99=list(one.p99),
        methods=list(one.forecast.method),
        is_judged=one.is_judged,
        ledger=msgspec.to_builtins(ledger) if ledger else {},
        ledger_at=now if ledger else None,
    )


def _ledgers_due(
    pasts: Iterable[SeriesKey], rows: Mapping[SeriesKey, DemandForecast], now: datetime
) -> frozenset[SeriesKey]:
    waiting = sorted((at, key) for key in pasts if (at := _ledger_at(rows.get(key))) <= now - LEDGER_DUE_AFTER)
    return frozenset(key for _, key in waiting[: max(LEDGERS_LEAST, len(waiting) // LEDGERS_SHARE)])


def _ledger_at(row: DemandForecast | None) -> datetime:
    return row.ledger_at if row and row.ledger_at else NEVER


def _error_records(series: Sequence[int]) -> dict[int, list[Record]]:
    found: dict[int, list[Record]] = defaultdict(list)
    rows = ForecastRecord.objects.filter(series__in=series).order_by("series", "made_at")
    for pk, made_at, p50, p90 in rows.values_list("series_id", "made_at", "p50", "p90"):
        found[pk].append(Record(made_at, p50, p90))
    return found


def _stored_ledger(row: DemandForecast | None) -> Calibration:
    """Empty if another release stored the ledger in an unknown form."""
    try:
        return msgspec.convert(row.ledger, Calibration) if row else Calibration()
    except msgspec.ValidationError:
        return Calibration()
