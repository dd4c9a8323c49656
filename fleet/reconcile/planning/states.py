"""All states of the fleet, their allowed transitions, and their tones. Declared once."""

from enum import StrEnum

from engine_agent.protocol.states import Phase
from kernel.tones import Tone


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


DEAD = frozenset({NodeState.LOST, NodeState.FAULTY, NodeState.RETIRED})
"""Nodes that can no longer run a cell."""


class ProviderAction(StrEnum):
    """Orders to a provider, the most urgent first."""

    LAUNCH = "launch"
    RESTART_AGENT = "restart_agent"
    REBOOT = "reboot"
    TERMINATE = "terminate"


class MachineState(StrEnum):
    """State of a machine for the fleet. A provider with its own machines moves one directly from `taken` to `gone`."""

    JOINING = "joining"
    """It has a credential and has not connected yet."""
    POOL = "pool"
    """Free for the next launch that it fits."""
    TAKEN = "taken"
    WIPING = "wiping"
    """It was returned and has not yet confirmed the deletion of all data."""
    LEAVING = "leaving"
    """An operator removed it; it wipes and uninstalls itself."""
    GONE = "gone"


class MachineRole(StrEnum):
    NODE = "node"
    INGRESS = "ingress"


class CloudRegionState(StrEnum):
    """How much is known about the static parts of a cloud region."""

    READING = "reading"
    READY = "ready"
    REFUSED = "refused"


class PoolState(StrEnum):
    """Current use of a capacity pool (`fleet.capacity.planning.pools.pool_state`)."""

    USABLE = "usable"
    RESTING = "resting"
    """It had no machines a moment ago."""
    FULL = "full"
    ENDED = "ended"
    """It ends before a machine would be useful."""
    OFF = "off"


class NoticeKind(StrEnum):
    """Kinds of cloud notices. `interruption`: of spot, or of a reservation that its owner reclaims. `image`: our own,
    for a machine that is to get another image (`fleet.clouds.planning.upkeep`); it ends only after its successor
    exists."""

    INTERRUPTION = "interruption"
    REBALANCE = "rebalance"
    BLOCK_END = "block_end"
    RETIREMENT = "retirement"
    MAINTENANCE = "maintenance"
    IMPAIRED = "impaired"
    IMAGE = "image"


class NoticeSource(StrEnum):
    """Source of a notice. `block`: ours, from the end of a Capacity Block; `image`: ours, from an image change."""

    EVENTS = "events"
    STATUS = "status"
    IMDS = "imds"
    BLOCK = "block"
    IMAGE = "image"


class IncidentState(StrEnum):
    OPEN = "open"
    CLOSED = "closed"


class RolloutState(StrEnum):
    RUNNING = "running"
    PAUSED = "paused"
    BAKING = "baking"
    ROLLING_BACK = "rolling_back"
    SUCCEEDED = "succeeded"
    ROLLED_BACK = "rolled_back"
    FAILED = "failed"


class AgentRolloutState(StrEnum):
    """State of the upgrade of all agents to another release."""

    RUNNING = "running"
    ROLLING_BACK = "rolling_back"
    SUCCEEDED = "succeeded"
    ROLLED_BACK = "rolled_back"


class DisruptionCause(StrEnum):
    """Why an available cell was drained on purpose, or a machine with spare nodes emptied."""

    ROLLOUT = "rollout"
    SCALE = "scale"
    REPAIR = "repair"
    OPERATOR = "operator"
    PREEMPTION = "preemption"
    ROLE = "role"
    LAYOUT = "layout"


CELL_ALLOWED: dict[CellState, frozenset[CellState]] = {
    CellState.PENDING: frozenset({CellState.STARTING, CellState.STOPPED}),
    CellState.STARTING: frozenset(
        {CellState.STARTING, CellState.READY, CellState.FAILED, CellState.LOST, CellState.DRAINING}
    ),
    CellState.READY: frozenset({CellState.STARTING, CellState.DRAINING, CellState.FAILED, CellState.LOST}),
    CellState.DRAINING: frozenset({CellState.STARTING, CellState.STOPPED, CellState.FAILED, CellState.LOST}),
    CellState.FAILED: frozenset({CellState.STARTING, CellState.STOPPED}),
    CellState.LOST: frozenset({CellState.STARTING, CellState.STOPPED}),
    CellState.STOPPED: frozenset(),
}

CELL_PHASE: dict[CellState, Phase] = {
    CellState.STARTING: Phase.SERVE,
    CellState.READY: Phase.SERVE,
    CellState.DRAINING: Phase.DRAIN,
}
"""The nodes' phase. In any other state a cell runs no engine; it starts again as a whole with a new generation."""

NODE_ALLOWED: dict[NodeState, frozenset[NodeState]] = {
    NodeState.JOINING: frozenset({NodeState.READY, NodeState.LOST, NodeState.RETIRED}),
    NodeState.READY: frozenset({NodeState.SUSPECT, NodeState.FAULTY, NodeState.LOST, NodeState.RETIRED}),
    NodeState.SUSPECT: frozenset({NodeState.READY, NodeState.FAULTY, NodeState.LOST, NodeState.RETIRED}),
    NodeState.FAULTY: frozenset({NodeState.RETIRED, NodeState.LOST, NodeState.READY}),
    NodeState.LOST: frozenset({NodeState.RETIRED}),
    NodeState.RETIRED: frozenset(),
}

