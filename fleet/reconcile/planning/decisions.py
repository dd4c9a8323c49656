"""The planners' decisions. Each gives its reason and what it saw, so that the services can reject a stale one."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from engine_agent.protocol.states import CellRole
from fleet.capacity.planning.pools import ANY, Markets
from fleet.deployments.planner import GrantRule
from fleet.faults.planning.views import IncidentKind, Rule, Rung
from fleet.load.planner import CellCounters
from fleet.reconcile.planning.snapshot import FailedStart, Verdict
from fleet.reconcile.planning.states import CellState, DisruptionCause, NodeState, RolloutState


@dataclass(frozen=True, slots=True)
class CordonNode:
    """Excludes a node from new placements. Its cell keeps running. `for_notice`: until its provider withdraws the
    notice."""

    node: str
    reason: str
    for_notice: bool = False


@dataclass(frozen=True, slots=True)
class UncordonNode:
    """The reason for the cordon is gone."""

    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class RequestReplacement:
    """Schedules the replacement of a node whose cell still serves. The cell is drained first, even if the fault cannot
    be seen meanwhile."""

    node: str
    cell: str
    rule: Rule
    reason: str


@dataclass(frozen=True, slots=True)
class ReplaceNode:
    """Takes a faulty node out of use now. Its cell is lost and gets another node. `since`: start of the observed state;
    a node that left it and came back is left alone."""

    node: str
    seen: NodeState
    since: datetime
    cell: str
    rule: Rule
    reason: str


@dataclass(frozen=True, slots=True)
class CloseReplacement:
    """The replacement is done or no longer needed."""

    replacement: int
    reason: str


@dataclass(frozen=True, slots=True)
class TryRepair:
    """Tries a rung of the ladder on a node that is out of use: resets its devices, or reboots its machine. `devices`:
    those that the evidence names; empty: all of the node."""

    node: str
    rung: Rung
    reason: str
    devices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CheckRepair:
    """The machine is back after its reboot: orders the deep checks of this attempt."""

    repair: int
    node: str


@dataclass(frozen=True, slots=True)
class EndRepair:
    """An attempt has ended. If it cured the fault, the node returns to service, with the `others` that have the same
    broken machine or device. `ladder`: the rungs before it, for the incident."""

    repair: int
    node: str
    rung: Rung
    cured: bool
    result: str
    ladder: tuple[Mapping[str, Any], ...] = ()
    others: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class OpenIncident:
    """A new fault. `shadow`: its rule only reports what it would have done. `cohort`: the group of similar machines
    that it is compared with."""

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
    """The fault of an open incident is still present, with its current evidence."""

    incident: int
    summary: str
    evidence: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CloseIncident:
    """The fault is gone. `seen_at`: when it was last seen; if it was seen again, the incident stays open."""

    incident: int
    seen_at: datetime
    reason: str


@dataclass(frozen=True, slots=True)
class MoveNode:
    """Changes a node's state. `reported_at`: its agent's last report; a node that has reported since is not lost."""

    node: str
    seen: NodeState
    to: NodeState
    reason: str
    reported_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class RestartAgent:
    """Starts a dead agent on a running machine. It adopts the engine."""

    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class RetireNode:
    """Returns a machine that is lost and in no cell, or surplus."""

    node: str
    seen: NodeState
    reason: str


@dataclass(frozen=True, slots=True)
class LaunchNodes:
    """Orders machines from the provider, below the network nodes `near` if it can choose. `there`: nodes of the pool
    that were not retired; if their number has changed, the decision is stale. `unit`: machines launched together, such
    as those of one cell; `count` is a multiple of it. `markets`: where they may be bought."""

    region: str
    instance_type: str
    count: int
    reason: str
    there: int
    near: tuple[str, ...] = ()
    unit: int = 1
    markets: Markets = ANY


@dataclass(frozen=True, slots=True)
class ChangeLayout:
    """Divides a machine whose nodes are all spare into other nodes, of these `types`, in order. It is charged to the
    disruption ledger, which counts again. `seen` and `nodes`: its layout and its nodes at the decision."""

    machine: str
    seen: str
    nodes: tuple[str, ...]
    layout: str
    types: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class GrantCells:
    """Limits the cells of a place, or with None lifts the limit. `asked` and `seen`: target and grant at the decision.
    `taker`: the deployment that gets the machines."""

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
    """Creates a cell, which gets nodes by `StartCell`. `version`: the one it is created for; empty: the deployment's
    own."""

    deployment: str
    region: str
    instance_type: str
    reason: str
    version: str = ""
    role: CellRole = CellRole.MIXED


@dataclass(frozen=True, slots=True)
class StartCell:
    """Starts a new generation on these nodes, in rank order. Other members leave the cell. `version` and `role`: new
    ones; empty or None: unchanged."""

    cell: str
    seen: CellState
    generation: int
    nodes: tuple[str, ...]
    reason: str
    version: str = ""
    role: CellRole | None = None


@dataclass(frozen=True, slots=True)
class DrainCell:
    """Drains a ready cell on purpose. It is charged to the disruption ledger, which counts again. `forced`: its machine
    ends soon, so the ledger only records it."""

    cell: str
    generation: int
    cause: DisruptionCause
    reason: str
    rollout: int | None = None
    forced: bool = False


@dataclass(frozen=True, slots=True)
class MoveCell:
    """Changes a cell's state within its generation. `failed_by`: the node whose report made it fail."""

    cell: str
    seen: CellState
    generation: int
    to: CellState
    reason: str
    failed_by: str = ""


@dataclass(frozen=True, slots=True)
class StopCell:
    """Stops the cell. Its nodes become spares."""

    cell: str
    seen: CellState
    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class ExplainCell:
    """Records a new reason for a cell's state and changes nothing else."""

    cell: str
    seen: CellState
    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class ChangeRollout:
    """The next state of a rollout. `failed`: new failures of updated cells. `counters`: the cells' counters when its
    bake began. `verdict`: the gate's finding."""

    rollout: int
    seen: RolloutState
    revision: int
    to: RolloutState
    stage: int
    reason: str
    failed: tuple[FailedStart, ...] = ()
    counters: Mapping[str, CellCounters] | None = None
    verdict: Verdict | None = None


@dataclass(frozen=True, slots=True)
class OrderPrefetch:
    """Versions whose builds and weights a node fetches in advance, instead of those `seen`."""

    node: str
    seen: tuple[str, ...]
    versions: tuple[str, ...]
    reason: str


Decision = (
    MoveNode
    | RestartAgent
    | RetireNode
    | LaunchNodes
    | ChangeLayout
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
    | TryRepair
    | CheckRepair
    | EndRepair
    | OpenIncident
    | NoteIncident
    | CloseIncident
    | OrderPrefetch
)
