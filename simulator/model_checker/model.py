"""The small model: three cells in the middle of a rollout, and everything that can happen to them next. The live
planners and agents without a clock: a pass sees everything as either recent or long past, in any order, which allows
more than real time would. The search visits every state, breadth first. It counts states, violations, and states that
cannot reach an end."""

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from engine_agent.node.planning.node import membership_of
from engine_agent.protocol.messages import Desired
from fleet.deployments.planner import UpdatePolicy
from fleet.reconcile.planning.decisions import ChangeRollout, Decision
from fleet.reconcile.planning.planner import PLANNERS
from fleet.reconcile.planning.settings import FleetSettings
from fleet.reconcile.planning.snapshot import CellView, FleetView, NodeView, ReportView, RolloutView
from fleet.reconcile.planning.states import CellState, RolloutState
from simulator.clock import EPOCH
from simulator.fleet_spec import DeploymentSpec, FleetSpec, build_fleet
from simulator.model_checker.agents import AgentModel
from simulator.model_checker.state import AgentState, FaultBudget, State, with_item
from simulator.rows import StaleWrite, Write
from simulator.store import Store

LONG_S = 50_000.0
"""The age of everything in a late pass: beyond every limit except those that abandon a start or a rollout."""
EARLY, LATE = EPOCH, EPOCH + timedelta(seconds=LONG_S)
NAME, REGION = "llama", "east"
POLICY = UpdatePolicy(
    canary=False, waves_percent=(100,), bake_s=0.0, min_healthy_s=0.0, progress_deadline_s=86400.0, max_failed_cells=2
)
SETTINGS = FleetSettings()

_Rows = tuple[tuple[CellView, ...], tuple[int, ...], RolloutView | None, str]
"""What decisions change in a state: its cells, the nodes' order numbers, the rollout, the deployed version."""


