"""Forecasts all series in rounds of five minutes and stores the forecasts.

A round takes about a millisecond a series and 30 ms for each error ledger that is renewed, in the planner process. A
series that cannot be forecast is logged, and the other series are forecast.
"""

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import msgspec
from django.db import transaction

from fleet.models import Deployment, Region
from fleet.planning.forecast.records import Calibration, Record
from fleet.planning.forecast.series import HISTORY_SLOT_S, SLOT_S, SeriesKey
from kernel import live
from kernel.leases import lease_release, lease_take, this_holder
from traffic.models import DemandForecast, ForecastRecord
from traffic.selectors.demand import series_pasts

if TYPE_CHECKING:
    from fleet.planning.forecast.forecaster import Made

LEASE = "traffic:forecast"
LEASE_S = 120.0
WAITS_S = 12.0
"""After a slot's end, for its means to be written."""
LEDGER_DUE_AFTER = timedelta(hours=1)
LEDGERS_LEAST, LEDGERS_SHARE = 4, 4
"""A round renews this many ledgers, or one in this many of those that are due, so that they are spread over rounds."""
NEVER = datetime.fromtimestamp(0, UTC)
RECORD_EVERY_S = 1_800
RECORDS_KEPT = timedelta(days=8)
"""A week, and the day of their last horizon."""
_RENEWED = ("made_at", "slot_s", "p50", "p90", "p99", "methods", "is_judged")

log = logging.getLogger(__name__)


class Forecaster:
    """The rounds of one planner process. A lease lets one planner at a time make them."""

    def __init__(self) -> None:
        self._last: datetime | None = None

    def look(self, *, now: datetime) -> int | None:
        """Make a round if one is due. Returns how many forecasts it stored, or None if it was not due or there is no
        series."""
        made_at = datetime.fromtimestamp(now.timestamp() // HISTORY_SLOT_S * HISTORY_SLOT_S, UTC)
        is_due = made_at != self._last and (now - made_at).total_seconds() >= WAITS_S
        if not is_due or lease_take(name=LEASE, holder=this_holder(), ttl_s=LEASE_S, now=now) is None:
            return None
        self._last = made_at
        try:
            return forecasts_make(made_at=made_at, now=now)
        finally:
            lease_release(name=LEASE, holder=this_holder(), now=now)


def forecasts_make(*, made_at: datetime, now: datetime) -> int | None:
    """Forecast all series from `made_at` on. Returns how many forecasts were stored, or None if there is no series."""
    rows = {row.key: row for row in DemandForecast.objects.defer("p50", "p90", "p99", "methods")}
    pasts = dict(series_pasts(made_at))
    if not pasts:
        return None
    due = _ledgers_due(pasts, rows, now)
    records = _records([rows[key].pk for key in due if key in rows])
    made: list[tuple[Made, Calibration | None]] = []
    for key, slots in pasts.items():
        row = rows.get(key)
        seen = records.get(row.pk, []) if row else []
        try:
            one, ledger = _forecast(key, made_at, slots, _ledger(row), seen if key in due else None)
        except Exception:
            log.exception("%s: not forecast", key)
            continue
        if one is not None:
            made.append((one, ledger))
    return forecasts_store(made, made_at=made_at, now=now)


def forecasts_store(made: Iterable[tuple["Made", Calibration | None]], *, made_at: datetime, now: datetime) -> int:
    """Store the forecasts of a round, each with its ledger if that was renewed. Returns how many were stored. Series of
    deployments and regions that were removed meanwhile are left out."""
    deployments = set(Deployment.objects.values_list("name", flat=True))
    regions = set(Region.objects.values_list("name", flat=True))
    stored = [
        (_row(one, ledger, now), one)
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
    """Delete records that are too old for the ledger, and forecasts of series that ended long ago."""
    ForecastRecord.objects.filter(made_at__lt=now - RECORDS_KEPT).delete()
    DemandForecast.objects.filter(made_at__lt=now - RECORDS_KEPT).delete()


def _forecast(
    key: SeriesKey, made_at: datetime, slots: Sequence[float], before: Calibration, records: Sequence[Record] | None
) -> tuple["Made | None", Calibration | None]:
    """The forecast, and the ledger if `records` are given to renew it. Imports numpy, which no other Django process
    that imports this module needs."""
    import numpy as np

    from fleet.planning.forecast.forecaster import forecast_series
    from fleet.planning.forecast.ledger import calibrate
    from fleet.planning.forecast.past import past_of

    past = past_of(key, made_at, np.asarray(slots, dtype=np.float64))
    ledger = None if records is None else calibrate(past, records, before)
    return forecast_series(past, ledger or before), ledger


def _row(one: "Made", ledger: Calibration | None, now: datetime) -> DemandForecast:
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
    """Of the ledgers that are due, those that have waited longest."""
    waiting = sorted((at, key) for key in pasts if (at := _ledger_at(rows.get(key))) <= now - LEDGER_DUE_AFTER)
    return frozenset(key for _, key in waiting[: max(LEDGERS_LEAST, len(waiting) // LEDGERS_SHARE)])


def _ledger_at(row: DemandForecast | None) -> datetime:
    return row.ledger_at if row and row.ledger_at else NEVER


def _records(series: Sequence[int]) -> dict[int, list[Record]]:
    found: dict[int, list[Record]] = defaultdict(list)
    rows = ForecastRecord.objects.filter(series__in=series).order_by("series", "made_at")
    for pk, made_at, p50, p90 in rows.values_list("series_id", "made_at", "p50", "p90"):
        found[pk].append(Record(made_at, p50, p90))
    return found


def _ledger(row: DemandForecast | None) -> Calibration:
    """Empty if the stored ledger has another form, as that of another release may."""
    try:
        return msgspec.convert(row.ledger, Calibration) if row else Calibration()
    except msgspec.ValidationError:
        return Calibration()
