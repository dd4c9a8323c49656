"""Every state of the fleet, which changes of state are allowed, and how each feels to an operator. Declared once."""

from enum import StrEnum

from controlplane.kernel.tones import Tone


class CellState(StrEnum):
    PENDING = "pending"
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"
    LOST = "lost"


class NodeState(StrEnum):
    JOINING = "joining"
    READY = "ready"
    SUSPECT = "suspect"
    FAULTY = "faulty"
    LOST = "lost"
    RETIRED = "retired"


class IncidentState(StrEnum):
    OPEN = "open"
    CLOSED = "closed"


class ServingClass(StrEnum):
    REALTIME = "realtime"
    NEAR_REALTIME = "near_realtime"
    BATCH = "batch"


CELL_ALLOWED: dict[CellState, frozenset[CellState]] = {
    CellState.PENDING: frozenset({CellState.STARTING, CellState.STOPPED}),
    CellState.STARTING: frozenset(
        {CellState.STARTING, CellState.READY, CellState.FAILED, CellState.LOST, CellState.DRAINING}
    ),
    CellState.READY: frozenset({CellState.STARTING, CellState.DRAINING, CellState.FAILED, CellState.LOST}),
    CellState.DRAINING: frozenset({CellState.STOPPED, CellState.FAILED, CellState.LOST}),
    CellState.FAILED: frozenset({CellState.STARTING, CellState.STOPPED}),
    CellState.LOST: frozenset({CellState.STARTING, CellState.STOPPED}),
    CellState.STOPPED: frozenset(),
}

NODE_ALLOWED: dict[NodeState, frozenset[NodeState]] = {
    NodeState.JOINING: frozenset({NodeState.READY, NodeState.LOST, NodeState.RETIRED}),
    NodeState.READY: frozenset({NodeState.SUSPECT, NodeState.FAULTY, NodeState.LOST, NodeState.RETIRED}),
    NodeState.SUSPECT: frozenset({NodeState.READY, NodeState.FAULTY, NodeState.LOST, NodeState.RETIRED}),
    NodeState.FAULTY: frozenset({NodeState.RETIRED, NodeState.LOST, NodeState.READY}),
    NodeState.LOST: frozenset({NodeState.RETIRED}),
    NodeState.RETIRED: frozenset(),
}

CELL_TONE: dict[CellState, Tone] = {
    CellState.PENDING: Tone.WARN,
    CellState.STARTING: Tone.MOVING,
    CellState.READY: Tone.OK,
    CellState.DRAINING: Tone.MOVING,
    CellState.STOPPED: Tone.IDLE,
    CellState.FAILED: Tone.BAD,
    CellState.LOST: Tone.BAD,
}

NODE_TONE: dict[NodeState, Tone] = {
    NodeState.JOINING: Tone.MOVING,
    NodeState.READY: Tone.OK,
    NodeState.SUSPECT: Tone.WARN,
    NodeState.FAULTY: Tone.BAD,
    NodeState.LOST: Tone.BAD,
    NodeState.RETIRED: Tone.IDLE,
}

INCIDENT_TONE: dict[IncidentState, Tone] = {IncidentState.OPEN: Tone.BAD, IncidentState.CLOSED: Tone.IDLE}


def choices(states: type[StrEnum]) -> list[tuple[str, str]]:
    """Django's `choices` for an enum: value and label."""
    return [(state.value, state.value.replace("_", " ").capitalize()) for state in states]
