"""Reads load over time on a grid without gaps, in one query for any number of subjects, and the latest load of cells as
reported for their current generation. Never writes."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
from django.db.models import Avg, F, Q, Sum
from msgspec import convert, structs

from engine_agent.protocol.load_messages import BatchLoad, CacheLoad, EngineLoad, HandoverLoad, Load, SpeculationLoad
from fleet.cells.models import Cell, CellMember
from fleet.deployments.planner import WINDOWS_S, RequestCounts, total
from fleet.load.models import LoadWindow, NodeWindow
from fleet.load.planner import FINE_S, KEPT_S, MINUTE_S, NODE_ERRORS, NODE_GAUGES, NODE_KEPT_S, NODE_TOTALS
from fleet.nodes.models import NodeReport, holds_since
from fleet.reconcile.planning.states import CellState
from kernel.time_ranges import TimeRange

FLEET = "fleet"
DAY_S = 86_400


MOST_POINTS = 400
"""Of a line: more than a chart has pixels for."""


@dataclass(frozen=True, slots=True)
class Point:
    """One window. `errors_percent` is None without requests. `tokens_per_s` are generated ones."""

    requests_per_s: float
    errors_per_s: float
    errors_percent: float | None
    prompt_tokens_per_s: float
    preemptions_per_s: float
    cells: float
    in_flight: float
    queued: float
    tokens_per_s: float
    ttft_p50_ms: float | None
    ttft_p95_ms: float | None
    itl_p50_ms: float | None
    itl_p95_ms: float | None
    ttft_p99_ms: float | None
    running: float | None
    waiting: float | None
    kv_percent: float | None
    cache_hit_percent: float | None
    step_ms: float | None


_COUNTS = ("requests", "errors", "prompt_tokens", "preemptions")
_RATES = ("errors_percent", *(f"{name}_per_s" for name in _COUNTS))
FIGURES = ("covered_s", *_COUNTS, *(field.name for field in fields(Point) if field.name not in _RATES))
"""Columns of a window: the base of rates, then the rest of a point in its order. ORM rows would take ten times
longer."""


@dataclass(frozen=True, slots=True)
class LoadSeries:
    """A subject's load. `points[i]` is the window from `start + i * step_s`, or None without a sample."""

    start: datetime
    step_s: int
    points: tuple[Point | None, ...]

    @property
    def last(self) -> Point | None:
        """The newest window with a sample, or None."""
        return next((point for point in reversed(self.points) if point is not None), None)


def cell_subject(cell: str) -> str:
    return f"cell:{cell}"


def node_subject(node: str) -> str:
    return f"node:{node}"


def region_subject(region: str) -> str:
    return f"region:{region}"


def deployment_subject(deployment: str, region: str = "") -> str:
    return f"deployment:{deployment}@{region}" if region else f"deployment:{deployment}"


def step_of(span: TimeRange, now: datetime, kept_s: Mapping[int, int] = KEPT_S) -> int:
    """The finest step in seconds whose windows are kept since the start of the range, with at most `MOST_POINTS`."""
    age_s, length_s = (now - span.start).total_seconds(), span.length.total_seconds()
    fit = (step for step, kept in sorted(kept_s.items()) if age_s <= kept and length_s <= MOST_POINTS * step)
    return next(fit, max(kept_s))


