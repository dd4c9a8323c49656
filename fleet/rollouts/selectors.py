"""Rollouts as planners and pages read them, and the load of the new and the old version at the same time. Each cell
counts for the version that it ran; during its update it counts for neither. Never writes."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import msgspec
from django.db.models import QuerySet

from fleet.cells.models import Cell, CellMember, Disruption
from fleet.deployments.models import Deployment
from fleet.deployments.planner import UpdatePolicy, parse_policy
from fleet.load.planner import CellCounters, counters_of, pooled
from fleet.load.selectors import LoadSeries, Point, cell_subject, load_series, load_stored
from fleet.nodes.models import NodeReport
from fleet.reconcile.planning.snapshot import FailedStart, RolloutView, Verdict
from fleet.reconcile.planning.states import ROLLOUT_ACTIVE, CellState, RolloutState
from fleet.rollouts.models import Rollout
from fleet.rollouts.planning.gates import NEW, OLD, gate_verdict
from fleet.rollouts.planning.waves import stages_of
from kernel.time_ranges import TimeRange
from models_registry.benchmarks.selectors import goodput_compared

ACTIVE = sorted(state.value for state in ROLLOUT_ACTIVE)


def rollouts_described() -> QuerySet[Rollout]:
    """Rollouts with their versions and deployment, newest first. One query."""
    return Rollout.objects.select_related("from_version", "to_version", "deployment")


def stage_label(rollout: Rollout) -> str:
    """Region and share of the rollout's current stage."""
    stages = stages_of(parse_policy(rollout.policy), tuple(rollout.region_order))
    return stages[min(rollout.stage, len(stages) - 1)].label if stages else ""


def active_rollouts() -> list[Rollout]:
    """Rollouts for planners. One query, plus one per rollout whose gate compares benchmarks."""
    rows = list(rollouts_described().filter(state__in=ACTIVE))
    for row in rows:
        if (row.policy.get("gate") or {}).get("goodput_ratio"):
            kind = row.deployment.instance_types[0]
            row.compared_goodput = goodput_compared(row.from_version, row.to_version, kind)
    return rows


def policy_in_force(deployment: str) -> UpdatePolicy:
    """The active rollout's copy of the update policy, or else the deployment's own."""
    rollout = Rollout.objects.filter(deployment_id=deployment, state__in=ACTIVE).first()
    return parse_policy(rollout.policy) if rollout else Deployment.objects.get(name=deployment).policy()


def rollout_view(rollout: Rollout) -> RolloutView:
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
    """Cell -> its counters. JSON has turned the bucket numbers into text."""
    rows = {
        cell: [counted[name] for name in CellCounters.__struct_fields__ if name in counted]
        for cell, counted in stored.items()
    }
    return msgspec.convert(rows, dict[str, CellCounters], strict=False)


def counters_reported(report: NodeReport | None) -> CellCounters | None:
    """Counters of a cell in this generation, from its leader's last report."""
    if report is None or report.load is None:
        return None
    return counters_of(load_stored(report.load), report.generation)


def bake_so_far(rollout: Rollout) -> Verdict | None:
    """The verdict that a gate would have now, from the cells' counts since the bake began; one query. None outside a
    bake, before the first report in it, and for a deployment on several instance types, because the gate compares
    cells by type."""
    if rollout.state != RolloutState.BAKING or len(rollout.deployment.instance_types) > 1:
        return None
    before, policy = counters_stored(rollout.counters), parse_policy(rollout.policy)
    stage = stages_of(policy, tuple(rollout.region_order))[rollout.stage]
    leaders = CellMember.objects.filter(rank=0, cell__in=list(before), cell__state=CellState.READY.value)
    counted: dict[bool, list[CellCounters]] = {True: [], False: []}
    for leader in leaders.select_related("cell", "node__report"):
        now = counters_reported(getattr(leader.node, "report", None))
        since = now.since(before[leader.cell_id]) if now is not None else None
        is_updated = leader.cell.model_version_id == rollout.to_version_id
        if since is not None and (leader.cell.region_id == stage.region or not is_updated):
            counted[is_updated].append(since)
    if not counted[True]:
        return None
    return gate_verdict(pooled(counted[True]), pooled(counted[False]) if counted[False] else None, policy.gate)


CELLS_OF_EACH = 20
"""Cells per version in a chart. Enough to show a trend, and fast on large fleets."""
BEFORE, AFTER = timedelta(minutes=3), timedelta(minutes=3)

Measure = Callable[[Sequence[Point]], float | None]


@dataclass(slots=True)
class _CellHistory:
    """When a cell was down in the rollout. Each time, it came back with the other version."""

    starts_new: bool = False
    downtimes: list[tuple[datetime, datetime | None]] = field(default_factory=list)

    def runs_new(self, start: datetime, end: datetime) -> bool | None:
        """Whether it ran the new version during a whole window, or None if it was down for part of it."""
        is_new = self.starts_new
        for left, back in self.downtimes:
            if end <= left:
                break
            if back is None or start < back:
                return None
            is_new = not is_new
        return is_new


@dataclass(frozen=True, slots=True)
class MeasuredLines:
    """Measure -> version -> values, one every `step_s` seconds from `start`."""

    start: datetime
    step_s: int
    lines: dict[str, dict[str, list[float | None]]]


def measured_lines(rollout: Rollout, span: TimeRange, step_s: int) -> MeasuredLines | None:
    """Errors and latencies of both versions over the range, in three queries. None without cells."""
    histories = _cell_histories(rollout)
    series = load_series([cell_subject(cell) for cell in histories], span, step_s)
    if not series:
        return None
    any_series = next(iter(series.values()))
    lines: dict[str, dict[str, list[float | None]]] = {name: {NEW: [], OLD: []} for name in MEASURES}
    for index in range(len(any_series.points)):
        start = any_series.start + timedelta(seconds=index * step_s)
        groups = _points_by_version(series, histories, index, start, start + timedelta(seconds=step_s))
        for name, measure in MEASURES.items():
            for version, is_new in ((NEW, True), (OLD, False)):
                lines[name][version].append(measure(groups[is_new]))
    return MeasuredLines(any_series.start, step_s, lines)


def _points_by_version(
    series: dict[str, LoadSeries], histories: dict[str, _CellHistory], index: int, start: datetime, end: datetime
) -> dict[bool | None, list[Point]]:
    groups: dict[bool | None, list[Point]] = defaultdict(list)
    for cell, history in histories.items():
        if point := series[cell_subject(cell)].points[index]:
            groups[history.runs_new(start, end)].append(point)
    return groups


def _cell_histories(rollout: Rollout) -> dict[str, _CellHistory]:
    """Cells that the rollout moved, and as many others as controls."""
    histories: dict[str, _CellHistory] = defaultdict(_CellHistory)
    entries = Disruption.objects.filter(rollout=rollout).order_by("opened_at")
    for moved, opened_at, closed_at in entries.values_list("cell_id", "opened_at", "closed_at"):
        if moved and (moved in histories or len(histories) < CELLS_OF_EACH):
            histories[moved].downtimes.append((opened_at, closed_at))
    cells = Cell.objects.filter(deployment_id=rollout.deployment_id).exclude(pk__in=list(histories)).order_by("id")
    others = cells.values_list("id", "model_version_id", "created_at")[: 2 * CELLS_OF_EACH]
    for cell, version, created_at in others:
        is_added = created_at >= rollout.created_at and version == rollout.to_version_id
        histories[cell] = _CellHistory(starts_new=is_added)
    return dict(histories)


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
