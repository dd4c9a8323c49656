"""A rollout's charts: the new version beside the old one, over its stages and bakes."""

from datetime import datetime, timedelta

from controlplane.dashboard.charts import Band, Chart, Colour, Series
from fleet.models import Rollout, RolloutPoints
from fleet.planning.load.history import FINE_S
from fleet.planning.policy import parse_policy
from fleet.planning.rollout.points import NEW, OLD
from fleet.planning.rollout.waves import stages_of
from fleet.planning.states import RolloutState
from fleet.selectors.history import Span
from fleet.selectors.rollout_points import AFTER, BEFORE, MeasuredLines, measured_lines
from kernel.models import Event

FINE_FOR, MIDDLE_FOR = timedelta(hours=1), timedelta(days=1)
LONGEST = timedelta(days=14)
BANDS_SHOWN = 60

BAND_COLOUR: dict[RolloutState, Colour] = {
    RolloutState.RUNNING: Colour.MOVING,
    RolloutState.BAKING: Colour.BAKE,
    RolloutState.PAUSED: Colour.WARN,
    RolloutState.ROLLING_BACK: Colour.BAD,
}

CHARTS = (
    ("ttft", "Time to first token, p95 of the worst cell", "ms"),
    ("itl", "Time between tokens, p95 of the worst cell", "ms"),
    ("errors", "Failed requests", "%"),
)


def rollout_charts(rollout: Rollout, now: datetime) -> tuple[Chart, ...]:
    """Errors and latencies of both versions, in five queries: the points that are kept with the rollout."""
    until = min(now, rollout.ended_at + AFTER) if rollout.ended_at else now
    measured = _kept(rollout) or _measured(rollout, until, now)
    if measured is None:
        return ()
    bands = _bands(rollout, until)
    return tuple(_chart(name, title, unit, measured, bands) for name, title, unit in CHARTS)


def _kept(rollout: Rollout) -> MeasuredLines | None:
    points = RolloutPoints.objects.filter(rollout=rollout).first()
    return MeasuredLines(points.start, points.step_s, points.lines) if points else None


def _measured(rollout: Rollout, until: datetime, now: datetime) -> MeasuredLines | None:
    """From load history: of a rollout that has just begun, and of one from before points were kept."""
    since = max(rollout.created_at - BEFORE, until - LONGEST)
    return measured_lines(rollout, _span(now - since, until - since), until)


def _span(age: timedelta, length: timedelta) -> Span:
    """The finest steps that are kept for as long."""
    step_s = FINE_S if age <= FINE_FOR else 300 if age <= MIDDLE_FOR else 3600
    return Span("rollout", max(step_s, int(length.total_seconds())), step_s)


def _chart(name: str, title: str, unit: str, measured: MeasuredLines, bands: tuple[Band, ...]) -> Chart:
    lines = measured.lines[name]
    both = (Series("new version", lines[NEW]), Series("old version", lines[OLD], dashed=True))
    return Chart(f"rollout-{name}", title, unit, measured.start, measured.step_s, both, bands)


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
