"""Decides which nodes are alive, from the reports of their agents, their provider and other witnesses, and how much may
be replaced together. It never condemns a node for silence alone: a second witness must agree. It takes no action while
every agent is silent, because then the control plane is cut off. The guards allow one node of a cell, few nodes of a
pool, and none while so many are unhealthy that a false alarm is more likely. The guards count machines: all nodes of a
machine may fail and be replaced together."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from math import ceil

from engine_agent.protocol.machine_messages import is_machine_id
from engine_agent.protocol.signatures import is_hard
from engine_agent.protocol.states import EngineState
from fleet.clouds.planning.call_budget import TOPOLOGY_PAGE
from fleet.faults.planning.announced import Notices
from fleet.faults.planning.views import NEEDS_OPERATOR, Rule, RuleMode
from fleet.machines.planner import ProviderLimits
from fleet.placement.planning.distance import failure_domain
from fleet.reconcile.planning.decisions import Decision, MoveNode, RestartAgent
from fleet.reconcile.planning.settings import FaultSettings, FleetSettings
from fleet.reconcile.planning.snapshot import FleetView, NodeView, ProviderStatus, ReportView
from fleet.reconcile.planning.states import CellState, NodeState, NoticeKind, ProviderAction
from kernel.ages import age_text

COUNTED = frozenset({NodeState.READY, NodeState.SUSPECT, NodeState.FAULTY, NodeState.LOST})
CONDEMNED = frozenset({NodeState.FAULTY, NodeState.LOST})


@dataclass(frozen=True, slots=True)
class Freeze:
    """A pool or zone with so many unhealthy machines that none of its nodes is replaced. `unhealthy` and `size` count
    nodes, or machines with several nodes."""

    scope: str
    region: str
    unhealthy: tuple[str, ...]
    size: int

    @property
    def reason(self) -> str:
        noun = "machines" if any(is_machine_id(name) for name in self.unhealthy) else "nodes"
        return f"{len(self.unhealthy)} of {self.size} {noun} of {self.scope} are unhealthy"


@dataclass(frozen=True, slots=True)
class ReplacementBudget:
    """Open replacements in the node's pool, the pool's size, and `peer`, another node of the same cell that is being
    replaced. Replacements because of provider notices do not count."""

    pool: tuple[str, str]
    open: int
    pool_size: int
    cell: str = ""
    peer: str = ""


def over_budget(underway: ReplacementBudget, settings: FaultSettings) -> str:
    """Why one more replacement would be too many, or ""."""
    if underway.peer:
        return f"{underway.peer} of its cell {underway.cell} is being replaced"
    limit = max(1, int(settings.replaced_share * underway.pool_size))
    if underway.open >= limit:
        return f"{underway.open} of {limit} replacements of its pool {_pool_name(*underway.pool)} are under way"
    return ""


class Guards:
    """Guards of one pass. `take` records the pass's own decisions, so that they share one budget."""

    def __init__(self, fleet: FleetView, settings: FleetSettings, now: datetime) -> None:
        self._fleet = fleet
        self._settings: FaultSettings = settings.faults
        self._silent_after_s = settings.suspect_after_s
        self._now = now
        self._taken: dict[tuple[str, str], set[str]] = defaultdict(set)
        self._busy: dict[str, str] = {}
        self._notices = Notices(fleet, settings, now)
        for open_one in fleet.faults.replacements:
            if open_one.rule is not Rule.NOTICE:
                self._taken[open_one.region, open_one.instance_type].add(self._machine_of(open_one.node))
            if open_one.cell:
                self._busy[open_one.cell] = open_one.node

    @cached_property
    def freezes(self) -> tuple[Freeze, ...]:
        """Pools and zones in which no node is replaced, in a stable order."""
        counted = (node for node in self._fleet.nodes.values() if node.state in COUNTED)
        if sum(self._is_unhealthy(node) for node in counted) <= self._settings.frozen_above_nodes:
            return ()
        scopes: dict[tuple[str, str], list[NodeView]] = defaultdict(list)
        for node in self._fleet.nodes.values():
            if node.state in COUNTED:
                for scope in _scopes(node):
                    scopes[scope].append(node)
        freezes = (self._freeze(region, scope, nodes) for (region, scope), nodes in sorted(scopes.items()))
        return tuple(freeze for freeze in freezes if freeze is not None)

    def frozen(self, node: NodeView) -> str:
        """Why no node in this node's pool or zone is replaced, or ""."""
        mine = _scopes(node)
        return next((freeze.reason for freeze in self.freezes if (freeze.region, freeze.scope) in mine), "")

    def refusal(self, node: NodeView) -> str:
        """Why this node may not be replaced now, or ""."""
        if reason := self.frozen(node):
            return f"frozen: {reason}"
        return self.budget_refusal(node)

    def budget_refusal(self, node: NodeView) -> str:
        """Why other replacements exclude this one now, or ""."""
        cell, pool = self._cells.get(node.id, ""), _pool(node)
        busy = self._busy.get(cell, "")
        if busy and self._machine_of(busy) == node.machine:
            return ""
        taken = self._taken[pool] - {node.machine}
        return over_budget(ReplacementBudget(pool, len(taken), self._sizes[pool], cell, busy), self._settings)

    def take(self, node: NodeView) -> None:
        """Counts a replacement decided in this pass."""
        self._taken[_pool(node)].add(node.machine)
        if cell := self._cells.get(node.id):
            self._busy[cell] = node.id

    def _machine_of(self, node: str) -> str:
        view = self._fleet.nodes.get(node)
        return view.machine if view is not None else node

    @cached_property
    def _cells(self) -> Mapping[str, str]:
        return {member.node: cell.id for cell in self._fleet.cells.values() for member in cell.members}

    @cached_property
    def _sizes(self) -> Counter[tuple[str, str]]:
        machines = {(_pool(node), node.machine) for node in self._fleet.nodes.values() if node.state in COUNTED}
        return Counter(pool for pool, _ in machines)

    @cached_property
    def _with_hard_signal(self) -> frozenset[str]:
        return frozenset(
            signal.node for signal in self._fleet.faults.signals if not signal.settled and is_hard(signal.signature)
        )

    def _freeze(self, region: str, scope: str, nodes: list[NodeView]) -> Freeze | None:
        counted = [node for node in nodes if not self._is_handled(node)]
        unhealthy = tuple(sorted({node.machine for node in counted if self._is_unhealthy(node)}))
        size = len({node.machine for node in counted})
        bound = max(self._settings.frozen_above_nodes, self._settings.frozen_above_share * size)
        return Freeze(scope, region, unhealthy, size) if len(unhealthy) > bound else None

    def _is_unhealthy(self, node: NodeView) -> bool:
        return node.state is not NodeState.READY or node.id in self._with_hard_signal

    def _is_handled(self, node: NodeView) -> bool:
        """Condemned nodes outside cells are done or wait for an operator. Nodes that their provider ends say nothing
        about our view of the fleet."""
        if node.state not in CONDEMNED:
            return False
        if self._notices.leaving(node.id) is not None:
            return True
        return node.id not in self._cells or self._fleet.faults.is_held(node.id, NEEDS_OPERATOR)


