"""PostgreSQL and the services over it, in memory: rows as planners see them, and every decision as one compare-and-set.
The services are compared with this reference. It decides nothing, and applies nothing that is stale."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from functools import singledispatchmethod

from fleet.autoscaling.planning.role_split import answers
from fleet.faults.planning.liveness import CONDEMNED
from fleet.faults.planning.views import Rung
from fleet.reconcile.planning.decisions import (
    ChangeRollout,
    CheckRepair,
    CordonNode,
    CreateCell,
    Decision,
    DrainCell,
    EndRepair,
    ExplainCell,
    GrantCells,
    LaunchNodes,
    MoveCell,
    MoveNode,
    OrderPrefetch,
    ReplaceNode,
    RequestReplacement,
    RestartAgent,
    RetireNode,
    StartCell,
    StopCell,
    TryRepair,
    UncordonNode,
)
from fleet.reconcile.planning.settings import LedgerCounts, refusal
from fleet.reconcile.planning.snapshot import (
    CellView,
    DeploymentView,
    MemberView,
    NodeView,
    ReportView,
    policy_in_force,
)
from fleet.reconcile.planning.states import (
    CELL_ALLOWED,
    NODE_ALLOWED,
    ROLLOUT_ACTIVE,
    ROLLOUT_ALLOWED,
    CellState,
    DisruptionCause,
    NodeState,
    RolloutState,
)
from simulator.fault_rows import (
    FaultDecision,
    Repairing,
    faults_after,
    repairs_after,
    why_not_repaired,
    why_stale,
    with_lost,
)
from simulator.rows import Rows, StaleWrite, Write

NEVER_REPORTED = ReportView(connected=False, last_seen_at=None)


class Store(Rows):
    @singledispatchmethod
    def apply(self, decision: Decision, now: datetime) -> None:
        """Applies one decision, as `fleet.reconcile.services.apply` does. Raises StaleWrite if the rows have changed
        since the decision was made."""
        raise TypeError(f"no way to apply {decision!r}")

    @apply.register
    def _(self, decision: MoveNode, now: datetime) -> None:
        self._move_node(decision, decision.to, now)

    @apply.register
    def _(self, decision: CordonNode, now: datetime) -> None:
        node = self.nodes.get(decision.node)
        if node is None or node.cordoned or node.state is NodeState.RETIRED:
            raise StaleWrite(f"node {decision.node}")
        self.before_write()
        self.nodes[decision.node] = replace(node, cordoned=True, cordoned_for_notice=decision.for_notice)
        self._commit(Write(decision, now))

    @apply.register
    def _(self, decision: UncordonNode, now: datetime) -> None:
        node = self.nodes.get(decision.node)
        if node is None or not node.cordoned_for_notice or node.state in CONDEMNED or node.state is NodeState.RETIRED:
            raise StaleWrite(f"node {decision.node}")
        self.before_write()
        self.nodes[decision.node] = replace(node, cordoned=False, cordoned_for_notice=False)
        self._commit(Write(decision, now))

    @apply.register
    def _(self, decision: FaultDecision, now: datetime) -> None:
        name = decision.node if isinstance(decision, ReplaceNode | RequestReplacement) else ""
        node = self.nodes.get(name)
        if isinstance(decision, ReplaceNode):
            _check_move(decision.seen, NodeState.FAULTY)
        if stale := why_stale(self.faults, decision, self.nodes, self.member_of.get(name, "")):
            raise StaleWrite(stale)
        if isinstance(decision, ReplaceNode):
            self._move_node(decision, NodeState.FAULTY, now)
        else:
            self.before_write()
        self.faults = faults_after(self.faults, decision, node, now, next(self._fault_numbers))
        self._commit(Write(decision, now))

    @apply.register
    def _(self, decision: Repairing, now: datetime) -> None:
        node, cell = self.nodes.get(decision.node), self.member_of.get(decision.node, "")
        if (stale := why_not_repaired(self.faults, decision, node, cell)) or node is None:
            raise StaleWrite(stale)
        self.before_write()
        self.faults = repairs_after(self.faults, decision, now, next(self._fault_numbers))
        if isinstance(decision, EndRepair) and decision.cured:
            self.nodes[node.id] = replace(node, state=NodeState.READY, state_since=now, cordoned=False, spare_since=now)
        self._commit(Write(decision, now))
        if isinstance(decision, TryRepair):
            (self.provider.reset if decision.rung is Rung.RESET else self.provider.reboot)(decision.node)
        elif isinstance(decision, CheckRepair):
            self.provider.check(decision.node)

    @apply.register
    def _(self, decision: RestartAgent, now: datetime) -> None:
        self.before_write()
        self.provider.restart_agent(decision.node)
        self._commit(Write(decision, now))

    @apply.register
    def _(self, decision: RetireNode, now: datetime) -> None:
        if decision.seen is not NodeState.RETIRED:
            if decision.node in self.member_of:
                raise StaleWrite(f"node {decision.node} joined a cell")
            self._move_node(decision, NodeState.RETIRED, now)
        self.before_write()
        self.provider.terminate(decision.node)
        retired = self.nodes.pop(decision.node, None)
        if retired is not None:
            self.take_free(retired.region, retired.instance_type, -1)
        self._commit(Write(decision, now))

    @apply.register
    def _(self, decision: LaunchNodes, now: datetime) -> None:
        topology: tuple[str, ...] = ()
        for number in range(decision.count):
            self.before_write()
            if self._pool(decision.region, decision.instance_type) != decision.there + number:
                raise StaleWrite(f"{decision.region} has launched or retired nodes since")
            node = next(name for number in self._node_numbers if (name := f"n-{number:06d}") not in self.nodes)
            beside = topology if number % decision.unit else ()
            topology = self.provider.topology(decision.region, decision.near or beside)
            self.nodes[node] = NodeView(
                id=node,
                region=decision.region,
                instance_type=decision.instance_type,
                state=NodeState.JOINING,
                created_at=now,
                state_since=now,
                report=NEVER_REPORTED,
                topology=topology,
                markets=decision.markets,
            )
            self.versions[node] = 1
            self.take_free(decision.region, decision.instance_type, 1)
            if self._pools is not None:
                self._pools[decision.region, decision.instance_type] += 1
            self._commit(Write(decision, now))
            self.before_write()
            self.provider.launch(node, decision.region, topology)

    @apply.register
    def _(self, decision: GrantCells, now: datetime) -> None:
        spec = self.deployments[decision.deployment]
        claim = spec.claim(decision.region)
        if (claim.asked, claim.granted) != (decision.asked, decision.seen):
            raise StaleWrite(f"{decision.deployment} in {decision.region}")
        self.before_write()
        changed = replace(claim, granted=decision.granted, granted_at=now, rule=decision.rule, reason=decision.reason)
        self.deployments[spec.name] = spec.claiming(decision.region, changed)
        self._commit(Write(decision, now))

    @apply.register
    def _(self, decision: CreateCell, now: datetime) -> None:
        self.before_write()
        place = f"{decision.deployment}-{decision.region}"
        cell = CellView(
            id=next(name for number in self._cell_numbers if (name := f"{place}-{number}") not in self.cells),
            deployment=decision.deployment,
            region=decision.region,
            instance_type=decision.instance_type,
            state=CellState.PENDING,
            generation=0,
            created_at=now,
            state_since=now,
            reason=decision.reason,
            version=decision.version or self.deployments[decision.deployment].version,
            role=decision.role,
        )
        self._set_cell(decision, None, cell, now)

    @apply.register
    def _(self, decision: StartCell, now: datetime) -> None:
        cell = self._checked_cell(decision, CellState.STARTING)
        before = {member.node for member in cell.members}
        for name in decision.nodes:
            node = self.nodes.get(name)
            usable = node is not None and node.state is NodeState.READY and (name in before or not node.cordoned)
            if not usable or self.member_of.get(name, cell.id) != cell.id:
                raise StaleWrite(f"cell {cell.id}: {name} can no longer be used")
        started = self._moved(cell, CellState.STARTING, decision.reason, now)
        started = replace(
            started,
            generation=cell.generation + 1,
            members=tuple(MemberView(node, rank) for rank, node in enumerate(decision.nodes)),
            restarts=cell.restarts + 1,
            unrouted_at=None,
            version=decision.version or cell.version,
            role=decision.role or cell.role,
            counters=None,
            failed_by="",
        )
        self.before_write()
        self._put_members(cell, decision.nodes, now)
        self._set_cell(decision, cell, started, now, {*before, *decision.nodes})

    @apply.register
    def _(self, decision: MoveCell, now: datetime) -> None:
        cell = self._checked_cell(decision, decision.to)
        moved = self._moved(cell, decision.to, decision.reason, now)
        if decision.to is CellState.READY:
            moved = replace(moved, restarts=0, disruption=None)
        self._write_cell(decision, replace(moved, failed_by=decision.failed_by), now)

    @apply.register
    def _(self, decision: DrainCell, now: datetime) -> None:
        cell = self._checked_cell(decision, CellState.DRAINING)
        policy = policy_in_force(self.deployments[cell.deployment], self.rollouts.get(cell.deployment))
        counts = ledger_counts(self.cells.values(), self.deployments, cell, policy.min_healthy_s, now)
        refused = refusal(counts, decision.cause, policy.max_unavailable, self.limits)
        if refused and not decision.forced:
            raise StaleWrite(f"cell {cell.id} stays: {refused}")
        moved = self._moved(cell, CellState.DRAINING, decision.reason, now)
        self._write_cell(decision, replace(moved, disruption=cell.disruption or decision.cause), now)

    @apply.register
    def _(self, decision: ChangeRollout, now: datetime) -> None:
        if decision.to not in ROLLOUT_ALLOWED[decision.seen]:
            raise ValueError(f"a rollout cannot go from {decision.seen} to {decision.to}")
        known = next((rollout for rollout in self.rollouts.values() if rollout.id == decision.rollout), None)
        if known is None or (known.state, known.revision) != (decision.seen, decision.revision):
            raise StaleWrite(f"rollout {decision.rollout}")
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
        self._write_cell(decision, replace(self._checked_cell(decision), reason=decision.reason), now, ordered=False)

    @apply.register
    def _(self, decision: OrderPrefetch, now: datetime) -> None:
        node = self.nodes.get(decision.node)
        if node is None or node.prefetch != decision.seen or node.state is NodeState.RETIRED:
            raise StaleWrite(f"node {decision.node}")
        self.before_write()
        self.nodes[node.id] = replace(node, prefetch=decision.versions)
        self._desired_changed([node.id])
        self._commit(Write(decision, now))

    @apply.register
    def _(self, decision: StopCell, now: datetime) -> None:
        cell = self._checked_cell(decision, CellState.STOPPED)
        moved = replace(self._moved(cell, CellState.STOPPED, decision.reason, now), members=(), disruption=None)
        self.before_write()
        self._put_members(cell, (), now)
        self._set_cell(decision, cell, moved, now, {member.node for member in cell.members})
        del self.cells[cell.id]

    def _checked_cell(
        self, decision: StartCell | DrainCell | MoveCell | ExplainCell | StopCell, to: CellState | None = None
    ) -> CellView:
        seen = CellState.READY if isinstance(decision, DrainCell) else decision.seen
        if to is not None and to not in CELL_ALLOWED[seen]:
            raise ValueError(f"a cell cannot go from {seen} to {to}")
        cell = self.cells.get(decision.cell)
        if cell is None or (cell.state, cell.generation) != (seen, decision.generation):
            raise StaleWrite(f"cell {decision.cell}")
        return cell

    def _move_node(self, decision: MoveNode | RetireNode | ReplaceNode, to: NodeState, now: datetime) -> None:
        _check_move(decision.seen, to)
        node = self.nodes.get(decision.node)
        if node is None or node.state is not decision.seen:
            raise StaleWrite(f"node {decision.node}")
        if isinstance(decision, ReplaceNode) and node.state_since != decision.since:
            raise StaleWrite(f"node {decision.node} has left that state and returned to it")
        if isinstance(decision, MoveNode) and to is NodeState.LOST and node.report.last_seen_at != decision.reported_at:
            raise StaleWrite(f"node {decision.node} has reported since")
        self.before_write()
        moved = replace(node, state=to, state_since=now, cordoned=node.cordoned or to is NodeState.FAULTY)
        if decision.seen is NodeState.JOINING:
            moved = replace(moved, spare_since=now)
        if to is NodeState.RETIRED:
            moved = replace(moved, report=NEVER_REPORTED)
            self._pools = None
        self.nodes[node.id] = moved
        if to is NodeState.LOST and node.id in self.member_of:
            self.faults = with_lost(
                self.faults, node, self.member_of[node.id], decision.reason, next(self._fault_numbers)
            )
        self._desired_changed([node.id])
        self._commit(Write(decision, now))


def _check_move(seen: NodeState, to: NodeState) -> None:
    if to not in NODE_ALLOWED[seen]:
        raise ValueError(f"a node cannot go from {seen} to {to}")


def ledger_counts(
    cells: Iterable[CellView],
    deployments: Mapping[str, DeploymentView],
    about: CellView,
    settle_s: float,
    now: datetime,
) -> LedgerCounts:
    """Returns the counts before one more disruption, of this cell. Cells count once ready for `settle_s`."""
    spec = deployments[about.deployment]
    available = available_here = available_prefill = own_open = region_open = fleet_open = 0
    for cell in cells:
        if cell.disruption is not None:
            own_open += cell.deployment == spec.name
            if cell.disruption is not DisruptionCause.SCALE:
                fleet_open += 1
                region_open += cell.region == about.region
        if cell.deployment == spec.name and _is_available(cell, settle_s, now):
            available += 1
            available_here += cell.region == about.region
            available_prefill += not answers(cell.role)
    return LedgerCounts(
        wanted=sum(spec.cells_wanted.values()),
        available=available,
        open=own_open,
        wanted_here=spec.cells_wanted.get(about.region, 0),
        available_here=available_here,
        region_wanted=sum(other.cells_wanted.get(about.region, 0) for other in deployments.values()),
        region_open=region_open,
        fleet_wanted=sum(sum(other.cells_wanted.values()) for other in deployments.values()),
        fleet_open=fleet_open,
        is_available=_is_available(about, settle_s, now),
        available_prefill=available_prefill,
        is_prefill=not answers(about.role),
    )


def _is_available(cell: CellView, settle_s: float, now: datetime) -> bool:
    return cell.state is CellState.READY and (now - cell.state_since).total_seconds() >= settle_s
