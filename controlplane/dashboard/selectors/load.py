"""Load of cells as their leaders last reported it, and its sum over cells. Old reports count as no report."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db import connection

from engine_agent.protocol.messages import Load
from fleet.models import Cell, Node, NodeReport
from fleet.selectors.load import load_in_short

FRESH_FOR_S = 15.0
"""Agents report every 2 s; a report older than this says nothing about now (docs/architecture.md, traffic)."""


def report_of(node: Node) -> NodeReport | None:
    """The last report of a node, loaded with it."""
    return getattr(node, "report", None)


def silent_s(report: NodeReport | None, now: datetime) -> float | None:
    """Seconds since the agent was last heard, or None while it reports as it should (or never has)."""
    if report is None or report.last_seen_at is None:
        return None
    age_s = (now - report.last_seen_at).total_seconds()
    return age_s if age_s > FRESH_FOR_S else None


def load_of(cell: Cell, leader: NodeReport | None, now: datetime) -> Load | None:
    """The cell's load, or None if its leader has reported nothing fresh about this generation."""
    if leader is None or leader.load is None or leader.last_seen_at is None or silent_s(leader, now) is not None:
        return None
    if (leader.cell, leader.generation) != (cell.id, cell.generation):
        return None
    return load_in_short(leader.load)


@dataclass(frozen=True, slots=True)
class SummedLoad:
    """Load of several cells as one, None where none reported, and how many ready cells did.

    Counts add up, p50 is the median of the cells', p99 that of the worst cell: percentiles cannot be added, and the
    worst cell's is an upper bound of the true one, which is the honest side.
    """

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
    """Deployment -> the load of its live cells, of those that have any with a fresh report. One query."""
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
