"""The fleet as planners see it: frozen plain data, loaded by selectors or made by the simulator. Decides nothing."""

from collections import defaultdict
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
from fleet.nodes.planner import QUIET_AFTER, Listeners, machine_of, stack_digest
from fleet.reconcile.planning.states import DEAD, CellState, DisruptionCause, NodeState, ProviderAction, RolloutState
from models_registry.benchmarks.planning.workload import ComparedGoodput

WITHOUT_MACHINES = frozenset({CellState.PENDING, CellState.FAILED, CellState.LOST})
"""Cells in these states may wait for machines."""
RETURNING = frozenset({DisruptionCause.ROLLOUT, DisruptionCause.REPAIR, DisruptionCause.ROLE})


class ProviderStatus(StrEnum):
    """The provider's status of a machine. `unknown`: none yet; `agent_dead`: the machine runs without its agent;
    `silent`: the provider does not hear it, because it is off or cut off."""

    UNKNOWN = "unknown"
    RUNNING = "running"
    AGENT_DEAD = "agent_dead"
    SILENT = "silent"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class Holdings:
    """Builds and weights of a node. `digests`: complete ones; `troubles`: by digest, why others are missing."""

    digests: frozenset[str] = frozenset()
    troubles: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ReportView:
    """The latest stored report of a node's agent. `listener`: the web process that received it. `quiet`: the agent has
    sent nothing since. `holdings` None: its agent fetches nothing in advance."""

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
    quiet: bool = False
    holdings: Holdings | None = None

    def is_about(self, cell: "CellView") -> bool:
        """Whether the report is about this cell at this generation (I5)."""
        return self.cell == cell.id and self.generation == cell.generation


@dataclass(frozen=True, slots=True)
class NodeView:
    """A machine. `topology`: network nodes, widest first, or empty; `fingerprint`: digest of its software, or "" before
    its report; `software`: its fields, those of engines as `<engine>.<field>`; `ordered`: a pending order to its
    provider, with `unit`, the ID of machines launched together; `cordoned_for_notice`: cordoned until its provider
    withdraws the notice; `markets`: where it may be bought, or was; `price_per_hour`: US dollars, or None if unknown;
    `devices`: accelerators that its agent found; `shared_device`: the device of its machine that it shares with other
    nodes, or ""; `prefetch`: versions that it is ordered to fetch in advance."""

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
    devices: int = 0
    shared_device: str = ""
    prefetch: tuple[str, ...] = ()

    @property
    def machine(self) -> str:
        """The machine that it shares with other nodes, which then is its lowest network node; else its own ID."""
        return machine_of(self.id, self.topology)

    def stack(self, engine: str) -> str:
        """Digest of the software relevant for cells of this engine, which must be equal in a cell (I2), or "" before
        its report."""
        return stack_digest(self.software, engine)


@dataclass(frozen=True, slots=True)
class MemberView:
    node: str
    rank: int


@dataclass(frozen=True, slots=True)
class CellView:
    """`instance_type`: of all its machines. `version` and `role`: of its generation, or planned before the first.
    `disruption`: why it was drained on purpose, until it is ready or stopped. `counters`: from its leader's latest
    report of this generation, if any. `failed_by`: the node whose report made it fail, or ""."""

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
        """Whether it is drained in order to start again."""
        return self.state is CellState.DRAINING and self.disruption in RETURNING

    @property
    def is_leaving(self) -> bool:
        """Whether it is stopping for good. Another cell replaces it if the target requires one."""
        return self.state is CellState.STOPPED or (self.state is CellState.DRAINING and not self.returns)


