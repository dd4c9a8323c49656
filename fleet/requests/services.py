"""Stores samples of requests in groups, and deletes old ones. A node can write only rows of the cell that it leads, at
its present generation, and only so many of a window; everything else that it sends is dropped."""

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
from django.conf import settings
from django.db import connection, transaction
from msgspec import structs
from psycopg import sql

from engine_agent.protocol.request_messages import MAX_WINDOW_SAMPLES, RequestSample, RequestWindow
from fleet.cells.models import Cell, CellMember
from fleet.reconcile.planning.states import CellState
from fleet.requests.models import RequestSample as StoredSample
from fleet.requests.planner import KEPT_S, samples_of_a_kind
from kernel import live
from kernel.sanitize import UNSTORABLE_ERRORS, json_without_nul

LATEST = timedelta(minutes=1)
"""How far a node's clock may be ahead."""
OLDEST = timedelta(hours=2)
"""A request may have taken an hour, and its window may have waited for a connection."""
TRIMMED_TOGETHER = 50_000
SERVING = (CellState.READY.value, CellState.DRAINING.value)
_COLUMNS = tuple(field.attname for field in StoredSample._meta.concrete_fields if field.attname != "id")
_STORE = sql.SQL("""
INSERT INTO fleet_requestsample ({columns})
SELECT {columns} FROM jsonb_populate_recordset(NULL::fleet_requestsample, %(rows)s::jsonb)
ON CONFLICT DO NOTHING
""").format(columns=sql.SQL(", ").join(map(sql.Identifier, _COLUMNS)))
_TRIM = """
DELETE FROM fleet_requestsample WHERE id IN (
    SELECT id FROM fleet_requestsample WHERE at < %(before)s ORDER BY at LIMIT %(most)s
)
"""

log = logging.getLogger(__name__)


def request_windows_store(*, windows: Sequence[tuple[str, RequestWindow]], now: datetime) -> int:
    """Stores windows of (node, window) in one statement. Returns the number of new rows. A window that PostgreSQL
    rejects is dropped."""
    if not windows:
        return 0
    leaders = CellMember.objects.filter(node__in={node for node, _ in windows}, rank=0)
    led = {
        node: (cell, generation, deployment, region)
        for node, cell, generation, deployment, region in leaders.values_list(
            "node_id", "cell_id", "cell__generation", "cell__deployment_id", "cell__region_id"
        )
    }
    most = samples_of_a_kind(rows_max=settings.REQUEST_SAMPLES, cells=Cell.objects.filter(state__in=SERVING).count())
    rows: list[dict[str, Any]] = []
    for node, window in windows:
        place = led.get(node)
        if place is None or (window.cell, window.generation) != place[:2]:
            log.info("dropped samples of requests from %s: it does not lead %s", node, window.cell[:160])
            continue
        own = dict(zip(("cell", "generation", "deployment", "region"), place, strict=True))
        rows += [_row(sample, own) for sample in _first_of_each_kind(window.samples, most) if _is_recent(sample, now)]
    stored = _store(rows)
    if stored:
        live.push("requests")
    return stored


def _first_of_each_kind(samples: Iterable[RequestSample], most: int) -> Iterable[RequestSample]:
    """A window is in the order in which it may be cut."""
    seen: Counter[str] = Counter()
    for sample in samples:
        seen[sample.kind] += 1
        if seen[sample.kind] <= most:
            yield sample


def _is_recent(sample: RequestSample, now: datetime) -> bool:
    return (now - OLDEST).timestamp() <= sample.at <= (now + LATEST).timestamp()


def _row(sample: RequestSample, own: dict[str, Any]) -> dict[str, Any]:
    return {**structs.asdict(sample), **own, "at": datetime.fromtimestamp(sample.at, UTC)}


def _store(rows: list[dict[str, Any]]) -> int:
    """Rows that cannot be stored are found by halves and dropped."""
    if not rows:
        return 0
    try:
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute(_STORE, {"rows": json_without_nul(msgspec.json.encode(rows))})
            stored: int = cursor.rowcount
            return stored
    except UNSTORABLE_ERRORS as error:
        if len(rows) <= MAX_WINDOW_SAMPLES:
            log.warning("dropped %d samples of requests of %s: %s", len(rows), rows[0]["cell"], error)
            return 0
    middle = len(rows) // 2
    return _store(rows[:middle]) + _store(rows[middle:])


def request_samples_trim(*, now: datetime) -> None:
    """Deletes samples older than a day, and the oldest above the limit of rows, in short statements."""
    before = now - timedelta(seconds=KEPT_S)
    newest = StoredSample.objects.order_by("-at").values_list("at", flat=True)
    beyond = newest[settings.REQUEST_SAMPLES : settings.REQUEST_SAMPLES + 1]
    before = max([before, *beyond])
    while True:
        with connection.cursor() as cursor:
            cursor.execute(_TRIM, {"before": before, "most": TRIMMED_TOGETHER})
            if cursor.rowcount < TRIMMED_TOGETHER:
                return
