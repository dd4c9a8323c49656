"""Rollouts as pages show them: their waves, and what the gate compared."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from django.db.models import Q

from fleet.models import Cell, DeploymentRegion, Rollout
from fleet.planning.policy import parse_policy
from fleet.planning.rollout.preview import preview_stages
from fleet.planning.rollout.waves import stages_of
from fleet.planning.states import CellState, RolloutState
from fleet.selectors.rollout import ACTIVE, rollouts_described

ROLLOUTS_SHOWN = 100

# What a gate compared: its label, whether it is in ms, and the numbers of updated and of old cells.
GATE_LINES = (
    ("Requests", False, "requests", "control_requests"),
    ("Errors", False, "errors", "control_errors"),
    *(
        (f"{name}, {quantile}", True, f"{latency}_{quantile}_ms", f"{latency}_{quantile}_control_ms")
        for name, latency in (
            ("Time to first token", "time_to_first_token"),
            ("Time between tokens", "time_between_tokens"),
        )
        for quantile in ("median", "p95")
    ),
)


@dataclass(frozen=True, slots=True)
class RolloutRow:
    rollout: Rollout
    stage: str


@dataclass(frozen=True, slots=True)
class RolloutList:
    rows: tuple[RolloutRow, ...]
    more: bool
    filtered: bool


@dataclass(frozen=True, slots=True)
class Wave:
    """A stage of the strip. `state`: where the rollout is relative to it."""

    label: str
    cells: int
    of: int
    state: str
    tone: str


@dataclass(frozen=True, slots=True)
class GateLine:
    """One number that a gate compared. `ratio`: of updated to old cells, None where it has no meaning."""

    name: str
    is_time: bool
    updated: float | None
    old: float | None
    ratio: float | None


@dataclass(frozen=True, slots=True)
class RolloutDetail:
    rollout: Rollout
    waves: tuple[Wave, ...]
    updated: int
    live: int
    compared: tuple[GateLine, ...]


def rollout_list(*, state: str = "", text: str = "", limit: int = ROLLOUTS_SHOWN) -> RolloutList:
    """Rollouts, youngest first; `state` `active` for those that have not ended."""
    rollouts = rollouts_described()
    if state == "active":
        rollouts = rollouts.filter(state__in=ACTIVE)
    elif state:
        rollouts = rollouts.filter(state=state)
    if text:
        rollouts = rollouts.filter(Q(deployment__name__icontains=text) | Q(reason__icontains=text))
    fetched = list(rollouts[: limit + 1])
    rows = tuple(RolloutRow(rollout, stage_label(rollout)) for rollout in fetched[:limit])
    return RolloutList(rows=rows, more=len(fetched) > limit, filtered=bool(state or text))


def rollout_find(key: str) -> RolloutDetail | None:
    """One rollout with everything that its page shows, or None."""
    rollout = rollouts_described().filter(pk=int(key)).first() if key.isdecimal() and len(key) < 10 else None
    if rollout is None:
        return None
    cells = Cell.objects.filter(deployment_id=rollout.deployment_id).exclude(state=CellState.STOPPED.value)
    versions = Counter(cells.values_list("model_version_id", flat=True))
    return RolloutDetail(
        rollout=rollout,
        waves=_waves(rollout),
        updated=versions[rollout.to_version_id],
        live=versions.total(),
        compared=tuple(_gate_lines((rollout.verdict or {}).get("numbers", {}))),
    )


def _gate_lines(numbers: Mapping[str, float | None]) -> Iterator[GateLine]:
    """The gate's numbers, updated cells beside old ones."""
    for name, is_time, updated, old in GATE_LINES:
        if updated in numbers:
            here, there = numbers[updated], numbers.get(old)
            yield GateLine(name, is_time, here, there, here / there if is_time and here and there else None)


def stage_label(rollout: Rollout) -> str:
    """Region and share of the stage that a rollout is in."""
    stages = stages_of(parse_policy(rollout.policy), tuple(rollout.region_order))
    return stages[min(rollout.stage, len(stages) - 1)].label if stages else ""


def _waves(rollout: Rollout) -> tuple[Wave, ...]:
    places = DeploymentRegion.objects.filter(deployment_id=rollout.deployment_id)
    wanted = {place.region_id: place.cells_in_force for place in places}
    splits = {place.region_id: place.split for place in places}
    stages = preview_stages(parse_policy(rollout.policy), wanted, tuple(rollout.region_order), splits)
    done = rollout.state == RolloutState.SUCCEEDED
    went_back = rollout.state in {RolloutState.ROLLING_BACK, RolloutState.ROLLED_BACK}
    waves = []
    for stage in stages:
        if done or stage.index < rollout.stage:
            state, tone = ("rolled back", "idle") if went_back else ("done", "ok")
        elif stage.index == rollout.stage:
            state, tone = rollout.get_state_display().lower(), str(rollout.tone)
        else:
            state, tone = "pending" if rollout.state in ACTIVE else "not reached", "idle"
        waves.append(Wave(stage.label, stage.cells, stage.of, state, tone))
    return tuple(waves)