def _pool(node: NodeView) -> tuple[str, str]:
    return node.region, node.instance_type


def _pool_name(region: str, instance_type: str) -> str:
    return f"{instance_type} in {region}"


def _scopes(node: NodeView) -> tuple[tuple[str, str], ...]:
    """The node's pool and its zone (its failure domain)."""
    pool = (node.region, f"pool {_pool_name(*_pool(node))}")
    zone = failure_domain(node.topology)
    return (pool, (node.region, f"zone {zone} in {node.region}")) if zone else (pool,)


WATCHED = frozenset({NodeState.JOINING, NodeState.READY, NodeState.SUSPECT})
BROKEN = frozenset({CellState.FAILED, CellState.LOST})


def nodes_in_doubt(fleet: FleetView, settings: FleetSettings, now: datetime) -> tuple[str, ...]:
    """Nodes to query at the provider before `plan_liveness`, except those with an action in progress."""
    return tuple(
        node.id
        for node in fleet.nodes.values()
        if node.state in WATCHED
        and node.ordered is None
        and (not node.report.connected or fleet.silence_s(node, now) > settings.doubt_after_s)
    )


def status_in_force(
    status: ProviderStatus, described_at: datetime, report: ReportView, settings: FleetSettings, now: datetime
) -> ProviderStatus:
    """A provider's status if it was queried recently and after the silence began, otherwise `UNKNOWN`."""
    silent_since = report.last_seen_at if report.connected else report.connection_changed_at
    is_about_it = silent_since is None or described_at >= silent_since
    is_recent = (now - described_at).total_seconds() <= settings.described_for_s
    return status if is_about_it and is_recent else ProviderStatus.UNKNOWN


