"""What planners can decide. Each decision says why, and carries what it saw, so that a stale one can be refused."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from engine_agent.protocol.states import CellRole
from fleet.capacity.planning.pools import ANY, Markets
from fleet.deployments.planner import GrantRule
from fleet.faults.planning.views import IncidentKind, Rule
from fleet.load.planner import CellCounters
from fleet.reconcile.planning.snapshot import FailedStart, Verdict
from fleet.reconcile.planning.states import CellState, DisruptionCause, NodeState, RolloutState


@dataclass(frozen=True, slots=True)
class CordonNode:
    """Keep a node out of new placements. What runs on it goes on. `for_notice`: only as long as its provider means to
    take its machine."""

    node: str
    reason: str
    for_notice: bool = False


@dataclass(frozen=True, slots=True)
class UncordonNode:
    """What a node was cordoned for was called off."""

    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class RequestReplacement:
    """A node must be replaced, and its cell still serves: from now on the cell is drained first, even if what was wrong
    can no longer be seen while it drains."""

    node: str
    cell: str
    rule: Rule
    reason: str


@dataclass(frozen=True, slots=True)
class ReplaceNode:
    """Take a faulty node out of use at once: its cell is lost, and gets another node. `since`: when the state that was
    seen began; a node that left it and came back is left alone."""

    node: str
    seen: NodeState
    since: datetime
    cell: str
    rule: Rule
    reason: str


@dataclass(frozen=True, slots=True)
class CloseReplacement:
    """The work is done, or there is nothing left to do."""

    replacement: int
    reason: str


@dataclass(frozen=True, slots=True)
class OpenIncident:
    """A fault that must be healed. `shadow`: its rule only says what it would have done. `cohort`
    names what is alike in the machines it may be compared with."""

    kind: IncidentKind
    subject: str
    summary: str
    evidence: Mapping[str, Any] = field(default_factory=dict)
    region: str = ""
    deployment: str = ""
    cell: str = ""
    node: str = ""
    cohort: str = ""
    shadow: bool = False


@dataclass(frozen=True, slots=True)
class NoteIncident:
    """An open incident's fault is still there, and this is what is known of it now."""

    incident: int
    summary: str
    evidence: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CloseIncident:
    """The fault is gone. `seen_at`: when it was last there; a fault that came back meanwhile keeps its incident."""

    incident: int
    seen_at: datetime
    reason: str


@dataclass(frozen=True, slots=True)
class MoveNode:
    """Change a node's state. `reported_at`: when its agent had last reported; if it reported since, it is not lost."""

    node: str
    seen: NodeState
    to: NodeState
    reason: str
    reported_at: datetime | None = None


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
    retired, the region has before: a pass that launched meanwhile has launched in place of this one. `unit`: how many
    are launched together, as those of one cell; `count` is a multiple of it. `markets`: in which they may be bought."""

    region: str
    instance_type: str
    count: int
    reason: str
    there: int
    near: tuple[str, ...] = ()
    unit: int = 1
    markets: Markets = ANY


@dataclass(frozen=True, slots=True)
class GrantCells:
    """How many of the cells that a place was set to have it may have from now on; None: all. `asked` and `seen`: what
    was set and granted when this was decided. `taker`: the deployment that gets what this one gives up."""

    deployment: str
    region: str
    asked: int
    seen: int | None
    granted: int | None
    rule: GrantRule
    reason: str
    taker: str = ""


@dataclass(frozen=True, slots=True)
class CreateCell:
    """Record that a deployment has one more cell; it gets nodes by `StartCell`. `version`: the one that it is meant
    for; empty: the deployment's own."""

    deployment: str
    region: str
    instance_type: str
    reason: str
    version: str = ""
    role: CellRole = CellRole.MIXED


@dataclass(frozen=True, slots=True)
class StartCell:
    """Begin a new generation with these nodes, in rank order. Members before that are not named leave. `version`:
    the one that it runs from now on; empty: the one it has. `role`: likewise; None: the one it has."""

    cell: str
    seen: CellState
    generation: int
    nodes: tuple[str, ...]
    reason: str
    version: str = ""
    role: CellRole | None = None


@dataclass(frozen=True, slots=True)
class DrainCell:
    """Take a ready cell down on purpose. Charged to the disruption ledger, which counts again when this is applied.
    `forced`: what it runs on ends in a moment, so the ledger only takes note."""

    cell: str
    generation: int
    cause: DisruptionCause
    reason: str
    rollout: int | None = None
    forced: bool = False


@dataclass(frozen=True, slots=True)
class MoveCell:
    """Change a cell's state within its generation. `failed_by`: the node whose report says that it failed."""

    cell: str
    seen: CellState
    generation: int
    to: CellState
    reason: str
    failed_by: str = ""


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
    | GrantCells
    | CreateCell
    | StartCell
    | DrainCell
    | MoveCell
    | StopCell
    | ExplainCell
    | ChangeRollout
    | CordonNode
    | UncordonNode
    | ReplaceNode
    | RequestReplacement
    | CloseReplacement
    | OpenIncident
    | NoteIncident
    | CloseIncident
)
