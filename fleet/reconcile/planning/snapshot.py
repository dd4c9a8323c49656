"""The fleet as planners see it: frozen plain data, loaded by selectors or made by a simulator. Decides nothing."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from functools import cached_property

from engine_agent.protocol.fingerprint import Fingerprint
from engine_agent.protocol.states import CellRole, EngineState
from fleet.autoscaling.planning.role_split import RoleSplit, split_within
from fleet.capacity.planning.pools import ANY, Markets
from fleet.deployments.planner import UNSTATED, ClaimView, QuotaView, SharingPolicy, UpdatePolicy
from fleet.faults.planning.views import FaultsView, NoticeView
from fleet.load.planner import CellCounters
from fleet.machines.planner import ProviderLimits
from fleet.nodes.planner import Listeners, stack_digest
from fleet.reconcile.planning.states import DEAD, CellState, DisruptionCause, NodeState, ProviderAction, RolloutState
from models_registry.benchmarks.planning.workload import ComparedGoodput

WITHOUT_MACHINES = frozenset({CellState.PENDING, CellState.FAILED, CellState.LOST})
"""Cells in these may wait for machines."""
RETURNING = frozenset({DisruptionCause.ROLLOUT, DisruptionCause.REPAIR, DisruptionCause.ROLE})


class ProviderStatus(StrEnum):
    """What the provider reports of a machine. `unknown`: nothing yet. `agent_dead`: the machine runs, its agent does
    not. `silent`: the provider hears nothing of it; it is off, or cut off."""

    UNKNOWN = "unknown"
    RUNNING = "running"
    AGENT_DEAD = "agent_dead"
    SILENT = "silent"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class ReportView:
    """The last report of a node's agent. `listener`: the web process that received it."""

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
    listener: str = ""

    def is_about(self, cell: "CellView") -> bool:
        """A report counts only if it speaks of this cell at this generation (I5)."""
        return self.cell == cell.id and self.generation == cell.generation


@dataclass(frozen=True, slots=True)
class NodeView:
    """One machine. `topology`: its network nodes, widest first; empty: unknown. `fingerprint`: digest of what the
    machine's software is; empty: not reported yet. `software`: its fields, those of engines as `<engine>.<field>`.
    `ordered`: what its provider was told to do and has not done yet; `unit`: of a launch, which others it is one with;
    empty: none. `cordoned_for_notice`: until what its provider announced is called off. `markets`: in which of them it
    is or will be bought; one once it is there. `price_per_hour`: what its provider asks for it in US dollars; None:
    unknown."""

    id: str
    region: str
    instance_type: str
    state: NodeState
    created_at: datetime
    state_since: datetime
    report: ReportView
    cordoned: bool = False
    cordoned_for_notice: bool = False
    topology: tuple[str, ...] = ()
    spare_since: datetime | None = None
    provider: ProviderStatus = ProviderStatus.UNKNOWN
    ordered: ProviderAction | None = None
    unit: str = ""
    markets: Markets = ANY
    price_per_hour: float | None = None
    fingerprint: str = ""
    software: Fingerprint = field(default_factory=dict)

    def stack(self, engine: str) -> str:
        """Digest of what counts for cells of this engine: nodes of one cell must have the same (I2), whatever else is
        installed beside it. Empty: not reported yet."""
        return stack_digest(self.software, engine)


@dataclass(frozen=True, slots=True)
class MemberView:
    node: str
    rank: int


@dataclass(frozen=True, slots=True)
class CellView:
    """`instance_type`: of all its machines. `version` and `role`: of its current generation, or that it is meant for
    before its first. `disruption`: why it
    was taken down on purpose, until it is ready again or stopped. `counters`: what its leader last reported of this
    generation; None: nothing yet. `failed_by`: of a failed one, the node whose report said so; empty: none did."""

    id: str
    deployment: str
    region: str
    instance_type: str
    state: CellState
    generation: int
    created_at: datetime
    state_since: datetime
    members: tuple[MemberView, ...] = ()
    restarts: int = 0
    unrouted_at: datetime | None = None
    reason: str = ""
    failed_by: str = ""
    version: str = ""
    role: CellRole = CellRole.MIXED
    disruption: DisruptionCause | None = None
    counters: CellCounters | None = None

    @property
    def returns(self) -> bool:
        """Whether it drains in order to start again, rather than to end."""
        return self.state is CellState.DRAINING and self.disruption in RETURNING

    @property
    def is_leaving(self) -> bool:
        """Whether it ends; something else makes up for it if it is still wanted."""
        return self.state is CellState.STOPPED or (self.state is CellState.DRAINING and not self.returns)