@dataclass(frozen=True, slots=True)
class VersionView:
    """A model version on an instance type. `concurrency`: tested concurrent requests per cell; `within`: number of
    network nodes, from the widest, that all nodes of a cell must share (0: any); `hands_over`: whether it supports
    separate prefill and decode cells; `needs`: digests of its build and of its weights, which nodes fetch."""

    nodes_per_cell: int
    ready_timeout_s: float = 300.0
    engine: str = ""
    within: int = 0
    hands_over: bool = False
    concurrency: int = 1
    needs: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class DeploymentView:
    """`cells_wanted`: region -> target cells, or those granted by `claims` while machines are scarce. `version`: the
    one to serve, and of new cells; `others`: versions of other cells and of a rollout. All of these are on
    `instance_type`, the preferred one; `further`: other listed types, in order -> versions there. `markets`: where its
    machines may be bought; `team`: whose quota they count against. `problem`: why its stored data are invalid; then it
    is explained and left unchanged."""

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
    needs: frozenset[str] = frozenset()
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
        return self.claims.get(region) or ClaimView(self.cells_wanted.get(region, 0))

    def split(self, region: str) -> RoleSplit:
        """Roles of the target cells. All are mixed if its version does not support separate roles."""
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
        return self.instance_type, *self.further

    def of(self, version: str, instance_type: str = "") -> VersionView:
        """A version's data on a type, by default the preferred one; the deployment's own version's if unknown. A type
        that is no longer listed counts as the preferred one."""
        if versions := self.further.get(instance_type):
            return versions.get(version) or versions[self.version]
        own = VersionView(
            self.nodes_per_cell, self.ready_timeout_s, self.engine, self.within, self.hands_over, self.concurrency,
            self.needs,
        )  # fmt: skip
        return self.others.get(version) or own

    def within_on(self, instance_type: str) -> int:
        """Number of network nodes that the nodes of its cells on a type must share, at least 1, the zone."""
        versions = self.further.get(instance_type) or {**self.others, "": self.of("")}
        return max(1, *(version.within for version in versions.values()))

    def of_cell(self, cell: CellView) -> VersionView:
        """The version that a cell runs, on its machines."""
        return self.of(cell.version, cell.instance_type)


@dataclass(frozen=True, slots=True)
class FailedStart:
    """A failed generation of an updated cell; losses of nodes do not count."""

    cell: str
    generation: int
    reason: str


class Finding(StrEnum):
    PASSED = "passed"
    WORSE = "worse"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True, slots=True)
class Verdict:
    """A gate's finding, with the compared numbers by name."""

    finding: Finding
    reason: str
    numbers: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RolloutView:
    """An active rollout. `stage`: index into the stages of `fleet.rollouts.planning.waves`; `state_since`: start of
    this state of this stage; `revision` grows with every change; `counters`: the cells' counters when the bake began.
    """

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
    """Of both versions, if its policy needs it."""


@dataclass(frozen=True, slots=True)
class PlannedPlaceCells:
    """Cells of a deployment in the day plan for a region where the autoscaler acts, per slot from `at`, on one type, by
    default the preferred one. `start_up_s`: from a decision until a cell is ready."""

    deployment: str
    region: str
    at: datetime
    slot_s: int
    cells: tuple[int, ...]
    start_up_s: float
    instance_type: str = ""


@dataclass(frozen=True, slots=True)
class RegionView:
    """`spares`: instance type -> idle nodes to keep; `repair_only`: how many of these are reserved for repairs.
    `prices`: instance type -> US dollars per hour, where a deployment has a choice. `free`: instance type -> free
    machines, if they form a fixed pool; None: machines are bought. `limits`: its provider's."""

    name: str
    spares: Mapping[str, int] = field(default_factory=dict)
    repair_only: Mapping[str, int] = field(default_factory=dict)
    free: Mapping[str, int] | None = None
    prices: Mapping[str, float] = field(default_factory=dict)
    limits: ProviderLimits = field(default_factory=ProviderLimits)


@dataclass(frozen=True, slots=True)
class MachineView:
    """A joined host whose layout the planner may change, or whose layout changes. `devices`: those that a layout
    divides; `are_shares`: they are shares of its CPUs, all of which a layout must use; `sizes`: instance type ->
    devices of a node of it; `nodes`: those on it, including ended ones that are not wiped; `types`: of the nodes of its
    layout; `free_places`: places for further nodes; `layout_since`: when it got its layout; `coming`: types of its next
    nodes while its layout changes, else None."""

    id: str
    region: str
    layout: str
    devices: int
    are_shares: bool
    sizes: Mapping[str, int]
    nodes: tuple[str, ...]
    types: frozenset[str]
    free_places: int
    layout_since: datetime
    coming: tuple[str, ...] | None = None


def policy_in_force(deployment: DeploymentView, active: RolloutView | None) -> UpdatePolicy:
    return active.policy if active else deployment.policy


