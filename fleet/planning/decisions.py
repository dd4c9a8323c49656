"""What planners can decide. Each decision says why, and carries what it saw, so that a stale one can be refused."""

from dataclasses import dataclass

from fleet.planning.states import CellState, NodeState


@dataclass(frozen=True, slots=True)
class MoveNode:
    """Change a node's state."""

    node: str
    seen: NodeState
    to: NodeState
    reason: str


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
    """Ask the provider for machines; below the network nodes `near` if it can choose."""

    region: str
    instance_type: str
    count: int
    reason: str
    near: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CreateCell:
    """Record that a deployment has one more cell; it gets nodes by `StartCell`."""

    deployment: str
    region: str
    reason: str


@dataclass(frozen=True, slots=True)
class StartCell:
    """Begin a new generation with these nodes, in rank order. Members before that are not named leave."""

    cell: str
    seen: CellState
    generation: int
    nodes: tuple[str, ...]
    reason: str


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


Decision = (
    MoveNode | RestartAgent | RetireNode | LaunchNodes | CreateCell | StartCell | MoveCell | StopCell | ExplainCell
)