@dataclass(frozen=True, slots=True)
class VersionView:
    """What planners need to know of a model version on machines of a type. `concurrency`: requests at once that a cell
    was tested for. `within`: how many network nodes,
    counted from the widest, all nodes of a cell must share; 0: any. `hands_over`: whether its cells can be told apart
    by role."""

    nodes_per_cell: int
    ready_timeout_s: float = 300.0
    engine: str = ""
    within: int = 0
    hands_over: bool = False
    concurrency: int = 1


@dataclass(frozen=True, slots=True)
class DeploymentView:
    """`cells_wanted` maps region -> number of cells that there should be: what was set, or what `claims` says is
    granted of it while machines are short. `version` is the one that it should serve and that new cells take; size,
    times, engine and tightness of the `others` that some cell runs, or a rollout leads to, may differ from its own.
    All that is said of versions is said on `instance_type`, the preferred one; `further` maps the other types that its
    cells may be on, in order, to what its versions are there.
    `markets`: in which its machines may be bought. `team`: whose quota it counts against. `problem`: what is stored of
    it and makes no sense; then it is explained and left as it is."""

    name: str
    instance_type: str
    nodes_per_cell: int
    cells_wanted: Mapping[str, int]
    ready_timeout_s: float = 300.0
    drain_deadline_s: float = 60.0
    engine: str = ""
    within: int = 0
    hands_over: bool = False
    concurrency: int = 1
    version: str = ""
    others: Mapping[str, VersionView] = field(default_factory=dict)
    further: Mapping[str, Mapping[str, VersionView]] = field(default_factory=dict)
    policy: UpdatePolicy = field(default_factory=UpdatePolicy)
    markets: Markets = ANY
    team: str = ""
    sharing: SharingPolicy = UNSTATED
    claims: Mapping[str, ClaimView] = field(default_factory=dict)
    problem: str = ""

    def claim(self, region: str) -> ClaimView:
        """What it was set to have there."""
        return self.claims.get(region) or ClaimView(self.cells_wanted.get(region, 0))

    def split(self, region: str) -> RoleSplit:
        """How many of the cells that there should be have which role: all are mixed where its version hands nothing
        over."""
        claim = self.claim(region) if self.of(self.version).hands_over else ClaimView(0)
        return split_within(self.cells_wanted.get(region, 0), claim.prefill, claim.decode)

    def claiming(self, region: str, claim: ClaimView) -> "DeploymentView":
        return replace(
            self,
            claims={**self.claims, region: claim},
            cells_wanted={**self.cells_wanted, region: claim.in_force},
        )

    def scaled(self, region: str, cells: int) -> "DeploymentView":
        return self.claiming(region, replace(self.claim(region), asked=cells))

    @property
    def instance_types(self) -> tuple[str, ...]:
        """That its cells may be on, the preferred first."""
        return self.instance_type, *self.further

    def of(self, version: str, instance_type: str = "") -> VersionView:
        """A version's size and times on a type, the preferred one unless stated; of the deployment's own version
        unless known otherwise. A type that is no longer listed is taken for the preferred one."""
        if versions := self.further.get(instance_type):
            return versions.get(version) or versions[self.version]
        own = VersionView(
            self.nodes_per_cell, self.ready_timeout_s, self.engine, self.within, self.hands_over, self.concurrency
        )
        return self.others.get(version) or own

    def within_on(self, instance_type: str) -> int:
        """How many network nodes the nodes of any of its cells on a type must share; 1, the zone, at least."""
        versions = self.further.get(instance_type) or {**self.others, "": self.of("")}
        return max(1, *(version.within for version in versions.values()))

    def of_cell(self, cell: CellView) -> VersionView:
        """What a cell runs, on its machines."""
        return self.of(cell.version, cell.instance_type)


@dataclass(frozen=True, slots=True)
class FailedStart:
    """A generation of an updated cell that failed, and not because a node was lost."""

    cell: str
    generation: int
    reason: str


