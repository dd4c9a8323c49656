"""Data of the pages of rollouts: waves, the numbers of a gate with their limits, and charts. Reads only."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import msgspec

from controlplane.dashboard.charts import Band, Chart, Colour, Series
from fleet.cells.models import Cell
from fleet.deployments.models import DeploymentRegion
from fleet.deployments.planner import GatePolicy, parse_policy
from fleet.load.planner import FINE_S, KEPT_S
from fleet.reconcile.planning.states import CellState, RolloutState
from fleet.rollouts.models import Rollout, RolloutPoints
from fleet.rollouts.planning.gates import NEW, OLD, appended, length_of, merged
from fleet.rollouts.planning.waves import preview_stages, stages_of
from fleet.rollouts.selectors import (
    ACTIVE,
    AFTER,
    BEFORE,
    MeasuredLines,
    bake_so_far,
    measured_lines,
    rollouts_described,
)
from kernel.models import Event
from kernel.time_ranges import TimeRange

LATENCIES = (("Time to first token", "time_to_first_token"), ("Time between tokens", "time_between_tokens"))
QUANTILES = ("median", "p95")


@dataclass(frozen=True, slots=True)
class RolloutRow:
    rollout: Rollout
    stage: str


@dataclass(frozen=True, slots=True)
class Wave:
    """One stage. `state`: pending, current, done, rolled back or not reached."""

    label: str
    cells: int
    of: int
    state: str
    tone: str


@dataclass(frozen=True, slots=True)
class GateLine:
    """One number that a gate compares, for the updated and the old cells. `unit`: "", % or ms. `samples`: of both.
    `limit`: what counts as worse, in words. `chance`: probability that the difference is chance."""

    name: str
    updated: float
    old: float | None
    unit: str = ""
    samples: tuple[float, float] | None = None
    limit: str = ""
    chance: float | None = None
    is_worse: bool = False

    @property
    def decimals(self) -> int:
        return {"%": 2, "ms": 1}.get(self.unit, 0)

    @property
    def ratio(self) -> float | None:
        """Updated to old cells, or None if it has no meaning."""
        return self.updated / self.old if self.unit and self.old else None


@dataclass(frozen=True, slots=True)
class RolloutDetail:
    """`verdict`: the last gate's, or the one that a gate would have now if `is_so_far`."""

    rollout: Rollout
    waves: tuple[Wave, ...]
    updated: int
    live: int
    verdict: Mapping[str, Any] | None
    is_so_far: bool
    compared: tuple[GateLine, ...]
    gate: GatePolicy


def rollout_find(key: str) -> RolloutDetail | None:
    """One rollout with everything that its page shows, or None."""
    rollout = rollouts_described().filter(pk=int(key)).first() if key.isdecimal() and len(key) < 10 else None
    if rollout is None:
        return None
    cells = Cell.objects.filter(deployment_id=rollout.deployment_id).exclude(state=CellState.STOPPED.value)
    versions = Counter(cells.values_list("model_version_id", flat=True))
    so_far = bake_so_far(rollout)
    verdict = msgspec.to_builtins(so_far) if so_far is not None else rollout.verdict
    gate = parse_policy(rollout.policy).gate
    return RolloutDetail(
        rollout=rollout,
        waves=_waves(rollout),
        updated=versions[rollout.to_version_id],
        live=versions.total(),
        verdict=verdict,
        is_so_far=so_far is not None,
        compared=tuple(gate_lines(verdict["numbers"], gate)) if verdict else (),
        gate=gate,
    )


def gate_lines(numbers: Mapping[str, float | None], gate: GatePolicy) -> Iterator[GateLine]:
    """The numbers of a verdict, each with its samples and its limit. Leaves out those that the verdict lacks."""
    requests, control = numbers.get("requests"), numbers.get("control_requests")
    if requests is None:
        return
    yield GateLine("Requests", requests, control, limit=f"at least {gate.min_samples} of each")
    if requests:
        share = 100 * (numbers.get("errors") or 0) / requests
        usual = 100 * (numbers.get("control_errors") or 0) / control if control else None
        chance = numbers.get("errors_chance")
        is_worse = usual is not None and share > gate.error_ratio * usual and _is_significant(chance, gate)
        limit = f"{gate.error_ratio:g} times"
        yield GateLine("Failed requests", share, usual, "%", (requests, control or 0), limit, chance, is_worse)
    for name, key in LATENCIES:
        samples = (numbers.get(f"{key}_samples") or 0, numbers.get(f"{key}_control_samples") or 0)
        for quantile in QUANTILES:
            here, there = numbers.get(f"{key}_{quantile}_ms"), numbers.get(f"{key}_{quantile}_control_ms")
            if here is None or there is None:
                continue
            chance = numbers.get(f"{key}_{quantile}_chance")
            is_worse = here > gate.latency_ratio * there and _is_significant(chance, gate)
            label, limit = f"{name}, {quantile}", f"{gate.latency_ratio:g} times"
            yield GateLine(label, here, there, "ms", samples, limit, chance, is_worse)


