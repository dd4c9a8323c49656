"""What a machine agent does next: from its order, and from what runs. Pure."""

from dataclasses import dataclass
from enum import StrEnum

from engine_agent.protocol.machine_messages import MachineOrder
from engine_agent.protocol.states import MachinePhase

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
STABLE_AFTER_S = 60.0


class Step(StrEnum):
    NOTHING = "nothing"
    WIPE = "wipe"
    START = "start"
    LEAVE = "leave"


@dataclass(frozen=True, slots=True)
class Here:
    """What is here: `runs`, the id of which there is a folder; `alive`, whether its agent runs; since when it may be
    started again."""

    runs: str
    alive: bool
    start_after_s: float = 0.0


def next_step(order: MachineOrder | None, here: Here, now_s: float) -> Step:
    """The one thing to do now. Without an order nothing is touched."""
    if order is None:
        return Step.NOTHING
    wanted = order.run.id if order.run is not None and not order.leave else ""
    if here.runs and here.runs != wanted:
        return Step.WIPE
    if order.leave:
        return Step.LEAVE
    if wanted and not here.alive and now_s >= here.start_after_s:
        return Step.START
    return Step.NOTHING


def phase_of(order: MachineOrder | None, here: Here, *, left: bool = False) -> MachinePhase:
    """What is reported while nothing is being wiped."""
    if left:
        return MachinePhase.LEFT
    if here.runs:
        return MachinePhase.RUNNING if here.alive else MachinePhase.AGENT_DEAD
    return MachinePhase.STARTING if order is not None and order.run is not None else MachinePhase.IDLE


def pause_s(failures: int) -> float:
    """Before an agent that ended so often in a row is started again."""
    return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(failures, 16))
