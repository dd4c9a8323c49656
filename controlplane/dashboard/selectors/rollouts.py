"""Rollouts as pages show them: their waves, what the gate compared, and what may be asked of them now."""

from collections import Counter
from dataclasses import dataclass

from django.db.models import Q

from fleet.models import Cell, DeploymentRegion, Rollout
from fleet.planning.policy import parse_policy
from fleet.planning.preview import preview_stages
from fleet.planning.states import CellState, RolloutState
from fleet.planning.waves import stages_of
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
    numbers: tuple[tuple[str, float | None], ...]
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
    verdict = rollout.verdict or {}
    asks = ASKS.get(RolloutState(rollout.state), ())
    return RolloutDetail(
        rollout=rollout,
        waves=_waves(rollout),
        updated=versions[rollout.to_version_id],
        there=versions.total(),
        numbers=tuple(verdict.get("numbers", {}).items()),
        asks=tuple(Ask(action, action.replace("-", " ").capitalize(), EFFECTS[action]) for action in asks),
    )


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
    found = []
    for stage in stages:
        if done or stage.index < rollout.stage:
            word, tone = "done", "ok"
        elif stage.index == rollout.stage:
            word, tone = rollout.get_state_display().lower(), str(rollout.tone)
        else:
            word, tone = "to come", "idle"
        found.append(Wave(stage.label, stage.cells, stage.of, word, tone))
    return tuple(found)
