"""Forecasts all series, in rounds of five minutes: hands a child what they were, and stores what it answers.

A look never waits for the child: it starts one, or sees whether it has ended. A child that does not end is ended, and
what it wrote until then counts; the series that have waited longest come first the next time.
"""

import logging
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import IO

import msgspec
from django.db import transaction

from fleet.models import Deployment, Region
from fleet.planning.forecast.job import ForecastDone, ForecastJob, ForecastRound, read_answers
from fleet.planning.forecast.records import Calibration, Record
from fleet.planning.forecast.series import HISTORY_SLOT_S, SLOT_S, SeriesKey
from kernel import live
from kernel.leases import lease_release, lease_take, this_holder
from traffic.models import DemandForecast, ForecastRecord
from traffic.selectors.demand import series_pasts

LEASE = "traffic:forecast"
CHILD_ENDS_S = 60.0
CHILD_ENDED_S = 75.0
"""It has 15 s to end by itself, which it does unless something hangs."""
LEASE_S = 120.0
LEARNS_FOR_S = 20.0
"""Of a round, for ledgers and models: the rest is for forecasts."""
WAITS_S = 12.0
"""After a slot's end, for its means to be written."""
DUE_AFTER = timedelta(hours=1)
DUE_LEAST, DUE_SHARE = 4, 4
"""So many series, or one in so many of those that are due, get ledger and model in a round: not all together."""
NEVER = datetime.fromtimestamp(0, UTC)
RECORD_EVERY_S = 1_800
RECORDS_KEPT = timedelta(days=8)
"""A week, and the day of their last horizon."""
NICE = 10
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_RENEWED = ("made_at", "slot_s", "p50", "p90", "p99", "methods", "is_judged", "problem")
_LEARNED = ("ledger", "ledger_at", "model")
_CHECKOUT = Path(__file__).resolve().parents[2]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AskedSeries:
    """A series of a round, and its last forecast."""

    key: SeriesKey
    before: DemandForecast | None


@dataclass(frozen=True, slots=True)
class _Round:
    """A round under way: what was asked, since when, of whom, and where the answers are written."""

    made_at: datetime
    asked: Mapping[int, AskedSeries]
    began: datetime
    child: subprocess.Popen[bytes]
    answers: IO[bytes]


