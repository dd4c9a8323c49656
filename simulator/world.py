"""A simulated world: a fleet as rows, its machines, its control plane, and everything between them."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from random import Random

from engine_agent.node.planning.node import Membership, RunningProcess
from engine_agent.protocol.states import Phase
from fleet.reconcile.planning.decisions import GrantCells, MoveNode
from fleet.reconcile.planning.settings import FleetSettings
from fleet.reconcile.planning.snapshot import CellView, FleetView
from fleet.reconcile.planning.states import CellState, NodeState
from fleet.rollouts.planning.gates import CELLS_COMPARED
from simulator.agent_server import AgentServer, RepeatedReport
from simulator.clock import EPOCH, EventQueue
from simulator.context import QUIET, Network, NetworkQuality, SimulationContext, VersionBehaviour, counted
from simulator.engines import Engines
from simulator.machine import Machine, Proxy
from simulator.provider import SimulatedProvider
from simulator.reconciler import TRAFFIC, Reconciler
from simulator.routing import Routing
from simulator.rows import Write
from simulator.store import Store

Place = tuple[str, str]
"""Deployment, region."""


@dataclass
class Series:
    """What the figure shows of one place: times, and the number of serving cells from then on."""

    at_s: list[float] = field(default_factory=list)
    ready: list[int] = field(default_factory=list)
    wanted: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Invariant:
    """An invariant: its number in the design, its text, and its check."""

    name: str
    text: str
    on_write: "Callable[[World, Write], Iterable[str]] | None" = None
    on_world: "Callable[[World], Iterable[str]] | None" = None


class World:
    """One run. `fleet` is its initial state: ready cells serve, connected nodes are connected. `skip_repeats` omits the
    events of reports that repeat the last one, for large fleets; nothing else differs."""

    store_type: type[Store] = Store
    reconciler_type: type[Reconciler] = Reconciler
    """Tests replace it with a reconciler over real services."""

    def __init__(
        self,
        fleet: FleetView,
        *,
        seed: int = 0,
        settings: FleetSettings | None = None,
        behaviours: Mapping[str, VersionBehaviour] | None = None,
        quality: NetworkQuality = QUIET,
        skip_repeats: bool = False,
        invariants: tuple[Invariant, ...] = (),
        queue: EventQueue | None = None,
    ) -> None:
        self.seed = seed
        self.random = Random(seed)
        self.queue = queue or EventQueue(EPOCH)
        self.network = Network(self.queue, self.random, quality)
        self.store = self.store_type(fleet)
        self.agent_server = AgentServer(self.store, self._wake_reconciler)
        self.context = SimulationContext(
            self.queue,
            self.random,
            self.network,
            self.agent_server,
            behaviours=behaviours or {},
            skip_repeats=skip_repeats,
        )
        self.agent_server.attach(self.context)
        self.engines = Engines(self.context)
        self.provider = SimulatedProvider(self.context, self.agent_server, self.engines)
        self.reconciler = self.reconciler_type(self.context, self.store, self.provider, settings or FleetSettings())
        self.routing = Routing(self.context, self.store, self._wake_reconciler)
        self.timeline = self.context.timeline
        self.ready: Counter[Place] = Counter()
        self.series: dict[Place, Series] = {}
        self.unsettled: set[str] = set()
        self.invariants = invariants
        self._wire()
        self._settle(fleet)

    def _wire(self) -> None:
        self.store.provider = self.provider
        self.provider.on_checked = self._checked
        self.store.limits = self.reconciler.settings.ledger
        self.store.on_write = self._written
        self.reconciler.prepare = self._with_counters
        self.reconciler.is_quiet = self.is_settled
        self.reconciler.on_kill = self._killed
        self.reconciler.on_pass = self._passed
        self.routing.on_change = self._unrouted
        self.routing.on_kill = lambda: self.reconciler.killed(TRAFFIC)
        self.routing.is_reachable = lambda: self.agent_server.is_up

    # --- initial state -----------------------------------------------------------------------------------------------

    def _settle(self, fleet: FleetView) -> None:
        for node in fleet.nodes.values():
            if node.state is NodeState.RETIRED:
                continue
            machine = self.provider.add(node.id, node.topology)
            if node.state is NodeState.LOST:
                machine.has_power = False
            elif node.report.connected:
                self._connect(machine)
            elif node.state is NodeState.JOINING:
                self.queue.after(self.provider.boot_s, machine.boot)
            else:
                machine.has_network = False
        for cell in fleet.cells.values():
            self._begin(cell)
        for place, wanted in self._places().items():
            self._sample(place, wanted)
        self.routing.start()
        self.reconciler.start()

    def _connect(self, machine: Machine) -> None:
        machine.order = self.store.desired(machine.node)
        machine.connection_id = connection_id = self.context.next_serial()
        machine.no_contact_since_s = None
        self.agent_server.connected(machine.node, connection_id)
        self.agent_server.connections[machine.node].sent_version = self.store.versions[machine.node]
        if self.context.skip_repeats:
            node = self.store.nodes[machine.node]
            self.store.nodes[machine.node] = replace(node, report=RepeatedReport(node.report, self.agent_server))
        else:
            self.queue.after(self.random.random() * 2.0, machine.report_again)

    def _begin(self, cell: CellView) -> None:
        if cell.state is CellState.READY:
            self.ready[cell.deployment, cell.region] += 1
        else:
            self.unsettled.add(cell.id)
        serving = cell.state in {CellState.READY, CellState.DRAINING}
        for member in cell.members:
            machine = self.provider.machines.get(member.node)
            assignment = machine.desired if machine is not None else None
            if machine is None or assignment is None or not machine.has_power:
                continue
            if cell.state is CellState.STARTING or not serving:
                self.queue.after(0.0, machine.converge)
                continue
            engine = self.engines.adopt(assignment, machine.engine_ended, machine.engine_changed)
            machine.engine, machine.was_ready = engine, True
            if member.rank == 0:
                process = RunningProcess(Membership(cell.id, cell.generation, 0), self.context.next_serial(), 0.0)
                machine.proxy = Proxy(process, Phase.SERVE)

    # --- during the run ----------------------------------------------------------------------------------------------

    def run_until(self, end_s: float, has_time: Callable[[], bool] = lambda: True) -> bool:
        """Runs until that second of the run, or as long as `has_time` allows; then returns False."""
        return self.queue.run_until(end_s, has_time)

    def region_of(self, node: str) -> str:
        view = self.store.nodes.get(node)
        return view.region if view is not None else ""

    def is_settled(self) -> bool:
        """Whether every cell serves, every node is healthy, and no rollout is active."""
        return not self.unsettled and not self.store.rollouts

    def _checked(self, node: str, is_well: bool) -> None:
        self.store.checked(node, is_well)
        self.reconciler.wake()

    def _wake_reconciler(self) -> None:
        self.reconciler.wake()

    def _killed(self, whose: str) -> None:
        faults = self.reconciler.process_faults
        if whose == TRAFFIC or faults.whole:
            self.routing.crash(faults.restart_s)
        if faults.whole:
            self.agent_server.crash()
            self.queue.after(faults.restart_s, self.agent_server.recover)

    def _unrouted(self) -> None:
        for cell in self.store.cells.values():
            if cell.state is CellState.DRAINING and cell.members and not self.routing.routes_to(cell.id):
                leader = self.provider.machines.get(cell.members[0].node)
                if leader is not None and leader.unrouted_since_s is None:
                    leader.unrouted_since_s = self.queue.now_s

    def _with_counters(self, view: FleetView) -> FleetView:
        """Adds the counters of leaders, which matter only while a rollout compares them."""
        self.agent_server.newest_report_at = self.queue.now
        rolling = {rollout.deployment: rollout.counters for rollout in view.rollouts.values()}
        if not rolling:
            return view
        cells, taken = dict(view.cells), Counter[tuple[str, str, str]]()
        for cell in view.cells.values():
            if cell.deployment not in rolling or cell.state is not CellState.READY:
                continue
            alike = (cell.deployment, cell.region, cell.version)
            taken[alike] += 1
            if taken[alike] <= CELLS_COMPARED or cell.id in rolling[cell.deployment]:
                served_s = (self.queue.now - cell.state_since).total_seconds()
                counters = counted(self.context.behaviour(cell.version), cell.generation, served_s)
                cells[cell.id] = replace(cell, counters=counters)
        return replace(view, cells=cells)

    def _written(self, write: Write) -> None:
        before, after = write.before, write.after
        if isinstance(write.cause, MoveNode):
            self.context.note(f"node.{write.cause.to}", write.cause.node, write.cause.reason)
        if isinstance(write.cause, GrantCells):
            self.context.note(f"grant.{write.cause.rule}", write.cause.deployment, _grant_text(write.cause))
        rollout = write.rollout_after
        if rollout is not None:
            self.context.note(f"rollout.{rollout.state}", rollout.deployment, rollout.reason)
        if after is not None and (before is None or before.state is not after.state):
            self._moved(before, after)
        for invariant in self.invariants:
            if invariant.on_write is not None:
                self._complain(invariant, invariant.on_write(self, write))

    def _moved(self, before: CellView | None, after: CellView) -> None:
        place = (after.deployment, after.region)
        self.context.note(f"cell.{after.state}", after.id, after.reason)
        self.ready[place] += (after.state is CellState.READY) - (before is not None and before.state is CellState.READY)
        self._sample(place, self.store.deployments[place[0]].cells_wanted.get(place[1], 0))
        if after.state in {CellState.READY, CellState.STOPPED}:
            self.unsettled.discard(after.id)
        else:
            self.unsettled.add(after.id)
        self.routing.wake()

    def _passed(self) -> None:
        for invariant in self.invariants:
            if invariant.on_world is not None and not self.context.skip_repeats:
                self._complain(invariant, invariant.on_world(self))

    def check(self) -> None:
        for invariant in self.invariants:
            if invariant.on_world is not None:
                self._complain(invariant, invariant.on_world(self))

    def _complain(self, invariant: Invariant, violations: Iterable[str]) -> None:
        for text in violations:
            self.timeline.violation(self.queue.now_s, invariant.name, text)

    def _places(self) -> dict[Place, int]:
        return {
            (name, region): wanted
            for name, spec in self.store.deployments.items()
            for region, wanted in spec.cells_wanted.items()
        }

    def _sample(self, place: Place, wanted: int) -> None:
        series = self.series.setdefault(place, Series())
        series.at_s.append(self.queue.now_s)
        series.ready.append(self.ready[place])
        series.wanted.append(wanted)


def _grant_text(grant: GrantCells) -> str:
    granted = "all" if grant.granted is None else grant.granted
    return f"{granted} of {grant.asked} cells in {grant.region}: {grant.reason}"
