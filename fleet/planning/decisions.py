"""What planners can decide. Each decision says why, and carries what it saw, so that a stale one can be refused."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from fleet.planning.counters import CellCounters
from fleet.planning.fault_decisions import (
    CloseIncident,
    CloseReplacement,
    CordonNode,
    NoteIncident,
    OpenIncident,
    ReplaceNode,
    WishReplacement,
)
from fleet.planning.snapshot import FailedStart, Verdict
from fleet.planning.states import CellState, DisruptionCause, NodeState, RolloutState


@dataclass(frozen=True, slots=True)
class MoveNode:
    """Change a node's state. `said_at`: when its agent had last spoken; if it spoke since, it is not lost."""

    node: str
    seen: NodeState
    to: NodeState
    reason: str
    said_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class RestartAgent:
    """The machine runs but its agent does not: start the agent again; it adopts the engine."""

    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class RetireNode:
    """Give a machine back: it is lost and in no cell, or surplus."""

    node: str
    seen: NodeState
    reason: str


@dataclass(frozen=True, slots=True)
class LaunchNodes:
    """Ask the provider for machines; below the network nodes `near` if it can choose. `there`: how many of them, not
    retired, the region has before: somebody who bought meanwhile has bought in our stead."""

    region: str
    instance_type: str
    count: int
    reason: str
    there: int
    near: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CreateCell:
    """Record that a deployment has one more cell; it gets nodes by `StartCell`. `version`: the one that it is meant
    for; empty: the deployment's own."""

    deployment: str
    region: str
    reason: str
    version: str = ""


@dataclass(frozen=True, slots=True)
class StartCell:
    """Begin a new generation with these nodes, in rank order. Members before that are not named leave. `version`:
    the one that it runs from now on; empty: the one it has."""

    cell: str
    seen: CellState
    generation: int
    nodes: tuple[str, ...]
    reason: str
    version: str = ""


@dataclass(frozen=True, slots=True)
class DrainCell:
    """Take a ready cell down on purpose. Charged to the disruption ledger, which counts again when this is applied."""

    cell: str
    generation: int
    cause: DisruptionCause
    reason: str
    rollout: int | None = None


@dataclass(frozen=True, slots=True)
class MoveCell:
    """Change a cell's state within its generation."""

    cell: str
    seen: CellState
    generation: int
    to: CellState
    reason: str


@dataclass(frozen=True, slots=True)
class StopCell:
    """The cell ends; its nodes become spares."""

    cell: str
    seen: CellState
    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class ExplainCell:
    """Say anew why a cell is as it is, such as what it waits for. Changes nothing else."""

    cell: str
    seen: CellState
    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class ChangeRollout:
    """What a rollout is from now on. `failed`: failures of updated cells to remember beside those known. `counters`:
    what its cells had counted when its bake began. `verdict`: what its gate found."""

    rollout: int
    seen: RolloutState
    revision: int
    to: RolloutState
    stage: int
    reason: str
    failed: tuple[FailedStart, ...] = ()
    counters: Mapping[str, CellCounters] | None = None
    verdict: Verdict | None = None


Decision = (
    MoveNode
    | RestartAgent
    | RetireNode
    | LaunchNodes
    | CreateCell
    | StartCell
    | DrainCell
    | MoveCell
    | StopCell
    | ExplainCell
    | ChangeRollout
    | CordonNode
    | ReplaceNode
    | WishReplacement
    | CloseReplacement
    | OpenIncident
    | NoteIncident
    | CloseIncident
)