def plan_liveness(fleet: FleetView, settings: FleetSettings, now: datetime) -> tuple[Decision, ...]:
    """Changes of node states. While agents cannot connect or all are silent, only agents are restarted."""
    watched = [node for node in fleet.nodes.values() if node.state in WATCHED]
    guards = Guards(fleet, settings, now)
    if _is_cut_off(watched, fleet, settings, now):
        cases = (_Case(node, fleet, settings, now, guards) for node in watched)
        return tuple(restart for case in cases if (restart := _restart_agent(case)))
    cases = (
        _Case(node, fleet, settings, now, guards) for node in watched if not _is_reporting(node, fleet, settings, now)
    )
    return tuple(decision for case in cases if (decision := _decide(case)) is not None)


def are_all_silent(fleet: FleetView, settings: FleetSettings, now: datetime) -> bool:
    """Whether agents could connect and none does, so that the control plane is cut off."""
    watched = [node for node in fleet.nodes.values() if node.state in WATCHED]
    return fleet.listening_since is not None and _is_cut_off(watched, fleet, settings, now)


def losses_held_back(fleet: FleetView, settings: FleetSettings, now: datetime) -> tuple[tuple[NodeView, str, str], ...]:
    """Silent nodes that a witness condemns but that are kept: node, verdict, and why it is not carried out."""
    guards = Guards(fleet, settings, now)
    cases = [
        _Case(node, fleet, settings, now, guards) for node in fleet.nodes.values() if node.state is NodeState.SUSPECT
    ]
    verdicts = ((case, _loss_verdict(case)) for case in cases)
    return tuple((case.node, verdict, why) for case, verdict in verdicts if verdict and (why := _why_held_back(case)))


def unreachable_nodes(fleet: FleetView, settings: FleetSettings, now: datetime) -> tuple[tuple[NodeView, float], ...]:
    """Suspect nodes without a second witness and their seconds of silence: their agents cannot reach the control plane
    or have no valid credential."""
    suspects = (node for node in fleet.nodes.values() if node.state is NodeState.SUSPECT)
    silences = ((node, fleet.silence_s(node, now)) for node in suspects)
    return tuple((node, silence_s) for node, silence_s in silences if silence_s > settings.unreachable_after_s)


def _is_reporting(node: NodeView, fleet: FleetView, settings: FleetSettings, now: datetime) -> bool:
    """True for nearly all nodes in nearly every pass."""
    is_connected = node.state is NodeState.READY and node.report.connected
    return is_connected and fleet.silence_s(node, now) <= settings.doubt_after_s


@dataclass(frozen=True, slots=True)
class _Case:
    node: NodeView
    fleet: FleetView
    settings: FleetSettings
    now: datetime
    guards: Guards

    @property
    def limits(self) -> ProviderLimits:
        return self.fleet.regions[self.node.region].limits

    @property
    def impaired(self) -> str:
        """The failed provider check of this machine. "" if the checks pass or the whole zone is impaired."""
        notices = Notices(self.fleet, self.settings, self.now)
        mine = notices.by_node.get(self.node.id, ())
        if not mine or notices.zone_of(self.node.id) in notices.troubled_zones:
            return ""
        return next((notice.text for notice in mine if notice.kind is NoticeKind.IMPAIRED), "")

    def move(self, to: NodeState, reason: str) -> MoveNode:
        return MoveNode(self.node.id, self.node.state, to, reason, self.node.report.last_seen_at)