MACHINE_ALLOWED: dict[MachineState, frozenset[MachineState]] = {
    MachineState.JOINING: frozenset({MachineState.POOL, MachineState.LEAVING, MachineState.GONE}),
    MachineState.POOL: frozenset({MachineState.TAKEN, MachineState.LEAVING, MachineState.GONE}),
    MachineState.TAKEN: frozenset({MachineState.WIPING, MachineState.GONE}),
    MachineState.WIPING: frozenset({MachineState.POOL, MachineState.LEAVING, MachineState.GONE}),
    MachineState.LEAVING: frozenset({MachineState.GONE}),
    MachineState.GONE: frozenset(),
}

AGENT_ROLLOUT_ALLOWED: dict[AgentRolloutState, frozenset[AgentRolloutState]] = {
    AgentRolloutState.RUNNING: frozenset({AgentRolloutState.ROLLING_BACK, AgentRolloutState.SUCCEEDED}),
    AgentRolloutState.ROLLING_BACK: frozenset({AgentRolloutState.ROLLED_BACK}),
    AgentRolloutState.SUCCEEDED: frozenset(),
    AgentRolloutState.ROLLED_BACK: frozenset(),
}

ROLLOUT_ACTIVE = frozenset({RolloutState.RUNNING, RolloutState.PAUSED, RolloutState.BAKING, RolloutState.ROLLING_BACK})
"""A deployment has at most one rollout in these states."""
ROLLOUT_MOVING = frozenset({RolloutState.RUNNING, RolloutState.ROLLING_BACK})
"""Cells are drained for a rollout only in these states."""

# Rolling back is reachable from every active state (I7).
ROLLOUT_ALLOWED: dict[RolloutState, frozenset[RolloutState]] = {
    RolloutState.RUNNING: frozenset(
        {
            RolloutState.RUNNING,
            RolloutState.PAUSED,
            RolloutState.BAKING,
            RolloutState.ROLLING_BACK,
            RolloutState.SUCCEEDED,
            RolloutState.FAILED,
        }
    ),
    RolloutState.PAUSED: frozenset(
        {
            RolloutState.PAUSED,
            RolloutState.RUNNING,
            RolloutState.ROLLING_BACK,
            RolloutState.SUCCEEDED,
            RolloutState.FAILED,
        }
    ),
    RolloutState.BAKING: frozenset(
        {
            RolloutState.BAKING,
            RolloutState.RUNNING,
            RolloutState.PAUSED,
            RolloutState.ROLLING_BACK,
            RolloutState.SUCCEEDED,
            RolloutState.FAILED,
        }
    ),
    RolloutState.ROLLING_BACK: frozenset({RolloutState.ROLLING_BACK, RolloutState.ROLLED_BACK, RolloutState.FAILED}),
    RolloutState.SUCCEEDED: frozenset(),
    RolloutState.ROLLED_BACK: frozenset(),
    RolloutState.FAILED: frozenset(),
}

AGENT_ROLLOUT_ACTIVE = frozenset({AgentRolloutState.RUNNING, AgentRolloutState.ROLLING_BACK})
"""At most one upgrade of agents is in these states."""

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

MACHINE_TONE: dict[MachineState, Tone] = {
    MachineState.JOINING: Tone.MOVING,
    MachineState.POOL: Tone.IDLE,
    MachineState.TAKEN: Tone.OK,
    MachineState.WIPING: Tone.MOVING,
    MachineState.LEAVING: Tone.MOVING,
    MachineState.GONE: Tone.IDLE,
}

POOL_TONE: dict[PoolState, Tone] = {
    PoolState.USABLE: Tone.OK,
    PoolState.RESTING: Tone.WARN,
    PoolState.FULL: Tone.IDLE,
    PoolState.ENDED: Tone.IDLE,
    PoolState.OFF: Tone.IDLE,
}

ROLLOUT_TONE: dict[RolloutState, Tone] = {
    RolloutState.RUNNING: Tone.MOVING,
    RolloutState.PAUSED: Tone.WARN,
    RolloutState.BAKING: Tone.BAKE,
    RolloutState.ROLLING_BACK: Tone.WARN,
    RolloutState.SUCCEEDED: Tone.OK,
    RolloutState.ROLLED_BACK: Tone.IDLE,
    RolloutState.FAILED: Tone.BAD,
}

AGENT_ROLLOUT_TONE: dict[AgentRolloutState, Tone] = {
    AgentRolloutState.RUNNING: Tone.MOVING,
    AgentRolloutState.ROLLING_BACK: Tone.WARN,
    AgentRolloutState.SUCCEEDED: Tone.OK,
    AgentRolloutState.ROLLED_BACK: Tone.IDLE,
}

AGENT_ROLLOUT_TEXT: dict[AgentRolloutState, str] = {
    AgentRolloutState.RUNNING: "is under way",
    AgentRolloutState.ROLLING_BACK: "goes back",
    AgentRolloutState.SUCCEEDED: "has succeeded",
    AgentRolloutState.ROLLED_BACK: "has gone back",
}
"""For sentences with the upgrade as subject."""

INCIDENT_TONE: dict[IncidentState, Tone] = {IncidentState.OPEN: Tone.BAD, IncidentState.CLOSED: Tone.IDLE}


def choices(states: type[StrEnum]) -> list[tuple[str, str]]:
    return [(state.value, state.value.replace("_", " ").capitalize()) for state in states]
