"""How the machines of an instance type in a region come to run another image. Pure.

One unit is launched from the new image first. Once it has been ready for a while the others follow, a spare or a whole
cell at a time: each is announced to leave like a machine that its provider takes (`notices`), so that another is made
first and the disruption ledger is asked. Two launches that do not boot turn the move round.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from fleet.planning.states import NodeState
from kernel.tones import Tone


class ImageState(StrEnum):
    """`asked`: the cloud has not said yet that there is such an image. `canary`: one unit is tried. `back`: what runs
    the new image already is replaced by the old one. `refused`: it never began."""

    ASKED = "asked"
    CANARY = "canary"
    ROLLING = "rolling"
    BACK = "back"
    DONE = "done"
    REFUSED = "refused"


IMAGE_TONE = {
    ImageState.ASKED: Tone.MOVING,
    ImageState.CANARY: Tone.MOVING,
    ImageState.ROLLING: Tone.MOVING,
    ImageState.BACK: Tone.BAD,
    ImageState.DONE: Tone.OK,
    ImageState.REFUSED: Tone.BAD,
}


@dataclass(frozen=True, slots=True)
class ImageSettings:
    """`healthy_s`: for how many seconds all nodes of the canary must have been ready. `failed_most`: so many launches
    that did not boot are bad luck."""

    healthy_s: float = 600.0
    failed_most: int = 1


SETTINGS = ImageSettings()


@dataclass(frozen=True, slots=True)
class ImageMachine:
    """One that may run. `unit`: of its launch. `cell`: of its node, "" for a spare. `is_new`: it was launched from the
    image that the move is to. `is_leaving`: it was announced that it goes."""

    node: str
    unit: str
    cell: str
    is_new: bool
    state: NodeState
    state_since: datetime
    is_leaving: bool = False


@dataclass(frozen=True, slots=True)
class ImageStep:
    """`leave`: nodes to be announced to leave now. `booted`, `failed`: nodes that were seen ready, and units that did
    not boot, all so far."""

    state: ImageState
    reason: str
    booted: frozenset[str]
    failed: frozenset[str]
    leave: tuple[str, ...] = ()


def takes_new(state: ImageState, machines: Sequence[ImageMachine], open_units: Collection[str]) -> bool:
    """Whether the next launch is from the new image: while one is tried, only if none is under way. `open_units`: whose
    launch from it may still come to something."""
    if state is ImageState.CANARY:
        return not open_units and not any(one.is_new and one.state is not NodeState.LOST for one in machines)
    return state is ImageState.ROLLING


def plan_image(
    state: ImageState,
    machines: Sequence[ImageMachine],
    booted: Collection[str],
    failed: Collection[str],
    now: datetime,
    settings: ImageSettings = SETTINGS,
) -> ImageStep:
    """The next step of a move. `booted` and `failed` are those of the step before."""
    new = [one for one in machines if one.is_new]
    seen = frozenset(booted) | {one.node for one in new if one.state is NodeState.READY}
    lost = frozenset(failed) | {one.unit for one in new if one.state is NodeState.LOST and one.node not in seen}
    if state in (ImageState.CANARY, ImageState.ROLLING) and len(lost) > settings.failed_most:
        return ImageStep(ImageState.BACK, f"{len(lost)} launches from it did not boot", seen, lost)
    if state is ImageState.CANARY:
        tried = _canary(new, now, settings)
        if tried is not None:
            return ImageStep(*tried, seen, lost)
    to_go = [one for one in machines if one.is_new is (state is ImageState.BACK) and one.state is not NodeState.LOST]
    if state is not ImageState.CANARY and not to_go:
        ended = "all went back" if state is ImageState.BACK else "all machines run it"
        return ImageStep(ImageState.DONE, ended, seen, lost)
    waits = _waits(machines, to_go)
    leave = () if waits else _next_place(machines, to_go)
    reason = waits or (
        f"{', '.join(leave)} leaves for it" if leave else "no machine runs: it is tried by the next launch"
    )
    return ImageStep(state, reason, seen, lost, leave)


def _canary(new: Sequence[ImageMachine], now: datetime, settings: ImageSettings) -> tuple[ImageState, str] | None:
    """What the unit that is tried says; None: there is none yet."""
    trying = [one for one in new if one.state is not NodeState.LOST]
    if not trying:
        return None
    if any(one.state is not NodeState.READY for one in trying):
        return ImageState.CANARY, "the first unit boots"
    since = max(one.state_since for one in trying)
    left_s = settings.healthy_s - (now - since).total_seconds()
    if left_s > 0:
        return ImageState.CANARY, f"the first unit has been ready since {since:%H:%M:%S} UTC"
    return ImageState.ROLLING, f"the first unit was ready for {settings.healthy_s:.0f} s"


def _waits(machines: Sequence[ImageMachine], to_go: Sequence[ImageMachine]) -> str:
    """Why nothing more may leave now; "" if something may. One place at a time."""
    leaving = sorted(one.node for one in machines if one.is_leaving)
    if leaving:
        return f"{', '.join(leaving)} leaves"
    going = {one.node for one in to_go}
    booting = sorted(one.node for one in machines if one.state is NodeState.JOINING and one.node not in going)
    return f"{', '.join(booting)} boots" if booting else ""


def _next_place(machines: Sequence[ImageMachine], to_go: Sequence[ImageMachine]) -> tuple[str, ...]:
    """Spares first, for cells are made of them. A cell leaves as a whole, whatever its machines run."""
    if not to_go:
        return ()
    first = min(to_go, key=lambda one: (bool(one.cell), one.cell, one.node))
    if not first.cell:
        return (first.node,)
    return tuple(sorted(one.node for one in machines if one.cell == first.cell))
