"""Rollouts as pages show them: their waves, what the gate compared, and what may be asked of them now."""

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

ASKS: dict[RolloutState, tuple[str, ...]] = {
    RolloutState.RUNNING: ("pause", "roll-back", "abort"),
    RolloutState.BAKING: ("skip-bake", "pause", "roll-back", "abort"),
    RolloutState.PAUSED: ("resume", "skip-bake", "roll-back", "abort"),
    RolloutState.ROLLING_BACK: ("abort",),
}
EFFECTS: dict[str, str] = {
    "pause": "No further cell goes down; what is on its way finishes.",
    "resume": "The stage goes on; a bake begins anew.",
    "skip-bake": "The next stage begins without the gate's word. Say why.",
    "roll-back": "Every cell goes back to the version that the rollout came from.",
    "abort": "The rollout ends where it stands: cells keep the version that they run.",
}


# What a gate compared: its name for people, whether it is in ms, and the numbers of updated and of old cells.
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
    """A stage of the strip. `word` says where the rollout stands to it."""

    label: str
    cells: int
    of: int
    word: str
    tone: str


@dataclass(frozen=True, slots=True)
class Compared:
    """One line of what a gate compared. `ratio`: of updated to old cells; None where it says nothing."""

    name: str
    is_time: bool
    updated: float | None
    old: float | None
    ratio: float | None


@dataclass(frozen=True, slots=True)
class Ask:
    """Something that may be asked of the rollout in its present state."""

    action: str
    label: str
    effect: str


@dataclass(frozen=True, slots=True)
class RolloutDetail:
    rollout: Rollout
    waves: tuple[Wave, ...]
    updated: int
    there: int
    compared: tuple[Compared, ...]
    asks: tuple[Ask, ...]


def rollout_list(*, state: str = "", text: str = "", limit: int = ROLLOUTS_SHOWN) -> RolloutList:
    """Rollouts, youngest first; `state` `active` for those that have not ended."""
    rollouts = rollouts_described()
    if state == "active":
        rollouts = rollouts.filter(state__in=ACTIVE)
    elif state:
        rollouts = rollouts.filter(state=state)
    if text:
        rollouts = rollouts.filter(Q(deployment__name__icontains=text) | Q(reason__icontains=text))
    found = list(rollouts[: limit + 1])
    rows = tuple(RolloutRow(rollout, stage_label(rollout)) for rollout in found[:limit])
    return RolloutList(rows=rows, more=len(found) > limit, filtered=bool(state or text))


def rollout_find(key: str) -> RolloutDetail | None:
    """One rollout with everything that its page shows, or None."""
    rollout = rollouts_described().filter(pk=int(key)).first() if key.isdecimal() and len(key) < 10 else None
    if rollout is None:
        return None
    cells = Cell.objects.filter(deployment_id=rollout.deployment_id).exclude(state=CellState.STOPPED.value)
    versions = Counter(cells.values_list("model_version_id", flat=True))
    asks = ASKS.get(RolloutState(rollout.state), ())
    return RolloutDetail(
        rollout=rollout,
        waves=_waves(rollout),
        updated=versions[rollout.to_version_id],
        there=versions.total(),
        compared=tuple(_compared((rollout.verdict or {}).get("numbers", {}))),
        asks=tuple(Ask(action, action.replace("-", " ").capitalize(), EFFECTS[action]) for action in asks),
    )


def _compared(numbers: Mapping[str, float | None]) -> Iterator[Compared]:
    """The gate's numbers, updated cells beside old ones."""
    for name, is_time, updated, old in GATE_LINES:
        if updated in numbers:
            here, there = numbers[updated], numbers.get(old)
            yield Compared(name, is_time, here, there, here / there if is_time and here and there else None)


def stage_label(rollout: Rollout) -> str:
    """Region and share of the stage that a rollout is in."""
    stages = stages_of(parse_policy(rollout.policy), tuple(rollout.region_order))
    return stages[min(rollout.stage, len(stages) - 1)].label if stages else ""


def _waves(rollout: Rollout) -> tuple[Wave, ...]:
    wanted = dict(
        DeploymentRegion.objects.filter(deployment_id=rollout.deployment_id).values_list("region_id", "cells")
    )
    stages = preview_stages(parse_policy(rollout.policy), wanted, tuple(rollout.region_order))
    done = rollout.state == RolloutState.SUCCEEDED
    went_back = rollout.state in {RolloutState.ROLLING_BACK, RolloutState.ROLLED_BACK}
    found = []
    for stage in stages:
        if done or stage.index < rollout.stage:
            word, tone = ("taken back", "idle") if went_back else ("done", "ok")
        elif stage.index == rollout.stage:
            word, tone = rollout.get_state_display().lower(), str(rollout.tone)
        else:
            word, tone = "to come" if rollout.state in ACTIVE else "not reached", "idle"
        found.append(Wave(stage.label, stage.cells, stage.of, word, tone))
    return tuple(found)
