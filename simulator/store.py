"""PostgreSQL and the services over it, in memory: rows as planners see them, and every decision as one compare-and-set.

The reference that the services are compared with. It decides nothing, and applies nothing that is stale. `on_write` is
called after each transaction; `before_write` before each, and may raise to kill the process that writes.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import datetime
from functools import singledispatchmethod
from itertools import count

from engine_agent.protocol.messages import Desired
from fleet.planning.decisions import (
    ChangeRollout,
    CordonNode,
    CreateCell,
    Decision,
    DrainCell,
    ExplainCell,
    LaunchNodes,
    MoveCell,
    MoveNode,
    ReplaceNode,
    RestartAgent,
    RetireNode,
    StartCell,
    StopCell,
    WishReplacement,
)
from fleet.planning.ledger import LedgerLimits, refusal
from fleet.planning.snapshot import (
    CellView,
    FleetView,
    MemberView,
    NodeView,
    ProviderStatus,
    ReportView,
    policy_in_force,
)
from fleet.planning.states import (
    CELL_ALLOWED,
    NODE_ALLOWED,
    ROLLOUT_ACTIVE,
    ROLLOUT_ALLOWED,
    CellState,
    NodeState,
    RolloutState,
)
from simulator.accounts import standing_of
from simulator.fault_rows import FaultDecision, faults_after, why_stale, with_lost
from simulator.orders import assignment_of
from simulator.provider import NoProvider, Provider
from simulator.writes import Stale, Write

UNSAID = ReportView(connected=False, last_seen_at=None)


class Store:
    """The rows. `fleet` is what a pass would load now; it changes with them unless it is copied."""

    def __init__(self, fleet: FleetView) -> None:
        self.nodes: dict[str, NodeView] = dict(fleet.nodes)
        self.cells: dict[str, CellView] = dict(fleet.cells)
        self.deployments = dict(fleet.deployments)
        self.regions = dict(fleet.regions)
        self.rollouts = dict(fleet.rollouts)
        self.faults = fleet.faults
        self.listening_since = fleet.listening_since
        self.member_of = {member.node: cell.id for cell in self.cells.values() for member in cell.members}
        self.versions: Counter[str] = Counter(dict.fromkeys(self.nodes, 1))
        ids = [*(one.id for one in fleet.faults.incidents), *(one.id for one in fleet.faults.replacements)]
        self._fault_numbers = count(max(ids, default=0) + 1)
        self._cell_numbers, self._node_numbers = count(len(self.cells) + 1), count(len(self.nodes) + 1)
        self.rollouts_begun = max((rollout.id for rollout in self.rollouts.values()), default=0)
        self.limits = LedgerLimits()
        self._pools: Counter[tuple[str, str]] | None = None
        self.writes = 0
        self.before_write: Callable[[], None] = lambda: None
        self.on_write: Callable[[Write], None] = lambda _: None
        self.on_order: Callable[[Iterable[str]], None] = lambda _: None
        self.provider: Provider = NoProvider()

    # --- what is read ------------------------------------------------------------------------------------------------

    def fleet(self, provider: dict[str, ProviderStatus] | None = None) -> FleetView:
        """The rows as one snapshot, that stays as it is. `provider` adds what providers said of the nodes in doubt."""
        nodes = dict(self.nodes)
        for node, said in (provider or {}).items():
            nodes[node] = replace(nodes[node], provider=said)
        return FleetView(
            regions=dict(self.regions),
            nodes=nodes,
            cells={name: cell for name, cell in self.cells.items() if cell.state is not CellState.STOPPED},
            deployments=dict(self.deployments),
            listening_since=self.listening_since,
            rollouts=dict(self.rollouts),
            faults=self.faults,
        )

    def desired(self, node: str) -> Desired:
        """All that a node must do."""
        cell_id = self.member_of.get(node)
        cell = self.cells[cell_id] if cell_id is not None else None
        assignment = assignment_of(cell, self.deployments[cell.deployment], node) if cell is not None else None
        return Desired(node=node, version=self.versions[node], assignment=assignment)

    # --- what agents and ingresses say -------------------------------------------------------------------------------

    def report(self, node: str, report: ReportView) -> bool:
        """Keep the last word of a node. Returns whether a planner may care."""
        known = self.nodes.get(node)
        if known is None or known.state is NodeState.RETIRED:
            return False
        self.nodes[node] = replace(known, report=report)
        return _gist(known.report) != _gist(report)

    def mark_unrouted(self, cell_id: str, generation: int, now: datetime) -> bool:
        """Every ingress has acknowledged a table that sends this cell nothing new."""
        cell = self.cells[cell_id]
        if (cell.generation, cell.state, cell.unrouted_at) != (generation, CellState.DRAINING, None):
            return False
        self.before_write()
        self._set_cell("unrouted", cell, replace(cell, unrouted_at=now), now)
        return True

    # --- what decisions do -------------------------------------------------------------------------------------------

    @singledispatchmethod
    def apply(self, decision: Decision, now: datetime) -> None:
        """Carry out one decision, as `fleet.services.reconcile.apply` does.

        Raises:
            Stale: what the decision saw is no longer so.
        """
        raise TypeError(f"no way to apply {decision!r}")

    @apply.register
    def _(self, decision: MoveNode, now: datetime) -> None:
        self._move_node(decision, decision.to, now)

    @apply.register
    def _(self, decision: CordonNode, now: datetime) -> None:
        node = self.nodes.get(decision.node)
        if node is None or node.cordoned or node.state is NodeState.RETIRED:
            raise Stale(f"node {decision.node}")
        self.before_write()
        self.nodes[decision.node] = replace(node, cordoned=True)
        self._commit(Write(decision, now))

    @apply.register
    def _(self, decision: FaultDecision, now: datetime) -> None:
        name = decision.node if isinstance(decision, ReplaceNode | WishReplacement) else ""
        node = self.nodes.get(name)
        if isinstance(decision, ReplaceNode):
            _check_move(decision.seen, NodeState.FAULTY)
        if stale := why_stale(self.faults, decision, self.nodes, self.member_of.get(name, "")):
            raise Stale(stale)
        if isinstance(decision, ReplaceNode):
            self._move_node(decision, NodeState.FAULTY, now)
        else:
            self.before_write()
        self.faults = faults_after(self.faults, decision, node, now, next(self._fault_numbers))
        self._commit(Write(decision, now))

    @apply.register
    def _(self, decision: RestartAgent, now: datetime) -> None:
        self.before_write()
        self.provider.restart_agent(decision.node)
        self._commit(Write(decision, now))

    @apply.register
    def _(self, decision: RetireNode, now: datetime) -> None:
        if decision.seen is not NodeState.RETIRED:
            if decision.node in self.member_of:
                raise Stale(f"node {decision.node} joined a cell")
            self._move_node(decision, NodeState.RETIRED, now)
        self.before_write()
        self.provider.terminate(decision.node)
        self.nodes.pop(decision.node, None)
        self._commit(Write(decision, now))

    @apply.register
    def _(self, decision: LaunchNodes, now: datetime) -> None:
        for number in range(decision.count):
            self.before_write()
            if self._pool(decision.region, decision.instance_type) != decision.there + number:
                raise Stale(f"{decision.region} has bought or retired nodes meanwhile")
            node = next(name for number in self._node_numbers if (name := f"n-{number:06d}") not in self.nodes)
            topology = self.provider.topology(decision.region, decision.near)
            self.nodes[node] = NodeView(
                id=node,
                region=decision.region,
                instance_type=decision.instance_type,
                state=NodeState.JOINING,
                created_at=now,
                state_since=now,
                report=UNSAID,
                topology=topology,
            )
            self.versions[node] = 1
            if self._pools is not None:
                self._pools[decision.region, decision.instance_type] += 1
            self._commit(Write(decision, now))
            self.before_write()
            self.provider.launch(node, decision.region, topology)

    @apply.register
    def _(self, decision: CreateCell, now: datetime) -> None:
        self.before_write()
        place = f"{decision.deployment}-{decision.region}"
        cell = CellView(
            id=next(name for number in self._cell_numbers if (name := f"{place}-{number}") not in self.cells),
            deployment=decision.deployment,
            region=decision.region,
            state=CellState.PENDING,
            generation=0,
            created_at=now,
            state_since=now,
            reason=decision.reason,
            version=decision.version or self.deployments[decision.deployment].version,
        )
        self._set_cell(decision, None, cell, now)

    @apply.register
    def _(self, decision: StartCell, now: datetime) -> None:
        cell = self._seen(decision, CellState.STARTING)
        before = {member.node for member in cell.members}
        for name in decision.nodes:
            node = self.nodes.get(name)
            usable = node is not None and node.state is NodeState.READY and (name in before or not node.cordoned)
            if not usable or self.member_of.get(name, cell.id) != cell.id:
                raise Stale(f"cell {cell.id}: {name} can no longer be used")
        started = self._moved(cell, CellState.STARTING, decision.reason, now)
        started = replace(
            started,
            generation=cell.generation + 1,
            members=tuple(MemberView(node, rank) for rank, node in enumerate(decision.nodes)),
            restarts=cell.restarts + 1,
            unrouted_at=None,
            version=decision.version or cell.version,
            counters=None,
        )
        self.before_write()
        self._put_members(cell, decision.nodes, now)
        self._set_cell(decision, cell, started, now, {*before, *decision.nodes})

    @apply.register
    def _(self, decision: MoveCell, now: datetime) -> None:
        cell = self._seen(decision, decision.to)
        moved = self._moved(cell, decision.to, decision.reason, now)
        if decision.to is CellState.READY:
            moved = replace(moved, restarts=0, disruption=None)
        self._write_cell(decision, moved, now)

    @apply.register
    def _(self, decision: DrainCell, now: datetime) -> None:
        cell = self._seen(decision, CellState.DRAINING)
        policy = policy_in_force(self.deployments[cell.deployment], self.rollouts.get(cell.deployment))
        standing = standing_of(self.cells.values(), self.deployments, cell, policy.min_healthy_s, now)
        if refused := refusal(standing, decision.cause, policy.max_unavailable, self.limits):
            raise Stale(f"cell {cell.id} stays: {refused}")
        moved = self._moved(cell, CellState.DRAINING, decision.reason, now)
        self._write_cell(decision, replace(moved, disruption=cell.disruption or decision.cause), now)

    @apply.register
    def _(self, decision: ChangeRollout, now: datetime) -> None:
        if decision.to not in ROLLOUT_ALLOWED[decision.seen]:
            raise ValueError(f"a rollout cannot go from {decision.seen} to {decision.to}")
        known = next((rollout for rollout in self.rollouts.values() if rollout.id == decision.rollout), None)
        if known is None or (known.state, known.revision) != (decision.seen, decision.revision):
            raise Stale(f"rollout {decision.rollout}")
        self.before_write()
        moved = (known.state, known.stage) != (decision.to, decision.stage)
        changed = replace(
            known,
            state=decision.to,
            stage=decision.stage,
            reason=decision.reason,
            revision=known.revision + 1,
            state_since=now if moved else known.state_since,
            failed=known.failed + decision.failed,
            counters=known.counters if decision.counters is None else decision.counters,
        )
        if decision.to in ROLLOUT_ACTIVE:
            self.rollouts[known.deployment] = changed
        else:
            del self.rollouts[known.deployment]
        if decision.to is RolloutState.SUCCEEDED:
            spec = self.deployments[known.deployment]
            self.deployments[spec.name] = replace(spec, version=known.to_version)
        self._commit(Write(decision, now, rollout_before=known, rollout_after=changed))

    @apply.register
    def _(self, decision: ExplainCell, now: datetime) -> None:
        self._write_cell(decision, replace(self._seen(decision), reason=decision.reason), now, ordered=False)

    @apply.register
    def _(self, decision: StopCell, now: datetime) -> None:
        cell = self._seen(decision, CellState.STOPPED)
        moved = replace(self._moved(cell, CellState.STOPPED, decision.reason, now), members=(), disruption=None)
        self.before_write()
        self._put_members(cell, (), now)
        self._set_cell(decision, cell, moved, now, {member.node for member in cell.members})
        del self.cells[cell.id]

    # --- one transaction ---------------------------------------------------------------------------------------------

    def _seen(
        self, decision: StartCell | DrainCell | MoveCell | ExplainCell | StopCell, to: CellState | None = None
    ) -> CellView:
        seen = CellState.READY if isinstance(decision, DrainCell) else decision.seen
        if to is not None and to not in CELL_ALLOWED[seen]:
            raise ValueError(f"a cell cannot go from {seen} to {to}")
        cell = self.cells.get(decision.cell)
        if cell is None or (cell.state, cell.generation) != (seen, decision.generation):
            raise Stale(f"cell {decision.cell}")
        return cell

    def _pool(self, region: str, instance_type: str) -> int:
        """Machines of a pool that are not retired, counted again only after some were."""
        if self._pools is None:
            rows = (node for node in self.nodes.values() if node.state is not NodeState.RETIRED)
            self._pools = Counter((node.region, node.instance_type) for node in rows)
        return self._pools[region, instance_type]

    def _moved(self, cell: CellView, to: CellState, reason: str, now: datetime) -> CellView:
        return replace(cell, state=to, reason=reason, state_since=now)

    def _write_cell(self, cause: Decision | str, cell: CellView, now: datetime, *, ordered: bool = True) -> None:
        self.before_write()
        nodes = {member.node for member in cell.members} if ordered else ()
        self._set_cell(cause, self.cells[cell.id], cell, now, nodes)

    def _set_cell(
        self, cause: Decision | str, before: CellView | None, cell: CellView, now: datetime, nodes: Iterable[str] = ()
    ) -> None:
        self.cells[cell.id] = cell
        self._order_anew(nodes)
        self._commit(Write(cause, now, before, cell))

    def _put_members(self, cell: CellView, nodes: tuple[str, ...], now: datetime) -> None:
        for member in cell.members:
            del self.member_of[member.node]
        for name in nodes:
            self.member_of[name] = cell.id
            self.nodes[name] = replace(self.nodes[name], spare_since=None)
        for member in cell.members:
            if member.node not in self.member_of:
                self.nodes[member.node] = replace(self.nodes[member.node], spare_since=now)

    def _move_node(self, decision: MoveNode | RetireNode | ReplaceNode, to: NodeState, now: datetime) -> None:
        _check_move(decision.seen, to)
        node = self.nodes.get(decision.node)
        if node is None or node.state is not decision.seen:
            raise Stale(f"node {decision.node}")
        if isinstance(decision, ReplaceNode) and node.state_since != decision.since:
            raise Stale(f"node {decision.node} has left that state and come back to it")
        if isinstance(decision, MoveNode) and to is NodeState.LOST and node.report.last_seen_at != decision.said_at:
            raise Stale(f"node {decision.node} has spoken since")
        self.before_write()
        moved = replace(node, state=to, state_since=now, cordoned=node.cordoned or to is NodeState.FAULTY)
        if decision.seen is NodeState.JOINING:
            moved = replace(moved, spare_since=now)
        if to is NodeState.RETIRED:
            moved = replace(moved, report=UNSAID)
            self._pools = None
        self.nodes[node.id] = moved
        if to is NodeState.LOST and node.id in self.member_of:
            self.faults = with_lost(
                self.faults, node, self.member_of[node.id], decision.reason, next(self._fault_numbers)
            )
        self._order_anew([node.id])
        self._commit(Write(decision, now))

    def _order_anew(self, nodes: Iterable[str]) -> None:
        in_order = sorted(nodes)  # a set's order differs between processes, and a seed must tell one story
        for node in in_order:
            self.versions[node] += 1
        self.on_order(in_order)

    def _commit(self, write: Write) -> None:
        self.writes += 1
        self.on_write(write)


def _check_move(seen: NodeState, to: NodeState) -> None:
    if to not in NODE_ALLOWED[seen]:
        raise ValueError(f"a node cannot go from {seen} to {to}")


def _gist(report: ReportView) -> tuple[object, ...]:
    return report.connected, report.state, report.cell, report.generation, report.unhealthy_since is None