class Model:
    """The fleet of the model and its moves. Machines serve one cell each, and none fails."""

    def __init__(self, cells: int = 3) -> None:
        shape = FleetSpec(
            (DeploymentSpec(NAME, {REGION: cells}, size=1, policy=POLICY, ready_timeout_s=1e6),), spares=0
        )
        self._fleet = build_fleet(shape, EARLY)
        self._nodes: tuple[NodeView, ...] = tuple(
            replace(node, created_at=EARLY, state_since=EARLY) for node in self._fleet.nodes.values()
        )
        spec = next(iter(self._fleet.deployments.values()))
        self._deployments = {version: {NAME: replace(spec, version=version)} for version in ("v1", "v2")}
        connected_at = self._nodes[0].report.connection_changed_at
        self._agents = AgentModel(connected_at, EARLY)
        self._violations: list[str] = []
        # Results that depend on few fields are cached; states differ in the other fields.
        self._plans: dict[tuple[object, ...], list[tuple[Decision, ...]]] = {}
        self._orders: dict[tuple[object, ...], Desired] = {}
        self._outcomes: dict[tuple[object, ...], _Rows] = {}
        self._seen_nodes: dict[tuple[int, ReportView, datetime], NodeView] = {}

    @property
    def violations(self) -> list[str]:
        """Invariants that a visited step violated."""
        return self._violations + self._agents.violations

    def initial(self, budget: FaultBudget) -> State:
        """All cells serve v1, and a rollout to v2 was just requested."""
        store = Store(self._fleet)
        orders = tuple(store.desired(node.id) for node in self._nodes)
        rollout = RolloutView(
            1, NAME, "v1", "v2", RolloutState.RUNNING, 0, (REGION,), POLICY, revision=1, state_since=EARLY
        )
        return State(
            cells=tuple(_timeless(cell) for cell in self._fleet.cells.values()),
            reports=tuple(replace(node.report, last_seen_at=EARLY) for node in self._nodes),
            versions=(1,) * len(self._nodes),
            rollout=rollout,
            deployed="v1",
            agents=tuple(AgentState(order, membership_of(a), "v1") for order in orders if (a := order.assignment)),
            old_orders=(None,) * len(self._nodes),
            budget=budget,
        )

    def successors(self, state: State) -> Iterator[State]:
        """Everything that can happen next."""
        yield from self._passes(state, EARLY)
        yield from self._passes(state, LATE)
        if state.held is not None:
            yield self._applied(replace(state, held=None), (state.held,))
        for index in range(len(self._nodes)):
            yield from self._node_moves(state, index)

    def _node_moves(self, state: State, index: int) -> Iterator[State]:
        agent, budget = state.agents[index], state.budget
        yield from self._deliveries(state, index)
        if agent.engine is not None and not agent.healthy:
            yield replace(state, agents=with_item(state.agents, index, replace(agent, healthy=True)))
        if agent.engine is not None and budget.crashes:
            crashed = with_item(state.agents, index, self._agents.crashed(agent))
            yield replace(state, agents=crashed, budget=replace(budget, crashes=budget.crashes - 1))
        report = self._agents.report(agent)
        if report != state.reports[index]:
            yield replace(state, reports=with_item(state.reports, index, report))

    def _deliveries(self, state: State, index: int) -> Iterator[State]:
        """The machine's newest order is delivered, or an old one again."""
        agent, budget, order = state.agents[index], state.budget, self._order(state, index)
        if agent.order is None or order.version > agent.order.version:
            may_repeat = agent.order is not None and budget.duplicates > 0
            kept = with_item(state.old_orders, index, agent.order) if may_repeat else state.old_orders
            yield self._delivered(replace(state, old_orders=kept), index, order)
        old = state.old_orders[index]
        if old is not None and budget.duplicates:
            left = replace(budget, duplicates=budget.duplicates - 1)
            # Without further repetitions the old orders make no difference.
            kept = state.old_orders if left.duplicates else (None,) * len(self._nodes)
            yield self._delivered(replace(state, budget=left, old_orders=kept), index, old)

    def _delivered(self, state: State, index: int, order: Desired) -> State:
        agent = self._agents.received(state.agents[index], order, self._nodes[index].id)
        return replace(state, agents=with_item(state.agents, index, agent))

    # --- the control plane -------------------------------------------------------------------------------------------

    def _passes(self, state: State, now: datetime) -> Iterator[State]:
        """One round: all its decisions, or only the first part because the process dies; or it stalls after the first
        part."""
        for decisions in self._planned(state, now):
            after = self._applied(state, decisions)
            for count in range(1, len(decisions)):
                yield self._applied(state, decisions[:count])
            budget = state.budget
            if budget.stalls and state.held is None and not isinstance(decisions[0], ChangeRollout):
                yield replace(state, held=decisions[0], budget=replace(budget, stalls=budget.stalls - 1))
            if after.key != state.key:
                yield after
                return

    def _planned(self, state: State, now: datetime) -> Iterator[tuple[Decision, ...]]:
        progress = _progress(state.rollout)
        known = self._plans.setdefault((state.cells, state.reports, progress, state.deployed, now), [])
        view: FleetView | None = None
        for number, planner in enumerate(PLANNERS):
            if number == len(known):
                view = view or self._view(state, now)
                known.append(planner(view, SETTINGS, now))
            if known[number]:
                yield known[number]

    def _order(self, state: State, index: int) -> Desired:
        key = (state.cells, state.deployed, state.rollout is None, index, state.versions[index])
        if key not in self._orders:
            self._orders[key] = self._store(state).desired(self._nodes[index].id)
        return self._orders[key]

    def _applied(self, state: State, decisions: tuple[Decision, ...]) -> State:
        rollout = (_progress(state.rollout), state.rollout and state.rollout.state_since)
        key = (state.cells, state.reports, state.versions, rollout, state.deployed, decisions)
        if key not in self._outcomes:
            self._outcomes[key] = self._rows_after(state, decisions)
        cells, versions, after, deployed = self._outcomes[key]
        return replace(state, cells=cells, versions=versions, rollout=after, deployed=deployed)

    def _rows_after(self, state: State, decisions: tuple[Decision, ...]) -> _Rows:
        store = self._store(state)
        store.on_write = self._watch(store)
        for decision in decisions:
            try:
                # Applied late, so that the ledger counts every ready cell as available.
                store.apply(decision, LATE)
            except StaleWrite:
                continue
        return (
            tuple(_timeless(cell) for cell in store.cells.values()),
            tuple(store.versions[node.id] for node in self._nodes),
            store.rollouts.get(NAME),
            store.deployments[NAME].version,
        )

    def _watch(self, store: Store) -> Callable[[Write], None]:
        def check(write: Write) -> None:
            before, after = write.before, write.after
            if before is None or after is None or before.state is not CellState.READY:
                return
            ready = sum(cell.state is CellState.READY for cell in store.cells.values())
            if after.state is CellState.DRAINING and ready < len(self._nodes) - POLICY.max_unavailable:
                self._violations.append(f"I1: {after.id} was taken down, {ready} serve")
            if after.state is CellState.DRAINING and after.disruption is None:
                self._violations.append(f"I10: {after.id} was taken down without a charge")

        return check

    def _store(self, state: State) -> Store:
        store = Store(self._view(state, EARLY))
        store.versions = Counter(dict(zip((node.id for node in self._nodes), state.versions, strict=True)))
        return store

    def _view(self, state: State, now: datetime) -> FleetView:
        nodes = [self._node(index, report, now) for index, report in enumerate(state.reports)]
        return FleetView(
            regions=self._fleet.regions,
            nodes={node.id: node for node in nodes},
            cells={cell.id: cell for cell in state.cells},
            deployments=self._deployments[state.deployed],
            rollouts={NAME: state.rollout} if state.rollout is not None else {},
            listening_since=EARLY,
            faults=self._fleet.faults,
        )

    def _node(self, index: int, report: ReportView, now: datetime) -> NodeView:
        key = (index, report, now)
        if key not in self._seen_nodes:
            seen = replace(report, last_seen_at=now)
            self._seen_nodes[key] = replace(self._nodes[index], report=seen, spare_since=None)
        return self._seen_nodes[key]

    def is_end(self, state: State) -> bool:
        """No rollout, every cell serves the deployment's version, and agents match the rows."""
        serving = {agent.engine.cell: agent for agent in state.agents if agent.engine is not None and agent.healthy}
        for cell in state.cells:
            agent = serving.get(cell.id)
            if cell.state is not CellState.READY or cell.version != state.deployed or agent is None:
                return False
            if agent.version != cell.version or agent.engine is None or agent.engine.generation != cell.generation:
                return False
        return state.rollout is None and len(state.cells) == len(self._nodes)