@dataclass(frozen=True)
class FleetView:
    """Everything that a pass reads. `listening_since`: since when agents can connect without a gap, or None if not now.
    `rollouts`: active ones by deployment. `notices`: of existing machines, in any order, possibly repeated. `planned`:
    cells of the day plan, if any. `listeners`: web processes that agents connect to. `machines`: those that may get
    another layout, loaded while a cell waits for nodes; `layouts_changing`: region -> machines that the ledger counts.
    """

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
    machines: tuple[MachineView, ...] = ()
    layouts_changing: Mapping[str, int] = field(default_factory=dict)

    def policy_of(self, deployment: str) -> UpdatePolicy:
        """The active rollout's copy of the update policy, or the deployment's own."""
        return policy_in_force(self.deployments[deployment], self.rollouts.get(deployment))

    def listening_for_s(self, since: datetime, now: datetime) -> float:
        """Seconds since `since` in which agents could connect; 0 while they cannot."""
        if self.listening_since is None:
            return 0.0
        return (now - max(since, self.listening_since)).total_seconds()

    def silence_s(self, node: NodeView, now: datetime) -> float:
        """Seconds without a report while agents could connect to a web process that kept up. Trouble of the control
        plane does not count."""
        last, reported_at, since = node.created_at, self.heard_at(node, now), self.listening_since
        if reported_at is not None and reported_at > last:
            last = reported_at
        if since is not None and since > last:
            last = since
        if self.listeners.by_id:
            report = node.report
            last = self.listeners.counts_from(last, report.listener, connected=report.connected, now=now)
        return (now - last).total_seconds()

    def heard_at(self, node: NodeView, now: datetime) -> datetime | None:
        """When the node last reported or sent a heartbeat. Returns None if it never reported."""
        report = node.report
        if not self.listeners.by_id:
            return report.last_seen_at
        return self.listeners.heard_at(
            report.last_seen_at, report.listener, connected=report.connected, quiet=report.quiet, now=now
        )

    def holds_until(self, node: NodeView, now: datetime) -> datetime | None:
        """Until when its report certainly holds: the node may be silent for `QUIET_AFTER` before that is noted."""
        reported_at, heard_at = node.report.last_seen_at, self.heard_at(node, now)
        if reported_at is None or heard_at is None:
            return None
        return max(reported_at, heard_at - QUIET_AFTER)

    def unheard_s(self, node: NodeView, now: datetime) -> float:
        """Seconds since it was last heard, for whatever reason. For witnesses, which must be heard."""
        return (now - (self.heard_at(node, now) or node.created_at)).total_seconds()

    def lacking_nodes(self, cell: CellView, version: str) -> tuple[NodeView, ...]:
        """Nodes of a cell that still fetch what this version needs. Those whose agents fetch nothing in advance do not
        count."""
        needs = self.deployments[cell.deployment].of(version, cell.instance_type).needs
        if not needs:
            return ()
        nodes = (self.nodes[member.node] for member in cell.members)
        return tuple(node for node in nodes if (held := node.report.holdings) and not needs <= held.digests)

    def cell_of(self, node: str) -> CellView | None:
        return self._cell_by_member.get(node)

    def nodes_of(self, machine: str) -> tuple[NodeView, ...]:
        """All nodes of a machine, by ID."""
        return self._nodes_by_machine.get(machine, ())

    def machines_lacking(self, cell: CellView) -> int:
        """Machines that a cell needs before it can start; 0 if it starts or runs."""
        if cell.state not in WITHOUT_MACHINES:
            return 0
        alive = sum(self.nodes[member.node].state not in DEAD for member in cell.members)
        return max(0, self.deployments[cell.deployment].of_cell(cell).nodes_per_cell - alive)

    @cached_property
    def _nodes_by_machine(self) -> dict[str, tuple[NodeView, ...]]:
        found: dict[str, list[NodeView]] = defaultdict(list)
        for name in sorted(self.nodes):
            found[self.nodes[name].machine].append(self.nodes[name])
        return {machine: tuple(nodes) for machine, nodes in found.items()}

    @cached_property
    def _cell_by_member(self) -> dict[str, CellView]:
        return {member.node: cell for cell in self.cells.values() for member in cell.members}
