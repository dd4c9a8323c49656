"""Stores samples of requests in groups, and deletes old ones. A node can write only rows of the cell that it leads, at
its present generation, an ingress only rows without a cell, and both only so many of a window; everything else is
dropped."""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
from django.conf import settings
from django.db import connection, transaction
from django.utils.crypto import salted_hmac
from msgspec import structs
from psycopg import sql

from engine_agent.protocol.proxy_messages import PREFIX_DIGITS
from engine_agent.protocol.request_messages import (
    MAX_WINDOW_SAMPLES,
    REFUSALS_WITH_KEY,
    REFUSALS_WITHOUT_KEY,
    RequestSample,
    RequestWindow,
    SampleKind,
)
from fleet.cells.models import Cell, CellMember
from fleet.reconcile.planning.states import CellState
from fleet.requests.models import RequestSample as StoredSample
from fleet.requests.planner import (
    ANSWERED,
    FAILED,
    FAILED_KEPT_S,
    KEPT_S,
    LARGEST_ROW_BYTES,
    failed_rows,
    samples_of_a_kind,
)
from kernel import live
from kernel.sanitize import UNSTORABLE_ERRORS, json_without_nul

LATEST = timedelta(minutes=1)
"""How far a node's clock may be ahead."""
OLDEST = timedelta(hours=2)
"""A request may have taken an hour, and its window may have waited for a connection."""
TRIMMED_TOGETHER = 50_000
_PREFIX_SALT = "fleet.requests.prefix"
SERVING = (CellState.READY.value, CellState.DRAINING.value)
_COLUMNS = tuple(field.attname for field in StoredSample._meta.concrete_fields if field.attname != "id")
_STORE = sql.SQL("""
INSERT INTO fleet_requestsample ({columns})
SELECT {columns} FROM jsonb_populate_recordset(NULL::fleet_requestsample, %(rows)s::jsonb)
ON CONFLICT DO NOTHING
""").format(columns=sql.SQL(", ").join(map(sql.Identifier, _COLUMNS)))
_TRIM = """
DELETE FROM fleet_requestsample WHERE id IN (
    SELECT id FROM fleet_requestsample WHERE kind = ANY(%(kinds)s) AND at < %(before)s ORDER BY at LIMIT %(most)s
)
"""
_ROW_BYTES = """
SELECT avg(pg_column_size(newest.*)) FROM (
    SELECT * FROM fleet_requestsample WHERE kind = %(kind)s ORDER BY at DESC LIMIT 1000
) AS newest
"""
_FROM_INGRESSES = ("request", "status", "reason", "serving_class", "path", "total_ms", "deployment")

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
    cells = Cell.objects.filter(state__in=SERVING).count()
    ordinary = samples_of_a_kind(rows_max=settings.REQUEST_SAMPLES, cells=cells, kinds=len(ANSWERED))
    most = dict.fromkeys(ANSWERED, ordinary)
    rows_max = failed_rows(SampleKind.ERROR, budget_bytes=_failed_bytes(), row_bytes=LARGEST_ROW_BYTES)
    most[SampleKind.ERROR] = samples_of_a_kind(rows_max=rows_max, cells=cells, kinds=1)
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


def ingress_windows_store(
    *, windows: Sequence[tuple[str, str, RequestWindow]], tenants: Mapping[str, str], now: datetime
) -> int:
    """Stores windows of (ingress, region, window): requests that no cell answered. `tenants`: the tenant of each known
    key by its prefix; a sample with another key counts as one without a key. Returns the number of new rows."""
    most = {SampleKind.ERROR: REFUSALS_WITH_KEY, SampleKind.REFUSED: REFUSALS_WITHOUT_KEY}
    rows = []
    for ingress, region, window in windows:
        known = (_with_known_key(sample, tenants) for sample in window.samples if _is_recent(sample, now))
        for sample in _first_of_each_kind(known, most):
            named = {name: getattr(sample, name) for name in _FROM_INGRESSES}
            refused = RequestSample(kind=sample.kind, at=sample.at, key=sample.key, tenant=sample.tenant, **named)
            rows.append(_row(refused, {"cell": "", "generation": 0, "region": region, "ingress": ingress}))
    stored = _store(rows)
    if stored:
        live.push("requests")
    return stored


def _with_known_key(sample: RequestSample, tenants: Mapping[str, str]) -> RequestSample:
    tenant = tenants.get(sample.key, "")
    if not tenant:
        return structs.replace(sample, kind=SampleKind.REFUSED, key="", tenant="")
    return structs.replace(sample, kind=SampleKind.ERROR, tenant=tenant)


def _first_of_each_kind(samples: Iterable[RequestSample], most: Mapping[SampleKind, int]) -> Iterable[RequestSample]:
    """A window is in the order in which it may be cut."""
    seen: Counter[str] = Counter()
    for sample in samples:
        seen[sample.kind] += 1
        if seen[sample.kind] <= most.get(sample.kind, 0):
            yield sample


def _is_recent(sample: RequestSample, now: datetime) -> bool:
    return (now - OLDEST).timestamp() <= sample.at <= (now + LATEST).timestamp()


def _row(sample: RequestSample, own: dict[str, Any]) -> dict[str, Any]:
    at, prefix = datetime.fromtimestamp(sample.at, UTC), _keyed_prefix(sample)
    return {**structs.asdict(sample), **own, "at": at, "prefix": prefix}


def _keyed_prefix(sample: RequestSample) -> str:
    """The hash of the text's beginning under a key of this fleet and tenant. An ingress's hash has none, so readers of
    samples could test guesses of the text. Equal beginnings of one tenant still have equal values."""
    if not sample.prefix:
        return ""
    named = f"{sample.tenant}\0{sample.prefix}"
    return salted_hmac(_PREFIX_SALT, named, algorithm="sha256").hexdigest()[:PREFIX_DIGITS]


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
    """Deletes samples of answered requests older than a day, those of failed ones older than a week, and the oldest of
    each above its limit, in short statements."""
    _trim(ANSWERED, now - timedelta(seconds=KEPT_S), settings.REQUEST_SAMPLES)
    for kind in FAILED:
        rows = failed_rows(kind, budget_bytes=_failed_bytes(), row_bytes=_row_bytes(kind))
        _trim((kind,), now - timedelta(seconds=FAILED_KEPT_S), rows)


def _trim(kinds: Sequence[SampleKind], before: datetime, rows_max: int) -> None:
    newest = StoredSample.objects.filter(kind__in=kinds).order_by("-at").values_list("at", flat=True)
    before = max([before, *newest[rows_max : rows_max + 1]])
    while True:
        with connection.cursor() as cursor:
            cursor.execute(_TRIM, {"kinds": [str(kind) for kind in kinds], "before": before, "most": TRIMMED_TOGETHER})
            if cursor.rowcount < TRIMMED_TOGETHER:
                return


def _failed_bytes() -> int:
    return int(settings.FAILED_REQUESTS_MIB) * 1024 * 1024


def _row_bytes(kind: SampleKind) -> float:
    """The mean of the newest rows, because the size of a table does not shrink when rows are deleted."""
    with connection.cursor() as cursor:
        cursor.execute(_ROW_BYTES, {"kind": str(kind)})
        (mean,) = cursor.fetchone()
    return LARGEST_ROW_BYTES if mean is None else float(mean)
