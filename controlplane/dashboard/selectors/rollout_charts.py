"""What users saw of a rollout's new version beside the old one, at the same time, over its stages and bakes. Each cell
counts for the version that it ran; while it changed it counts for neither."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from controlplane.dashboard.charts import Band, Chart, Colour, Series
from fleet.models import Cell, Disruption, Rollout
from fleet.planning.load.history import FINE_S
from fleet.planning.policy import parse_policy
from fleet.planning.rollout.waves import stages_of
from fleet.planning.states import RolloutState
from fleet.selectors.history import LoadSeries, Point, Span, cell_subject, load_series
from kernel.models import Event

CELLS_OF_EACH = 20
"""Cells of either version that a chart is made from: as many tell the story, and it stays quick on large fleets."""
BEFORE, AFTER = timedelta(minutes=3), timedelta(minutes=3)
FINE_FOR, MIDDLE_FOR = timedelta(hours=1), timedelta(days=1)
LONGEST = timedelta(days=14)
BANDS_SHOWN = 60

BAND_COLOUR: dict[RolloutState, Colour] = {
    RolloutState.RUNNING: Colour.MOVING,
    RolloutState.BAKING: Colour.BAKE,
    RolloutState.PAUSED: Colour.WARN,
    RolloutState.ROLLING_BACK: Colour.BAD,
}

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


def rollout_charts(rollout: Rollout, now: datetime) -> tuple[Chart, ...]:
    """Errors and latencies of both versions, in four queries."""
    until = min(now, rollout.ended_at + AFTER) if rollout.ended_at else now
    since = max(rollout.created_at - BEFORE, until - LONGEST)
    courses = _courses(rollout)
    span = _span(now - since, until - since)
    series = load_series([cell_subject(cell) for cell in courses], span, until)
    if not series:
        return ()
    bands = _bands(rollout, until)
    return tuple(
        _chart(name, title, unit, series, courses, bands, measure, span.step_s) for name, title, unit, measure in CHARTS
    )


def _span(age: timedelta, length: timedelta) -> Span:
    """The finest steps that are kept for as long."""
    step_s = FINE_S if age <= FINE_FOR else 300 if age <= MIDDLE_FOR else 3600
    return Span("rollout", max(step_s, int(length.total_seconds())), step_s)


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


def _chart(
    name: str,
    title: str,
    unit: str,
    series: dict[str, LoadSeries],
    courses: dict[str, _Course],
    bands: tuple[Band, ...],
    measure: Measure,
    step_s: int,
) -> Chart:
    any_series = next(iter(series.values()))
    lines: dict[bool, list[float | None]] = {True: [], False: []}
    for index in range(len(any_series.points)):
        start = any_series.start + timedelta(seconds=index * step_s)
        end = start + timedelta(seconds=step_s)
        groups: dict[bool | None, list[Point]] = defaultdict(list)
        for cell, course in courses.items():
            if point := series[cell_subject(cell)].points[index]:
                groups[course.runs_new(start, end)].append(point)
        for is_new, line in lines.items():
            line.append(measure(groups[is_new]))
    both = (Series("new version", lines[True]), Series("old version", lines[False], dashed=True))
    return Chart(f"rollout-{name}", title, unit, any_series.start, step_s, both, bands)


def _errors_percent(points: Sequence[Point]) -> float | None:
    requests = sum(point.requests_per_s for point in points)
    return 100 * sum(point.errors_per_s for point in points) / requests if requests else None


def _worst(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


CHARTS: tuple[tuple[str, str, str, Measure], ...] = (
    ("ttft", "Time to first token, p95 of the worst cell", "ms", lambda points: _worst(p.ttft_p95_ms for p in points)),
    ("itl", "Time between tokens, p95 of the worst cell", "ms", lambda points: _worst(p.itl_p95_ms for p in points)),
    ("errors", "Failed requests", "%", _errors_percent),
)


def _bands(rollout: Rollout, until: datetime) -> tuple[Band, ...]:
    """Its stages, bakes and pauses, as its events tell."""
    events = Event.objects.filter(
        deployment=rollout.deployment_id, kind__startswith="rollout.", detail__rollout=rollout.pk
    ).order_by("id")
    turns: list[tuple[datetime, RolloutState, int]] = []
    for event in events[: 4 * BANDS_SHOWN]:
        word, stage = event.kind.partition(".")[2], int(event.detail.get("stage", 0))
        if word not in set(RolloutState):
            continue
        state = RolloutState(word)
        if not turns or turns[-1][1:] != (state, stage):
            turns.append((event.at, state, stage))
    ends = [*(at for at, _, _ in turns[1:]), until]
    stages = stages_of(parse_policy(rollout.policy), tuple(rollout.region_order))
    labels = [stage.label for stage in stages] or [""]
    return tuple(
        Band(_label(state, labels[min(stage, len(labels) - 1)]), at, end, BAND_COLOUR[state])
        for (at, state, stage), end in zip(turns, ends, strict=False)
        if state in BAND_COLOUR
    )[:BANDS_SHOWN]


def _label(state: RolloutState, stage: str) -> str:
    return {RolloutState.RUNNING: stage, RolloutState.BAKING: "bake"}.get(state, state.value.replace("_", " "))
