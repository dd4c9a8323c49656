"""Load on pages: the latest reports of cells and their sums, and charts over time. Old reports count as no report."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db import connection

from controlplane.dashboard.charts import Chart, Colour, Series
from engine_agent.protocol.messages import Load
from fleet.cells.models import Cell
from fleet.deployments.models import Deployment
from fleet.deployments.planner import Burn, Objective, burns
from fleet.load.planner import FRESH_FOR_S
from fleet.load.selectors import (
    SPANS,
    LoadSeries,
    Point,
    Span,
    deployment_subject,
    load_in_short,
    load_series,
    seen_in_windows,
    span_named,
)
from fleet.nodes.models import Node, NodeReport


def report_of(node: Node) -> NodeReport | None:
    """The latest report of a node, prefetched with it."""
    return getattr(node, "report", None)


def silent_s(report: NodeReport | None, now: datetime) -> float | None:
    """Seconds since the agent's last report, or None if it is on time or never reported."""
    if report is None or report.last_seen_at is None:
        return None
    age_s = (now - report.last_seen_at).total_seconds()
    return age_s if age_s > FRESH_FOR_S else None


def load_of(cell: Cell, leader: NodeReport | None, now: datetime) -> Load | None:
    """The cell's load, or None without a fresh report of its leader about this generation."""
    if leader is None or leader.load is None or leader.last_seen_at is None or silent_s(leader, now) is not None:
        return None
    if (leader.cell, leader.generation) != (cell.id, cell.generation):
        return None
    return load_in_short(leader.load)


@dataclass(frozen=True, slots=True)
class SummedLoad:
    """The sum over several cells (None without reports), and the number of ready cells that reported. Counts add up;
    p50 is the median of the cells' values; p99 is the worst cell's, an upper bound, because percentiles cannot be
    added."""

    load: Load | None
    ready_cells: int


NO_LOAD = SummedLoad(load=None, ready_cells=0)
_SUMS = """
SELECT cell.deployment_id, count(*) FILTER (WHERE cell.state = 'ready'),
    sum(reported.in_flight), sum(reported.queued), sum(reported.tokens_per_s),
    sum(reported.requests_total), sum(reported.errors_total),
    percentile_cont(0.5) WITHIN GROUP (ORDER BY reported.ttft_p50_ms), max(reported.ttft_p99_ms),
    percentile_cont(0.5) WITHIN GROUP (ORDER BY reported.itl_p50_ms), max(reported.itl_p99_ms)
FROM fleet_cell cell
JOIN fleet_cellmember member ON member.cell_id = cell.id AND member.rank = 0
JOIN fleet_nodereport report ON report.node_id = member.node_id
    AND report.cell = cell.id AND report.generation = cell.generation,
LATERAL jsonb_to_record(report.load) AS reported(in_flight float8, queued float8, tokens_per_s float8,
    requests_total float8, errors_total float8, ttft_p50_ms float8, ttft_p99_ms float8, itl_p50_ms float8,
    itl_p99_ms float8)
WHERE cell.state <> 'stopped' AND report.load IS NOT NULL AND report.last_seen_at >= %(since)s
    AND cell.deployment_id = ANY(%(deployments)s)
GROUP BY cell.deployment_id
"""


def loads_by_deployment(deployments: Sequence[str], now: datetime) -> dict[str, SummedLoad]:
    """Deployment -> load of its live cells with fresh reports. One query."""
    with connection.cursor() as cursor:
        cursor.execute(_SUMS, {"since": now - timedelta(seconds=FRESH_FOR_S), "deployments": list(deployments)})
        return {row[0]: SummedLoad(_load(*row[2:]), row[1]) for row in cursor.fetchall()}


def _load(
    in_flight: float | None,
    queued: float | None,
    tokens_per_s: float | None,
    requests_total: float | None,
    errors_total: float | None,
    *percentiles: float | None,
) -> Load:
    ttft_p50_ms, ttft_p99_ms, itl_p50_ms, itl_p99_ms = percentiles
    return Load(
        in_flight=round(in_flight or 0),
        queued=round(queued or 0),
        tokens_per_s=tokens_per_s or 0.0,
        requests_total=round(requests_total or 0),
        errors_total=round(errors_total or 0),
        ttft_p50_ms=ttft_p50_ms,
        ttft_p99_ms=ttft_p99_ms,
        itl_p50_ms=itl_p50_ms,
        itl_p99_ms=itl_p99_ms,
    )


Value = Callable[[Point], float | None]


@dataclass(frozen=True, slots=True)
class LoadCharts:
    """Charts of one subject over a span; `spans`: the available ones."""

    charts: tuple[Chart, ...]
    span: Span
    spans: tuple[Span, ...] = SPANS


@dataclass(frozen=True, slots=True)
class Slo:
    """A deployment's objective and the burn of its budgets."""

    objective: Objective
    burns: tuple[Burn, ...]


def load_charts(subject: str, *, span: str, now: datetime, ttft_objective_ms: float | None = None) -> LoadCharts:
    """Four charts of a subject's load, in one query."""
    chosen = span_named(span)
    load = load_series([subject], chosen, now)[subject]
    return LoadCharts(charts=_charts(load, ttft_objective_ms), span=chosen)


def slo_of(deployment: Deployment, now: datetime) -> Slo:
    """Burn rates of a deployment's budgets, in one query."""
    objective = deployment.objective()
    return Slo(objective, burns(objective, seen_in_windows(deployment_subject(deployment.name), now)))


def _charts(load: LoadSeries, ttft_objective_ms: float | None) -> tuple[Chart, ...]:
    def series(name: str, value: Value, colour: Colour | None = None) -> Series:
        return Series(name, [None if point is None else value(point) for point in load.points], colour)

    def chart(name: str, title: str, unit: str, *lines: Series, threshold: float | None = None) -> Chart:
        return Chart(name, title, unit, load.start, load.step_s, lines, threshold=threshold)

    return (
        chart(
            "rate",
            "Requests",
            "/s",
            series("requests", lambda point: point.requests_per_s),
            series("errors", lambda point: point.errors_per_s, Colour.BAD),
        ),
        chart(
            "ttft",
            "Time to first token",
            "ms",
            series("median", lambda point: point.ttft_p50_ms),
            series("p95", lambda point: point.ttft_p95_ms),
            threshold=ttft_objective_ms,
        ),
        chart(
            "itl",
            "Time between tokens",
            "ms",
            series("median", lambda point: point.itl_p50_ms),
            series("p95", lambda point: point.itl_p95_ms),
        ),
        chart(
            "fullness",
            "In flight",
            "requests",
            series("in flight", lambda point: point.in_flight),
            series("queued", lambda point: point.queued, Colour.WARN),
        ),
    )
