"""The fleet as planners see it: frozen plain data, loaded by selectors or made by a simulator. Decides nothing."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from engine_agent.protocol.fingerprint import Fingerprint
from engine_agent.protocol.states import EngineState
from fleet.planning.fingerprints import stack_digest
from fleet.planning.states import CellState, NodeState


class ProviderStatus(StrEnum):
    """What the provider says of a machine. `agent_dead`: the machine runs, its agent does not."""

    UNKNOWN = "unknown"
    RUNNING = "running"
    AGENT_DEAD = "agent_dead"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class ReportView:
    """The last thing that a node's agent said."""

    connected: bool
    last_seen_at: datetime | None
    connection_changed_at: datetime | None = None
    state: EngineState = EngineState.IDLE
    cell: str = ""
    generation: int = 0
    reason: str = ""
    unhealthy_since: datetime | None = None
    health_reason: str = ""
    in_flight: int = 0

    def speaks_of(self, cell: "CellView") -> bool:
        """A report counts only if it speaks of this cell at this generation (I5)."""
        return self.cell == cell.id and self.generation == cell.generation


@dataclass(frozen=True, slots=True)
class NodeView:
    """One machine. `topology`: its network nodes, widest first; empty: unknown. `fingerprint`: digest of what the
    machine's software is; empty: not said yet. `software`: its fields, those of engines as `<engine>.<field>`."""

    id: str
    region: str
    instance_type: str
    state: NodeState
    created_at: datetime
    state_since: datetime
    report: ReportView
    cordoned: bool = False
    topology: tuple[str, ...] = ()
    spare_since: datetime | None = None
    provider: ProviderStatus = ProviderStatus.UNKNOWN
    fingerprint: str = ""
    software: Fingerprint = field(default_factory=dict)

    def stack(self, engine: str) -> str:
        """Digest of what counts for cells of this engine: nodes of one cell must have the same (I2), whatever else is
        installed beside it. Empty: not said yet."""
        return stack_digest(self.software, engine)


@dataclass(frozen=True, slots=True)
class MemberView:
    node: str
    rank: int


@dataclass(frozen=True, slots=True)
class CellView:
    id: str
    deployment: str
    region: str
    state: CellState
    generation: int
    created_at: datetime
    state_since: datetime
    members: tuple[MemberView, ...] = ()
    restarts: int = 0
    unrouted_at: datetime | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class DeploymentView:
    """`cells_wanted` maps region -> number of cells. `within`: how many network nodes, counted from the widest, all
    nodes of a cell must share; 0: any."""

    name: str
    instance_type: str
    nodes_per_cell: int
    cells_wanted: Mapping[str, int]
    ready_timeout_s: float = 300.0
    drain_deadline_s: float = 60.0
    engine: str = ""
    within: int = 0


@dataclass(frozen=True, slots=True)
class RegionView:
    """`spares` maps instance type -> idle nodes to keep warm."""

    name: str
    spares: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FleetView:
    """Everything a pass looks at. `listening_since`: since when agents can reach us without a gap; None: not now."""

    regions: Mapping[str, RegionView]
    nodes: Mapping[str, NodeView]
    cells: Mapping[str, CellView]
    deployments: Mapping[str, DeploymentView]
    listening_since: datetime | None

    def heard_for_s(self, since: datetime, now: datetime) -> float:
        """Seconds since `since` in which agents could reach us; 0 while they cannot: our gap is nobody's delay."""
        if self.listening_since is None:
            return 0.0
        return (now - max(since, self.listening_since)).total_seconds()

    def cell_of(self, node: str) -> CellView | None:
        """The cell that a node is a member of."""
        return next((cell for cell in self.cells.values() if any(m.node == node for m in cell.members)), None)