def _is_significant(chance: float | None, gate: GatePolicy) -> bool:
    return chance is not None and chance < gate.significance


def _waves(rollout: Rollout) -> tuple[Wave, ...]:
    places = DeploymentRegion.objects.filter(deployment_id=rollout.deployment_id)
    wanted = {place.region_id: place.cells_in_force for place in places}
    splits = {place.region_id: place.split for place in places}
    stages = preview_stages(parse_policy(rollout.policy), wanted, tuple(rollout.region_order), splits)
    done = rollout.state == RolloutState.SUCCEEDED
    is_rolled_back = rollout.state in {RolloutState.ROLLING_BACK, RolloutState.ROLLED_BACK}
    waves = []
    for stage in stages:
        if done or stage.index < rollout.stage:
            state, tone = ("rolled back", "idle") if is_rolled_back else ("done", "ok")
        elif stage.index == rollout.stage:
            state, tone = rollout.get_state_display().lower(), str(rollout.tone)
        else:
            state, tone = "pending" if rollout.state in ACTIVE else "not reached", "idle"
        waves.append(Wave(stage.label, stage.cells, stage.of, state, tone))
    return tuple(waves)


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
    """Errors and latencies of both versions, in five queries. Uses the stored points if there are any."""
    until = min(now, rollout.ended_at + AFTER) if rollout.ended_at else now
    measured = _stored_lines(rollout, until) or _lines_from_load(rollout, until, now)
    if measured is None:
        return ()
    bands = _state_bands(rollout, until)
    return tuple(_chart(name, title, unit, measured, bands) for name, title, unit in CHARTS)


def _stored_lines(rollout: Rollout, until: datetime) -> MeasuredLines | None:
    """The stored points, and the samples since then, because housekeeping stores them only every few minutes."""
    points = RolloutPoints.objects.filter(rollout=rollout).first()
    if points is None:
        return None
    end = points.start + timedelta(seconds=length_of(points.lines) * points.step_s)
    steps = int((until - end).total_seconds() // points.step_s)
    tail_s = steps * points.step_s
    tail = TimeRange("", end, end + timedelta(seconds=tail_s))
    newer = measured_lines(rollout, tail, FINE_S) if 0 < tail_s <= KEPT_S[FINE_S] else None
    if newer is None:
        return MeasuredLines(points.start, points.step_s, points.lines)
    lines = appended(points.lines, merged(newer.lines, points.step_s // FINE_S))
    return MeasuredLines(points.start, points.step_s, lines)


def _lines_from_load(rollout: Rollout, until: datetime, now: datetime) -> MeasuredLines | None:
    """From load history, for rollouts without stored points."""
    since = max(rollout.created_at - BEFORE, until - LONGEST)
    return measured_lines(rollout, TimeRange("", since, until), _finest_step_s(now - since))


def _finest_step_s(age: timedelta) -> int:
    """The finest steps that load history keeps for that long."""
    return FINE_S if age <= FINE_FOR else 300 if age <= MIDDLE_FOR else 3600


def _chart(name: str, title: str, unit: str, measured: MeasuredLines, bands: tuple[Band, ...]) -> Chart:
    lines = measured.lines[name]
    both = (Series("new version", lines[NEW]), Series("old version", lines[OLD], dashed=True))
    return Chart(f"rollout-{name}", title, unit, measured.start, measured.step_s, both, bands)


def _state_bands(rollout: Rollout, until: datetime) -> tuple[Band, ...]:
    events = Event.objects.filter(
        deployment=rollout.deployment_id, kind__startswith="rollout.", detail__rollout=rollout.pk
    ).order_by("id")
    turns: list[tuple[datetime, RolloutState, int]] = []
    for event in events[: 4 * BANDS_SHOWN]:
        name, stage = event.kind.partition(".")[2], int(event.detail.get("stage", 0))
        if name not in set(RolloutState):
            continue
        state = RolloutState(name)
        if not turns or turns[-1][1:] != (state, stage):
            turns.append((event.at, state, stage))
    ends = [*(at for at, _, _ in turns[1:]), until]
    stages = stages_of(parse_policy(rollout.policy), tuple(rollout.region_order))
    labels = [stage.label for stage in stages] or [""]
    return tuple(
        Band(_band_label(state, labels[min(stage, len(labels) - 1)]), at, end, BAND_COLOUR[state])
        for (at, state, stage), end in zip(turns, ends, strict=False)
        if state in BAND_COLOUR
    )[:BANDS_SHOWN]


def _band_label(state: RolloutState, stage: str) -> str:
    return {RolloutState.RUNNING: stage, RolloutState.BAKING: "bake"}.get(state, state.value.replace("_", " "))
