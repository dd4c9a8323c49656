"""Rollouts as planners take them and as they are shown.

What users saw of a rollout's new version beside the old one, at the same time, from the load of its cells. Each cell
counts for the version that it ran; while it changed it counts for neither.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import msgspec
from django.db.models import QuerySet

from fleet.cells.models import Cell, Disruption
from fleet.deployments.models import Deployment
from fleet.deployments.planner import UpdatePolicy, parse_policy
from fleet.load.planner import CellCounters, counters_of
from fleet.load.selectors import LoadSeries, Point, Span, cell_subject, load_series, load_stored
from fleet.nodes.models import NodeReport
from fleet.reconcile.planning.snapshot import FailedStart, RolloutView
from fleet.reconcile.planning.states import ROLLOUT_ACTIVE, RolloutState
from fleet.rollouts.models import Rollout
from fleet.rollouts.planning.gates import NEW, OLD
from models_registry.benchmarks.selectors import goodput_compared

ACTIVE = sorted(state.value for state in ROLLOUT_ACTIVE)


def rollouts_described() -> QuerySet[Rollout]:
    """Rollouts, newest first, with their versions and deployment: one query."""
    return Rollout.objects.select_related("from_version", "to_version", "deployment")


def active_rollouts() -> list[Rollout]:
    """Those that planners work on: one query, and one for each whose gate asks for benchmarks."""
    rows = list(rollouts_described().filter(state__in=ACTIVE))
    for row in rows:
        if (row.policy.get("gate") or {}).get("goodput_ratio"):
            kind = row.deployment.instance_types[0]
            row.compared_goodput = goodput_compared(row.from_version, row.to_version, kind)
    return rows


def policy_in_force(deployment: str) -> UpdatePolicy:
    """What may be done to a deployment now: its rollout's copy while one is active, else its own."""
    rollout = Rollout.objects.filter(deployment_id=deployment, state__in=ACTIVE).first()
    return parse_policy(rollout.policy) if rollout else Deployment.objects.get(name=deployment).policy()


def rollout_view(rollout: Rollout) -> RolloutView:
    """The row as the pure planners take it."""
    return RolloutView(
        id=rollout.pk,
        deployment=rollout.deployment_id,
        from_version=rollout.from_version.reference,
        to_version=rollout.to_version.reference,
        state=RolloutState(rollout.state),
        stage=rollout.stage,
        region_order=tuple(rollout.region_order),
        policy=parse_policy(rollout.policy),
        revision=rollout.revision,
        state_since=rollout.state_since,
        reason=rollout.reason,
        failed=msgspec.convert(rollout.failed, tuple[FailedStart, ...]),
        counters=counters_stored(rollout.counters),
        goodput=rollout.compared_goodput,
    )


def counters_stored(stored: Mapping[str, Any]) -> dict[str, CellCounters]:
    """Cell -> what it had counted; JSON has made text of the numbers of buckets."""
    rows = {
        cell: [counted[name] for name in CellCounters.__struct_fields__ if name in counted]
        for cell, counted in stored.items()
    }
    return msgspec.convert(rows, dict[str, CellCounters], strict=False)


def counters_reported(report: NodeReport | None) -> CellCounters | None:
    """What a leader's last report says that its cell has counted in this generation."""
    if report is None or report.load is None:
        return None
    return counters_of(load_stored(report.load), report.generation)


CELLS_OF_EACH = 20
"""Cells of either version that a chart is made from: as many tell the story, and it stays quick on large fleets."""
BEFORE, AFTER = timedelta(minutes=3), timedelta(minutes=3)

Measure = Callable[[Sequence[Point]], float | None]


@dataclass(slots=True)
class _Course:
    """A cell's way through the rollout: from when to when it was away. In between it was old, then new, then old."""

    starts_new: bool = False
    away: list[tuple[datetime, datetime | None]] = field(default_factory=list)

    def runs_new(self, start: datetime, end: datetime) -> bool | None:
        """Which version it ran in a whole window; None: it was away in a part of it."""
        is_new = self.starts_new
        for left, back in self.away:
            if end <= left:
                break
            if back is None or start < back:
                return None
            is_new = not is_new
        return is_new


@dataclass(frozen=True, slots=True)
class MeasuredLines:
    """Measure -> version -> values, one every `step_s` seconds from `start` on."""

    start: datetime
    step_s: int
    lines: dict[str, dict[str, list[float | None]]]


def measured_lines(rollout: Rollout, span: Span, until: datetime) -> MeasuredLines | None:
    """Errors and latencies of both versions over the span that ends at `until`, in three queries. None: no cell."""
    courses = _courses(rollout)
    series = load_series([cell_subject(cell) for cell in courses], span, until)
    if not series:
        return None
    any_series = next(iter(series.values()))
    lines: dict[str, dict[str, list[float | None]]] = {name: {NEW: [], OLD: []} for name in MEASURES}
    for index in range(len(any_series.points)):
        start = any_series.start + timedelta(seconds=index * span.step_s)
        groups = _groups(series, courses, index, start, start + timedelta(seconds=span.step_s))
        for name, measure in MEASURES.items():
            for version, is_new in ((NEW, True), (OLD, False)):
                lines[name][version].append(measure(groups[is_new]))
    return MeasuredLines(any_series.start, span.step_s, lines)


def _groups(
    series: dict[str, LoadSeries], courses: dict[str, _Course], index: int, start: datetime, end: datetime
) -> dict[bool | None, list[Point]]:
    groups: dict[bool | None, list[Point]] = defaultdict(list)
    for cell, course in courses.items():
        if point := series[cell_subject(cell)].points[index]:
            groups[course.runs_new(start, end)].append(point)
    return groups


def _courses(rollout: Rollout) -> dict[str, _Course]:
    """Of cells that the rollout moved, and of as many others as controls."""
    courses: dict[str, _Course] = defaultdict(_Course)
    for entry in Disruption.objects.filter(rollout=rollout).order_by("opened_at"):
        if entry.cell_id in courses or len(courses) < CELLS_OF_EACH:
            courses[entry.cell_id].away.append((entry.opened_at, entry.closed_at))
    cells = Cell.objects.filter(deployment_id=rollout.deployment_id).exclude(pk__in=list(courses)).order_by("id")
    others = cells.values_list("id", "model_version_id", "created_at")[: 2 * CELLS_OF_EACH]
    for cell, version, created_at in others:
        is_added = created_at >= rollout.created_at and version == rollout.to_version_id
        courses[cell] = _Course(starts_new=is_added)
    return dict(courses)


def _errors_percent(points: Sequence[Point]) -> float | None:
    requests = sum(point.requests_per_s for point in points)
    return 100 * sum(point.errors_per_s for point in points) / requests if requests else None


def _worst(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


MEASURES: dict[str, Measure] = {
    "ttft": lambda points: _worst(point.ttft_p95_ms for point in points),
    "itl": lambda points: _worst(point.itl_p95_ms for point in points),
    "errors": _errors_percent,
}