def _progress(rollout: RolloutView | None) -> tuple[object, ...] | None:
    """Everything in which views of the rollout differ, except times."""
    if rollout is None:
        return None
    return rollout.state, rollout.stage, rollout.failed, rollout.revision, rollout.reason


def _timeless(cell: CellView) -> CellView:
    unrouted = None if cell.unrouted_at is None else EARLY
    if (cell.state_since, cell.created_at, cell.unrouted_at, cell.reason, cell.restarts) == (
        EARLY,
        EARLY,
        unrouted,
        "",
        0,
    ):
        return cell
    return replace(cell, state_since=EARLY, created_at=EARLY, unrouted_at=unrouted, reason="", restarts=0)


@dataclass
class SearchResult:
    """`is_complete`: no state was left out. `stuck`: states that cannot reach an end."""

    states: int = 0
    ends: int = 0
    is_complete: bool = True
    stuck: int = 0
    violations: list[str] = field(default_factory=list)

    def summary(self, budget: FaultBudget) -> str:
        return (
            f"{self.states} states with {budget}{'' if self.is_complete else ' (not all)'}: "
            f"{len(self.violations)} broken, {self.stuck} without a way to the end"
        )


def search(model: Model, budget: FaultBudget, max_states: int = 200_000) -> SearchResult:
    """Visits, breadth first, every state that the budget of faults allows, but at most `max_states`."""
    first = model.initial(budget)
    result, numbers, waiting = SearchResult(), {first.key: 0}, deque([(0, first)])
    predecessors: list[list[int]] = [[]]
    ends: list[int] = []
    while waiting:
        number, state = waiting.popleft()
        if model.is_end(state):
            ends.append(number)
        for successor in model.successors(state):
            known = numbers.get(successor.key)
            if known is None:
                if len(numbers) >= max_states:
                    result.is_complete = False
                    continue
                known = numbers[successor.key] = len(predecessors)
                predecessors.append([])
                waiting.append((known, successor))
            predecessors[known].append(number)
    result.states, result.ends = len(numbers), len(ends)
    result.stuck = len(numbers) - len(_reaching(predecessors, ends)) if result.is_complete else 0
    result.violations = list(dict.fromkeys(model.violations))
    return result


def _reaching(predecessors: list[list[int]], ends: list[int]) -> set[int]:
    reached, waiting = set(ends), deque(ends)
    while waiting:
        for before in predecessors[waiting.popleft()]:
            if before not in reached:
                reached.add(before)
                waiting.append(before)
    return reached
