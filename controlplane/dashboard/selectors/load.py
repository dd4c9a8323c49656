"""Load of cells as their leaders last reported it, and its sum over cells. Old reports count as no report."""

from collections.abc import Iterable
from datetime import datetime
from statistics import median

from engine_agent.protocol.messages import Load
from fleet.models import Cell, Node, NodeReport
from fleet.selectors.load import load_stored

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
    """The cell's load, or None if its leader has said nothing fresh about this generation."""
    if leader is None or leader.load is None or leader.last_seen_at is None or silent_s(leader, now) is not None:
        return None
    if (leader.cell, leader.generation) != (cell.id, cell.generation):
        return None
    return load_stored(leader.load)


def load_sum(loads: Iterable[Load]) -> Load | None:
    """Load of several cells as one: counts add up, p50 is the median of the cells', p99 that of the worst cell.

    Percentiles cannot be added; the worst cell's p99 is an upper bound of the true one, which is the honest side.
    """
    cells = list(loads)
    if not cells:
        return None
    return Load(
        in_flight=sum(load.in_flight for load in cells),
        queued=sum(load.queued for load in cells),
        tokens_per_s=sum(load.tokens_per_s for load in cells),
        ttft_p50_ms=_median(load.ttft_p50_ms for load in cells),
        ttft_p99_ms=_worst(load.ttft_p99_ms for load in cells),
        itl_p50_ms=_median(load.itl_p50_ms for load in cells),
        itl_p99_ms=_worst(load.itl_p99_ms for load in cells),
        requests_total=sum(load.requests_total for load in cells),
        errors_total=sum(load.errors_total for load in cells),
    )


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _worst(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
