"""A world in memory under the planners: it applies decisions and lets agents do what they are told."""

from dataclasses import replace
from functools import singledispatchmethod

from engine_agent.protocol.states import EngineState
from fleet.planning.decisions import (
    CreateCell,
    Decision,
    DrainCell,
    ExplainCell,
    LaunchNodes,
    MoveCell,
    MoveNode,
    RestartAgent,
    RetireNode,
    StartCell,
    StopCell,
)
from fleet.planning.snapshot import CellView, FleetView, MemberView, NodeView, ReportView
from fleet.planning.states import CELL_ALLOWED, NODE_ALLOWED, CellState, NodeState
from tests.fleet.planning.fleets import KIND, NOW, fleet, node


class World:
    """One region, one deployment. Agents obey within one tick; nodes die when told."""

    def __init__(self, *, wanted: int, nodes_per_cell: int, warm: int) -> None:
        self.fleet: FleetView = fleet(wanted=wanted, nodes_per_cell=nodes_per_cell, warm=warm)
        self.now = NOW
        self.dead: set[str] = set()
        self._serial = 0

    def kill(self, index: int) -> None:
        alive = sorted(name for name in self.fleet.nodes if name not in self.dead)
        if alive:
            self.dead.add(alive[index % len(alive)])

    def agents_act(self) -> None:
        nodes = {view.id: replace(view, report=self._report_of(view)) for view in self.fleet.nodes.values()}
        self.fleet = replace(self.fleet, nodes=nodes)

    def _report_of(self, view: NodeView) -> ReportView:
        if view.id in self.dead:
            return replace(view.report, connected=False, connection_changed_at=self.now)
        return self._obey(view)

    def spare_count(self) -> int:
        taken = {member.node for cell in self.fleet.cells.values() for member in cell.members}
        return sum(n.id not in taken and n.state is NodeState.READY for n in self.fleet.nodes.values())

    def check_rules(self) -> None:
        """No node in two cells; a running cell has all its members; nothing unplanned in between."""
        taken = [member.node for cell in self.fleet.cells.values() for member in cell.members]
        assert len(taken) == len(set(taken))
        size = self.fleet.deployments["llama"].nodes_per_cell
        for cell in self.fleet.cells.values():
            if cell.state in {CellState.STARTING, CellState.READY}:
                assert len(cell.members) == size

    def _obey(self, view: NodeView) -> ReportView:
        cell = self.fleet.cell_of(view.id)
        report = ReportView(connected=True, last_seen_at=self.now, connection_changed_at=view.created_at)
        if cell is None or cell.state not in {CellState.STARTING, CellState.READY, CellState.DRAINING}:
            return report
        broken = any(member.node in self.dead for member in cell.members)
        state = EngineState.FAILED if broken else EngineState.READY
        return replace(report, state=state, cell=cell.id, generation=cell.generation, reason="a peer died")

    @singledispatchmethod
    def apply(self, decision: Decision) -> None:
        raise TypeError(decision)

    @apply.register
    def _(self, decision: MoveNode) -> None:
        view = self.fleet.nodes[decision.node]
        assert decision.to in NODE_ALLOWED[view.state]
        spare_since = self.now if decision.to is NodeState.READY else view.spare_since
        self._put(replace(view, state=decision.to, state_since=self.now, spare_since=spare_since))

    @apply.register
    def _(self, decision: RestartAgent) -> None:
        raise AssertionError("in this world agents die with their machines")

    @apply.register
    def _(self, decision: RetireNode) -> None:
        assert self.fleet.cell_of(decision.node) is None
        nodes = {name: view for name, view in self.fleet.nodes.items() if name != decision.node}
        self.fleet = replace(self.fleet, nodes=nodes)

    @apply.register
    def _(self, decision: LaunchNodes) -> None:
        for _ in range(decision.count):
            self._serial += 1
            fresh = node(f"n{self._serial:03d}", state=NodeState.JOINING, instance_type=KIND, region=decision.region)
            absent = ReportView(connected=False, last_seen_at=None)
            self._put(replace(fresh, created_at=self.now, state_since=self.now, spare_since=None, report=absent))

    @apply.register
    def _(self, decision: CreateCell) -> None:
        self._serial += 1
        name = f"c{self._serial:03d}"
        view = CellView(name, "llama", decision.region, CellState.PENDING, 0, self.now, self.now)
        self._set(replace(view, version=decision.version))

    @apply.register
    def _(self, decision: StartCell) -> None:
        self._move(decision.cell, CellState.STARTING)
        view = self.fleet.cells[decision.cell]
        members = tuple(MemberView(name, rank) for rank, name in enumerate(decision.nodes))
        view = replace(view, version=decision.version or view.version, unrouted_at=None)
        self._set(replace(view, generation=view.generation + 1, restarts=view.restarts + 1, members=members))

    @apply.register
    def _(self, decision: DrainCell) -> None:
        self._move(decision.cell, CellState.DRAINING)
        self._set(replace(self.fleet.cells[decision.cell], disruption=decision.cause, unrouted_at=self.now))

    @apply.register
    def _(self, decision: MoveCell) -> None:
        self._move(decision.cell, decision.to)
        self._set(replace(self.fleet.cells[decision.cell], reason=decision.reason))
        if decision.to is CellState.READY:
            self._set(replace(self.fleet.cells[decision.cell], restarts=0, disruption=None))

    @apply.register
    def _(self, decision: ExplainCell) -> None:
        view = self.fleet.cells[decision.cell]
        assert view.reason != decision.reason
        self._set(replace(view, reason=decision.reason))

    @apply.register
    def _(self, decision: StopCell) -> None:
        assert CellState.STOPPED in CELL_ALLOWED[self.fleet.cells[decision.cell].state]
        cells = {name: view for name, view in self.fleet.cells.items() if name != decision.cell}
        self.fleet = replace(self.fleet, cells=cells)

    def _move(self, name: str, to: CellState) -> None:
        view = self.fleet.cells[name]
        assert to in CELL_ALLOWED[view.state]
        self._set(replace(view, state=to, state_since=self.now, counters=None))

    def _put(self, view: NodeView) -> None:
        self.fleet = replace(self.fleet, nodes={**self.fleet.nodes, view.id: view})

    def _set(self, view: CellView) -> None:
        self.fleet = replace(self.fleet, cells={**self.fleet.cells, view.id: view})