def _is_cut_off(watched: list[NodeView], fleet: FleetView, settings: FleetSettings, now: datetime) -> bool:
    if fleet.listening_since is None:
        return True
    joined = [node for node in watched if node.state is not NodeState.JOINING]
    if any(fleet.silence_s(node, now) <= settings.doubt_after_s for node in joined):
        return False
    return len(joined) > 1 and any(node.provider is not ProviderStatus.GONE for node in joined)


def _decide(case: _Case) -> Decision | None:
    node = case.node
    if node.ordered is ProviderAction.LAUNCH:
        return None
    quiet = case.fleet.silence_s(node, case.now) > case.settings.doubt_after_s
    if not node.report.connected or quiet:
        if node.provider is ProviderStatus.GONE and not _may_still_boot(case):
            return case.move(NodeState.LOST, "its connection closed and its provider says the machine is gone")
        if restart := _restart_agent(case):
            return restart
    return _decide_joining(case) if node.state is NodeState.JOINING else _decide_joined(case)


def _may_still_boot(case: _Case) -> bool:
    age_s = (case.now - case.node.state_since).total_seconds()
    return case.node.state is NodeState.JOINING and age_s < case.limits.launch_grace_s


def _restart_agent(case: _Case) -> RestartAgent | None:
    closed_at = case.node.report.connection_changed_at or case.node.created_at
    waited = (case.now - closed_at).total_seconds() >= case.settings.agent_restart_after_s
    if case.node.provider is not ProviderStatus.AGENT_DEAD or case.node.ordered or not waited:
        return None
    return RestartAgent(case.node.id, "its agent process is dead, the machine runs")


def _decide_joining(case: _Case) -> Decision | None:
    if case.node.report.connected:
        return None if _awaits_its_place(case) else case.move(NodeState.READY, "its agent joined")
    if case.fleet.listening_for_s(case.node.state_since, case.now) > case.limits.join_timeout_s:
        return case.move(NodeState.LOST, f"it did not join within {case.limits.join_timeout_s:.0f} s")
    return None


def _awaits_its_place(case: _Case) -> bool:
    """Whether it waits for its network nodes, because cells of its type must be near each other. Limited to the time of
    querying all nodes that join with it."""
    batch_s, since = case.limits.places_s, case.node.report.connection_changed_at
    kind = (case.node.region, case.node.instance_type)
    if (
        not batch_s
        or since is None
        or len(case.node.topology) >= _network_nodes_needed(case.fleet, case.node.instance_type)
    ):
        return False
    joining = sum(
        node.state is NodeState.JOINING and (node.region, node.instance_type) == kind
        for node in case.fleet.nodes.values()
    )
    return case.fleet.listening_for_s(since, case.now) <= batch_s * (1 + ceil(joining / TOPOLOGY_PAGE))


def _network_nodes_needed(fleet: FleetView, instance_type: str) -> int:
    """Number of network nodes that must be known for machines of a type. The zone, 1, always is."""
    specs = [spec for spec in fleet.deployments.values() if instance_type in spec.instance_types]
    return max((spec.within_on(instance_type) for spec in specs), default=1)


def _decide_joined(case: _Case) -> Decision | None:
    silence_s = case.fleet.silence_s(case.node, case.now)
    if silence_s <= case.settings.suspect_after_s:
        if case.node.state is NodeState.SUSPECT and case.node.report.connected:
            return case.move(NodeState.READY, "its reports came back")
        return None
    verdict = _loss_verdict(case)
    if verdict and not _why_held_back(case):
        case.guards.take(case.node)
        return case.move(NodeState.LOST, verdict)
    if case.node.state is NodeState.READY:
        return case.move(NodeState.SUSPECT, f"silent for {age_text(silence_s)}")
    return None


def _loss_verdict(case: _Case) -> str:
    """Why a silent node counts as dead or is given up, or "" without a second witness."""
    silence_s = case.fleet.silence_s(case.node, case.now)
    witness = ""
    if silence_s > case.settings.suspect_after_s and case.node.provider is ProviderStatus.SILENT:
        witness = _failed_with_it(case)
    if silence_s > case.settings.lost_after_s:
        witness = witness or _failed_with_it(case) or _second_witness(case)
    if silence_s > case.settings.unreachable_after_s:
        witness = witness or _serves_nothing(case)
    return f"silent for {age_text(silence_s)}, and {witness}" if witness else ""