def load_series(subjects: Sequence[str], span: TimeRange, step_s: int) -> dict[str, LoadSeries]:
    """Subject -> its load in whole steps of the range, for each subject. One query."""
    end = int(span.end.timestamp() // step_s)
    first = end - max(1, int(span.length.total_seconds() // step_s))
    grids: dict[str, list[Point | None]] = {name: [None] * (end - first) for name in subjects}
    start = datetime.fromtimestamp(first * step_s, UTC)
    rows = LoadWindow.objects.filter(subject__name__in=subjects, step_s=step_s, at__gte=start, at__lt=span.end)
    for subject, at, *figures in rows.values_list("subject__name", "at", *FIGURES):
        place = int(at.timestamp() // step_s) - first
        if place < end - first:
            grids[subject][place] = _point(*figures)
    return {name: LoadSeries(start, step_s, tuple(points)) for name, points in grids.items()}


@dataclass(frozen=True, slots=True)
class NodePoint:
    """Use of a machine and its devices in one window, None if unknown. `…_per_s` and the errors are differences to the
    window before."""

    cpu_percent: float | None
    memory_percent: float | None
    disk_percent: float | None
    utilisation_percent: float | None
    device_memory_percent: float | None
    clock_percent: float | None
    temperature_c: float | None
    power_watts: float | None
    network_received_per_s: float | None = None
    network_sent_per_s: float | None = None
    disk_read_per_s: float | None = None
    disk_written_per_s: float | None = None
    ecc_errors: float | None = None
    link_errors: float | None = None


@dataclass(frozen=True, slots=True)
class NodeSeries:
    """Use of a subject. `points[i]` is the window from `start + i * step_s`, or None without a report."""

    start: datetime
    step_s: int
    points: tuple[NodePoint | None, ...]


NODE_FIGURES = tuple(field.name for field in fields(NodePoint))


def node_series(subjects: Sequence[str], span: TimeRange, now: datetime) -> dict[str, NodeSeries]:
    """Subject -> use of its machines and devices in whole steps of the range, for each subject. One query."""
    step_s = step_of(span, now, NODE_KEPT_S)
    end = int(span.end.timestamp() // step_s)
    first = end - max(1, int(span.length.total_seconds() // step_s))
    start = datetime.fromtimestamp(first * step_s, UTC)
    grids: dict[str, list[NodePoint | None]] = {name: [None] * (end - first) for name in subjects}
    before: dict[str, tuple[datetime, Sequence[int | None]]] = {}
    rows = NodeWindow.objects.filter(subject__name__in=subjects, step_s=step_s, at__gte=start, at__lt=span.end)
    for subject, at, *figures in rows.order_by("at").values_list("subject__name", "at", *NODE_GAUGES, *NODE_TOTALS):
        place = int(at.timestamp() // step_s) - first
        gauges, totals = figures[: len(NODE_GAUGES)], figures[len(NODE_GAUGES) :]
        if place < end - first:
            grids[subject][place] = NodePoint(*gauges, *_node_rates(before.get(subject), at, totals))
        before[subject] = (at, totals)
    return {name: NodeSeries(start, step_s, tuple(points)) for name, points in grids.items()}


def node_means(subjects: Sequence[str], span: TimeRange, now: datetime) -> dict[str, dict[str, float | None]]:
    """Subject -> mean of each gauge over the range, for subjects with a window in it. One query."""
    step_s = step_of(span, now, NODE_KEPT_S)
    rows = NodeWindow.objects.filter(subject__name__in=subjects, step_s=step_s, at__gte=span.start, at__lt=span.end)
    means = {f"mean_{name}": Avg(name) for name in NODE_GAUGES}
    found = rows.order_by().values_list("subject__name").annotate(**means)
    return {subject: dict(zip(NODE_GAUGES, gauges, strict=True)) for subject, *gauges in found}


def last_node_windows(subjects: Iterable[str], now: datetime) -> dict[str, dict[str, float | None]]:
    """Subject -> gauges of its newest minute, if it is recent. One query."""
    since = now - timedelta(seconds=4 * MINUTE_S)
    rows = NodeWindow.objects.filter(subject__name__in=list(subjects), step_s=MINUTE_S, at__gte=since).order_by("at")
    windows = rows.values_list("subject__name", *NODE_GAUGES)
    return {subject: dict(zip(NODE_GAUGES, gauges, strict=True)) for subject, *gauges in windows}


def _node_rates(
    before: tuple[datetime, Sequence[int | None]] | None, at: datetime, totals: Sequence[int | None]
) -> Iterable[float | None]:
    """Bytes per second, and new errors. A smaller total began again at 0, when the machine or its driver started."""
    if before is None:
        return (None,) * len(totals)
    seconds = max(1.0, (at - before[0]).total_seconds())
    grown = [
        None if then is None or now is None else now - then if now >= then else now
        for then, now in zip(before[1], totals, strict=True)
    ]
    return (
        None if more is None else float(more) if name in NODE_ERRORS else more / seconds
        for name, more in zip(NODE_TOTALS, grown, strict=True)
    )


def last_windows(subjects: Iterable[str], now: datetime, *, within_s: float = 4 * FINE_S) -> dict[str, Point]:
    """Subject -> its newest fine window, if it is recent. One query."""
    since = now - timedelta(seconds=within_s)
    rows = LoadWindow.objects.filter(subject__name__in=list(subjects), step_s=FINE_S, at__gte=since)
    windows = rows.order_by("at").values_list("subject__name", *FIGURES)
    return {subject: _point(*figures) for subject, *figures in windows}


def last_sample_at(subject: str, model: type[LoadWindow] | type[NodeWindow] = LoadWindow) -> datetime | None:
    """The begin of a subject's newest window. All windows of a sample are stored in one transaction, so the fleet's
    last one is the version of all load. One query."""
    step_s = FINE_S if model is LoadWindow else MINUTE_S
    newest = model._default_manager.filter(subject__name=subject, step_s=step_s).order_by("-at")
    return newest.values_list("at", flat=True).first()


def seen_in_windows(subject: str, now: datetime) -> Mapping[int, RequestCounts]:
    """Request counts of a subject in each window of the objectives. One query, over fine windows in the last hour,
    5-minute windows in the last day, and hours before."""
    ages = {window: now - timedelta(seconds=window) for window in WINDOWS_S}
    hour, day = now - timedelta(seconds=3600), now - timedelta(seconds=DAY_S)
    fine = Q(step_s=FINE_S, at__gte=hour)
    middle = Q(step_s=300, at__gte=day)
    long = Q(step_s=3600, at__gte=ages[max(ages)], at__lt=day)
    rows = LoadWindow.objects.filter(fine | middle | long, subject__name=subject)
    seen: dict[int, list[RequestCounts]] = {window: [] for window in WINDOWS_S}
    for step, at, requests, errors, slow in rows.values_list("step_s", "at", "requests", "errors", "slow"):
        for window, since in ages.items():
            if at >= since and (step == FINE_S) == (window <= 3600):
                seen[window].append(RequestCounts(requests, errors, slow))
    return {window: total(parts) for window, parts in seen.items()}


def seen_in_last_hour(subjects: Iterable[str], now: datetime) -> dict[str, RequestCounts]:
    """Subject -> its request counts of the last hour, for each subject. One query."""
    seen = {name: RequestCounts() for name in subjects}
    since = now - timedelta(seconds=KEPT_S[FINE_S])
    rows = LoadWindow.objects.filter(subject__name__in=list(seen), step_s=FINE_S, at__gte=since)
    sums = rows.order_by().values_list("subject__name").annotate(Sum("requests"), Sum("errors"), Sum("slow"))
    return seen | {subject: RequestCounts(*counts) for subject, *counts in sums}


def _point(covered_s: float, requests: int, errors: int, prompt: int, preempted: int, *gauges: Any) -> Point:
    percent = min(100.0, 100.0 * errors / requests) if requests else None  # a request may fail long after it counts
    rates = (requests / covered_s, errors / covered_s, percent, prompt / covered_s, preempted / covered_s)
    return Point(*rates, *gauges)


@dataclass(frozen=True, slots=True)
class CellLoad:
    """Zeros and None without a report. `reported_at`: the age of the numbers."""

    in_flight: int = 0
    queued: int = 0
    tokens_per_s: float = 0.0
    ttft_p50_ms: float | None = None
    ttft_p99_ms: float | None = None
    itl_p50_ms: float | None = None
    itl_p99_ms: float | None = None
    batch: BatchLoad | None = None
    handovers: HandoverLoad | None = None
    cache: CacheLoad | None = None
    speculation: SpeculationLoad | None = None
    engine: EngineLoad | None = None
    reported_at: datetime | None = None


_SHOWN = tuple(field.name for field in fields(CellLoad) if field.name != "reported_at")
"""Common fields of a reported and a displayed load, by name."""


def load_stored(stored: dict[str, Any]) -> Load:
    """A reported load from a JSON column, where bucket numbers have become text."""
    return msgspec.convert(stored, Load, str_keys=True)


_SCALARS = tuple(field.name for field in structs.fields(Load) if field.default_factory is msgspec.NODEFAULT)


def load_in_short(stored: dict[str, Any]) -> Load:
    """A reported load without its counts by bucket, class and tenant, which lists of cells do not need."""
    return msgspec.convert({name: stored[name] for name in _SCALARS if name in stored}, Load)


def cell_load(cell: Cell) -> CellLoad:
    """Load in the leader's report of this generation. No query after `cells_described`."""
    leader = next((member for member in cell.members.all() if member.rank == 0), None)
    report: NodeReport | None = getattr(leader.node, "report", None) if leader else None
    if report is None or report.load is None or (report.cell, report.generation) != (cell.id, cell.generation):
        return CellLoad()
    load = load_in_short(report.load)
    return CellLoad(**{name: getattr(load, name) for name in _SHOWN}, reported_at=report.last_seen_at)


HEARD_WITHIN = timedelta(seconds=15)
"""Maximum age of a report."""


def cache_totals(now: datetime) -> dict[tuple[str, str], Counter[str]]:
    """Prompt tokens by region and deployment, from recent reports of ready cells' leaders. `asked`: of requests routed
    by a cell's prefixes; `predicted` and `found`: of those; `other` and `other_found`: of all others."""
    leaders = CellMember.objects.filter(
        holds_since(now - HEARD_WITHIN, "node__report__"), rank=0, cell__state=CellState.READY.value
    ).filter(node__report__cell=F("cell_id"))
    totals: dict[tuple[str, str], Counter[str]] = {}
    for region, deployment, stored in leaders.values_list(
        "cell__region_id", "cell__deployment_id", "node__report__load__cache"
    ):
        each = convert(stored or {}, CacheLoad)
        totals.setdefault((region, deployment), Counter()).update(
            asked=each.asked_tokens_total,
            predicted=each.predicted_tokens_total,
            found=each.found_tokens_total,
            other=each.other_tokens_total,
            other_found=each.other_found_tokens_total,
        )
    return totals