class Finding(StrEnum):
    PASSED = "passed"
    WORSE = "worse"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a gate found, and the numbers that it compared, by name, so that they can be checked."""

    finding: Finding
    reason: str
    numbers: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RolloutView:
    """An active rollout. `stage` counts the stages of `fleet.rollouts.planning.waves`; `state_since` is when this state
    of this stage began; `revision` grows with every change. `counters`: what cells had counted when the bake began."""

    id: int
    deployment: str
    from_version: str
    to_version: str
    state: RolloutState
    stage: int
    region_order: tuple[str, ...]
    policy: UpdatePolicy
    revision: int
    state_since: datetime
    reason: str = ""
    failed: tuple[FailedStart, ...] = ()
    counters: Mapping[str, CellCounters] = field(default_factory=dict)
    goodput: tuple[ComparedGoodput, ...] = ()
    """Of both versions, where its policy asks."""


@dataclass(frozen=True, slots=True)
class PlannedPlaceCells:
    """What the plan of the day has for a deployment in a region where the autoscaler acts: cells on one type, the
    preferred one unless stated, slot by slot from `at` on. `start_up_s`: from a decision until a cell is ready."""

    deployment: str
    region: str
    at: datetime
    slot_s: int
    cells: tuple[int, ...]
    start_up_s: float
    instance_type: str = ""


@dataclass(frozen=True, slots=True)
class RegionView:
    """`spares` maps instance type -> idle nodes to keep warm; `repair_only`: how many of these new cells must leave.
    `prices`: instance type -> US dollars an hour for a machine, of the types that somebody has to choose between.

    `free`: of a region whose machines are a pool of its own, instance type -> free machines; None: machines are bought.
    `limits`: its provider's.
    """

    name: str
    spares: Mapping[str, int] = field(default_factory=dict)
    repair_only: Mapping[str, int] = field(default_factory=dict)
    free: Mapping[str, int] | None = None
    prices: Mapping[str, float] = field(default_factory=dict)
    limits: ProviderLimits = field(default_factory=ProviderLimits)


def policy_in_force(deployment: DeploymentView, active: RolloutView | None) -> UpdatePolicy:
    """What may be done to a deployment: the policy its active rollout began with, else its own."""
    return active.policy if active else deployment.policy


@dataclass(frozen=True)
class FleetView:
    """Everything a pass looks at. `listening_since`: since when agents can reach us without a gap; None: not now.
    `rollouts`: the active one of each deployment that has one. `notices`: of machines that are there, in any order,
    and as often as they were heard. `quotas`: of teams. `planned`: cells by the plan of the day, if any. `listeners`:
    the web processes that agents connect to."""

    regions: Mapping[str, RegionView]
    nodes: Mapping[str, NodeView]
    cells: Mapping[str, CellView]
    deployments: Mapping[str, DeploymentView]
    listening_since: datetime | None
    rollouts: Mapping[str, RolloutView] = field(default_factory=dict)
    faults: FaultsView = field(default_factory=FaultsView)
    notices: tuple[NoticeView, ...] = ()
    quotas: tuple[QuotaView, ...] = ()
    planned: tuple[PlannedPlaceCells, ...] = ()
    listeners: Listeners = field(default_factory=Listeners)

    def policy_of(self, deployment: str) -> UpdatePolicy:
        """What may be done to a deployment now: its rollout's copy while one is active, else its own."""
        return policy_in_force(self.deployments[deployment], self.rollouts.get(deployment))

    def listening_for_s(self, since: datetime, now: datetime) -> float:
        """Seconds since `since` in which agents could connect; 0 while they cannot. Such a gap is no delay."""
        if self.listening_since is None:
            return 0.0
        return (now - max(since, self.listening_since)).total_seconds()

    def silence_s(self, node: NodeView, now: datetime) -> float:
        """Seconds without a report while agents could connect to a web process that kept up with its agents: the
        control plane's own trouble is not the node's silence."""
        last, reported_at, since = node.created_at, node.report.last_seen_at, self.listening_since
        if reported_at is not None and reported_at > last:
            last = reported_at
        if since is not None and since > last:
            last = since
        if self.listeners.by_id:
            report = node.report
            last = self.listeners.counts_from(last, report.listener, connected=report.connected, now=now)
        return (now - last).total_seconds()

    def unheard_s(self, node: NodeView, now: datetime) -> float:
        """Seconds since its last report, whoever is to blame for them: witnesses must have been heard."""
        return (now - (node.report.last_seen_at or node.created_at)).total_seconds()

    def cell_of(self, node: str) -> CellView | None:
        """The cell that a node is a member of."""
        return self._cell_by_member.get(node)

    def machines_lacking(self, cell: CellView) -> int:
        """How many machines a cell must get before it can start; 0 of one that starts or runs."""
        if cell.state not in WITHOUT_MACHINES:
            return 0
        alive = sum(self.nodes[member.node].state not in DEAD for member in cell.members)
        return max(0, self.deployments[cell.deployment].of_cell(cell).nodes_per_cell - alive)

    @cached_property
    def _cell_by_member(self) -> dict[str, CellView]:
        return {member.node: cell for cell in self.cells.values() for member in cell.members}