class Forecaster:
    """The rounds of one planner. Of several one makes them at a time."""

    def __init__(self, command: Sequence[str] = (sys.executable, "-m", "traffic.services.forecast_child")) -> None:
        self._command = command
        self._round: _Round | None = None
        self._last: datetime | None = None

    def look(self, *, now: datetime) -> int | None:
        """Begin a round that is due, or end one that is over. Returns how many forecasts it brought; None: no round
        ended."""
        if self._round is not None:
            return self._follow(self._round, now)
        made_at = datetime.fromtimestamp(now.timestamp() // HISTORY_SLOT_S * HISTORY_SLOT_S, UTC)
        is_due = made_at != self._last and (now - made_at).total_seconds() >= WAITS_S
        if is_due and lease_take(name=LEASE, holder=this_holder(), ttl_s=LEASE_S, now=now):
            self._last = made_at
            self._begin(made_at, now)
        return None

    @property
    def child(self) -> subprocess.Popen[bytes] | None:
        """Of the round under way."""
        return self._round.child if self._round else None

    def stop(self) -> None:
        """End what is under way: the planner ends."""
        if self._round is not None:
            self._round.child.kill()
            self._round.child.wait()
            self._round.answers.close()
            self._round = None

    def _begin(self, made_at: datetime, now: datetime) -> None:
        asked, jobs = _jobs(made_at, now)
        if not jobs:
            lease_release(name=LEASE, holder=this_holder(), now=now)
            return
        answers = tempfile.TemporaryFile()  # noqa: SIM115 - closed at the end of the round
        with tempfile.TemporaryFile() as questions:
            questions.write(msgspec.msgpack.encode(ForecastRound(jobs, LEARNS_FOR_S, CHILD_ENDS_S)))
            questions.seek(0)
            child = subprocess.Popen(
                ["nice", "-n", str(NICE), *self._command],
                stdin=questions,
                stdout=answers,
                cwd=_CHECKOUT,
                env={**os.environ, **_ONE_THREAD},
            )
        self._round = _Round(made_at, asked, now, child, answers)

    def _follow(self, under_way: _Round, now: datetime) -> int | None:
        if under_way.child.poll() is None:
            if (now - under_way.began).total_seconds() < CHILD_ENDED_S:
                return None
            under_way.child.kill()
        self._round = None
        status = under_way.child.wait()
        with under_way.answers as answers:
            answers.seek(0)
            done = [one for one in read_answers(answers.read()) if one.number in under_way.asked]
        if status != 0 or len(done) < len(under_way.asked):
            log.warning("%d of %d series were forecast, status %d", len(done), len(under_way.asked), status)
        stored = forecasts_store(under_way.made_at, [(under_way.asked[one.number], one) for one in done], now)
        lease_release(name=LEASE, holder=this_holder(), now=now)
        return stored


def forecasts_store(made_at: datetime, done: Sequence[tuple[AskedSeries, ForecastDone]], now: datetime) -> int:
    """Store what a round brought, as a whole. Returns how many forecasts there are. What of the fleet was removed
    meanwhile is left out."""
    deployments = set(Deployment.objects.values_list("name", flat=True))
    regions = set(Region.objects.values_list("name", flat=True))
    made = []
    for asked, one in done:
        if one.problem:
            log.warning("%s: %s", asked.key, one.problem)
        if one.p50 and asked.key.deployment in deployments and asked.key.origin in regions:
            made.append((_row(made_at, asked, one, now), one))
    with transaction.atomic():
        for is_learned in (False, True):
            rows = [row for row, one in made if (one.ledger is not None) is is_learned]
            DemandForecast.objects.bulk_create(
                rows,
                update_conflicts=True,
                unique_fields=["deployment", "origin", "serving_class"],
                update_fields=[*_RENEWED, *(_LEARNED if is_learned else ())],
            )
        if made_at.timestamp() % RECORD_EVERY_S == 0:
            records = [
                ForecastRecord(series=row, made_at=made_at, p50=dict(one.record.p50), p90=dict(one.record.p90))
                for row, one in made
                if one.record is not None
            ]
            ForecastRecord.objects.bulk_create(records, ignore_conflicts=True)
    if made:
        live.push("forecast")
    return len(made)


def forecasts_trim(*, now: datetime) -> None:
    """Forget records by which nothing is judged any more, and series that have long had no forecast."""
    ForecastRecord.objects.filter(made_at__lt=now - RECORDS_KEPT).delete()
    DemandForecast.objects.filter(made_at__lt=now - RECORDS_KEPT).delete()


def _row(made_at: datetime, asked: AskedSeries, one: ForecastDone, now: datetime) -> DemandForecast:
    before = asked.before
    return DemandForecast(
        deployment_id=asked.key.deployment,
        origin_id=asked.key.origin,
        serving_class=asked.key.serving_class,
        made_at=made_at,
        slot_s=SLOT_S,
        p50=list(one.p50),
        p90=list(one.p90),
        p99=list(one.p99),
        methods=list(one.methods),
        is_judged=one.is_judged,
        problem=one.problem,
        ledger=msgspec.to_builtins(one.ledger) if one.ledger else {},
        ledger_at=now if one.ledger else None,
        model=one.model or (bytes(before.model) if before else b""),
    )


def _jobs(made_at: datetime, now: datetime) -> tuple[dict[int, AskedSeries], tuple[ForecastJob, ...]]:
    """Those whose ledger is due come first: there is time for it then. Else who has waited longest."""
    rows = {row.key: row for row in DemandForecast.objects.defer("p50", "p90", "p99", "methods")}
    pasts = dict(series_pasts(made_at))
    due = _due(pasts, rows, now)
    records = _records([rows[key].pk for key in due if key in rows])
    order = sorted(pasts, key=lambda key: (key not in due, _waits_since(rows.get(key)), key))
    asked, jobs = {}, []
    for number, key in enumerate(order):
        row = rows.get(key)
        asked[number] = AskedSeries(key, row)
        jobs.append(
            ForecastJob(
                number,
                key,
                made_at,
                pasts[key].tobytes(),
                _ledger(row),
                model=bytes(row.model) if row else b"",
                records=tuple(records.get(row.pk, ()) if row else ()) if key in due else None,
                learn=key in due,
            )
        )
    return asked, tuple(jobs)


def _due(pasts: Iterable[SeriesKey], rows: Mapping[SeriesKey, DemandForecast], now: datetime) -> frozenset[SeriesKey]:
    waiting = sorted((at, key) for key in pasts if (at := _learned_at(rows.get(key))) <= now - DUE_AFTER)
    return frozenset(key for _, key in waiting[: max(DUE_LEAST, len(waiting) // DUE_SHARE)])


def _learned_at(row: DemandForecast | None) -> datetime:
    return row.ledger_at if row and row.ledger_at else NEVER


def _waits_since(row: DemandForecast | None) -> datetime:
    return row.made_at if row else NEVER


def _records(series: Sequence[int]) -> dict[int, list[Record]]:
    found: dict[int, list[Record]] = defaultdict(list)
    rows = ForecastRecord.objects.filter(series__in=series).order_by("series", "made_at")
    for pk, made_at, p50, p90 in rows.values_list("series_id", "made_at", "p50", "p90"):
        found[pk].append(Record(made_at, p50, p90))
    return found


def _ledger(row: DemandForecast | None) -> Calibration:
    """What another release stored, and this one cannot read, is learned again."""
    try:
        return msgspec.convert(row.ledger, Calibration) if row else Calibration()
    except msgspec.ValidationError:
        return Calibration()