def _failed_with_it(case: _Case) -> str:
    """Another member reported that the cell failed, and this node has been silent since. If its provider does not hear
    the machine either, `suspect_after_s` is enough: the cell no longer serves, so waiting protects nothing."""
    cell, seen_at = case.fleet.cell_of(case.node.id), case.fleet.heard_at(case.node, case.now)
    if cell is None or cell.state is not CellState.FAILED or cell.failed_by in {"", case.node.id}:
        return ""
    witness = case.fleet.nodes.get(cell.failed_by)
    if witness is None or not _is_witness(witness, case):
        return ""
    return f"its cell failed: {cell.reason}" if seen_at is None or seen_at <= cell.state_since else ""


def _serves_nothing(case: _Case) -> str:
    """No running cell uses the node, its provider does not hear the machine, and most other nodes of its region report.
    Dead or cut off, it can be replaced."""
    cell = case.fleet.cell_of(case.node.id)
    if case.node.provider is not ProviderStatus.SILENT or (cell is not None and cell.state not in BROKEN):
        return ""
    region = [
        _is_witness(node, case)
        for node in case.fleet.nodes.values()
        if node.region == case.node.region and node.id != case.node.id and node.state in WATCHED
    ]
    if 2 * sum(region) <= len(region):
        return ""
    return f"it serves nothing, while {sum(region)} of {len(region)} other nodes of {case.node.region} report"


def _is_witness(node: NodeView, case: _Case) -> bool:
    """Whether the node reports, and any node cut off with it would report by now. After a regional outage or a restart
    of the control plane, other nodes may come back later. So either that is long over, or the silent node itself
    reported after it."""
    if not node.report.connected or case.fleet.unheard_s(node, case.now) > case.settings.doubt_after_s:
        return False
    listening_since, came_back_at = case.fleet.listening_since, node.report.connection_changed_at
    if listening_since is None:
        return False
    cut_until = listening_since if came_back_at is None else max(listening_since, came_back_at)
    if (case.now - cut_until).total_seconds() >= case.settings.back_within_s:
        return True
    heard_at = case.fleet.heard_at(case.node, case.now)
    return heard_at is not None and (heard_at - cut_until).total_seconds() >= case.settings.heard_after_cut_s


def _why_held_back(case: _Case) -> str:
    """Why a condemned node is kept, or "". A machine that its provider calls gone needs no permission."""
    if case.node.provider is ProviderStatus.GONE:
        return ""
    mode = case.fleet.faults.mode(Rule.SILENCE)
    return case.guards.refusal(case.node) if mode is RuleMode.ON else f"the rule for silent nodes is {mode}"


def _second_witness(case: _Case) -> str:
    """Evidence that the node is dead: from its provider, from its leader (of a leader: from a follower), or from an
    ingress of its cell. An ingress only sees the leader, so it is evidence about a follower only once the leader is
    silent."""
    if case.node.provider is ProviderStatus.GONE:
        return "its provider says the machine is gone"
    if impaired := case.impaired:
        return f"its provider says the machine is impaired: {impaired}"
    cell = case.fleet.cell_of(case.node.id)
    if cell is None or not cell.members:
        return ""
    leader = case.fleet.nodes.get(min(cell.members, key=lambda member: member.rank).node)
    if leader is None:
        return ""
    ingress = case.fleet.faults.down.get(cell.id)
    if ingress and case.fleet.silence_s(leader, case.now) > case.settings.lost_after_s:
        return f"ingress {ingress} cannot reach its cell {cell.id}"
    leads = leader.id == case.node.id
    followers = (member.node for member in cell.members if member.node != leader.id)
    for name in followers if leads else (leader.id,):
        other = case.fleet.nodes.get(name)
        if other is None or not other.report.connected or not other.report.is_about(cell):
            continue
        if other.report.state is EngineState.FAILED:
            return f"its {'follower' if leads else 'leader'} {other.id} reports: {other.report.reason}"
    return ""
