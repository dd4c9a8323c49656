"""Every state that a small fleet can come to: three cells in the middle of a rollout, whatever is lost, repeated, late,
or dies.

The live planners and agents again, without a clock: a pass sees everything as just begun or as long ago, in any order,
which allows more than time would. Breadth first, with equal states met once. It proves what it visits, and says whether
that was all.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import TypeVar

from engine_agent.planning.converge import plan_convergence
from engine_agent.planning.node import Failure, Membership, NodeSnapshot, RunningProcess, membership_of
from engine_agent.planning.observe import observe
from engine_agent.planning.orders import refusal
from engine_agent.planning.steps import MarkFailed, StartEngine, StartProxy, StopEngine, StopProxy
from engine_agent.protocol.messages import Desired, Health
from engine_agent.protocol.states import Phase
from fleet.planning.decisions import ChangeRollout, Decision
from fleet.planning.planners import PLANNERS
from fleet.planning.policy import UpdatePolicy
from fleet.planning.settings import FleetSettings
from fleet.planning.snapshot import CellView, FleetView, NodeView, ReportView, RolloutView
from fleet.planning.states import CellState, RolloutState
from simulator.clock import EPOCH
from simulator.shape import DeploymentShape, FleetShape, fleet_of
from simulator.store import Store
from simulator.writes import Stale, Write

T = TypeVar("T")
LONG_S = 50_000.0
"""So long ago everything began in a late pass: beyond every limit but those that give a start or a rollout up."""
EARLY, LATE = EPOCH, EPOCH + timedelta(seconds=LONG_S)
NAME, REGION = "llama", "east"
POLICY = UpdatePolicy(
    canary=False, waves_percent=(100,), bake_s=0.0, min_healthy_s=0.0, progress_deadline_s=86400.0, max_failed_cells=2
)
SETTINGS = FleetSettings()


@dataclass(frozen=True, slots=True)
class Agent:
    """A machine: the order it journalled, what runs, whether that has failed, the highest generation ever started."""

    order: Desired | None
    engine: Membership | None
    version: str = ""
    healthy: bool = True
    failed: Membership | None = None
    highest: int = 1

    def key(self) -> tuple[object, ...]:
        return _gist(self.order), self.engine, self.version, self.healthy, self.failed, self.highest


def _gist(order: Desired | None) -> tuple[object, ...]:
    """All in which orders of one machine differ here."""
    if order is None or order.assignment is None:
        return (order.version if order is not None else 0,)
    given = order.assignment
    return order.version, given.cell, given.generation, given.phase, given.plan.served_model


@dataclass(frozen=True, slots=True)
class Mishaps:
    """How many of each may still happen."""

    crashes: int
    duplicates: int
    stalls: int


@dataclass(frozen=True, slots=True)
class State:
    """Rows, machines, one old order per machine that may come again, and a decision that a stalled process holds."""

    cells: tuple[CellView, ...]
    reports: tuple[ReportView, ...]
    versions: tuple[int, ...]
    rollout: RolloutView | None
    deployed: str
    agents: tuple[Agent, ...]
    old_orders: tuple[Desired | None, ...]
    left: Mishaps
    held: Decision | None = None

    def key(self) -> tuple[object, ...]:
        rollout = self.rollout
        stands = None
        if rollout is not None:
            stands = (rollout.state, rollout.stage, tuple((one.cell, one.generation) for one in rollout.failed))
        return (
            self.cells, self.reports, self.versions, stands, self.deployed,
            tuple(agent.key() for agent in self.agents), tuple(_gist(order) for order in self.old_orders),
            self.left, self.held,
        )  # fmt: skip


@dataclass
class Explored:
    """What was found. `is_whole`: no state was left out. `stuck`: states from which no way leads to the end."""

    states: int = 0
    ends: int = 0
    is_whole: bool = True
    stuck: int = 0
    violations: list[str] = field(default_factory=list)

    def told(self, left: Mishaps) -> str:
        """In one line."""
        kinds = {"crash": left.crashes, "duplicate": left.duplicates, "stalled write": left.stalls}
        with_what = ", ".join(f"{count} {kind}" for kind, count in kinds.items() if count) or "no mishaps"
        return (
            f"{self.states} states with {with_what}{'' if self.is_whole else ' (not all)'}: "
            f"{len(self.violations)} broken, {self.stuck} without a way to the end"
        )


class Exploration:
    """The fleet of the exploration and its moves. Machines serve one cell each, and none dies."""

    def __init__(self, cells: int = 3) -> None:
        shape = FleetShape(
            (DeploymentShape(NAME, {REGION: cells}, size=1, policy=POLICY, ready_timeout_s=1e6),), spares=0
        )
        self._fleet = fleet_of(shape, EARLY)
        self._nodes: tuple[NodeView, ...] = tuple(
            replace(node, created_at=EARLY, state_since=EARLY) for node in self._fleet.nodes.values()
        )
        self._spec = next(iter(self._fleet.deployments.values()))
        self._violations: list[str] = []
        # What follows from few things alone is worked out once; states differ in the rest.
        self._plans: dict[tuple[object, ...], list[tuple[Decision, ...]]] = {}
        self._orders: dict[tuple[object, ...], Desired] = {}
        self._seen_nodes: dict[tuple[int, ReportView, datetime], NodeView] = {}
        self._behaves: dict[tuple[object, ...], Agent] = {}
        self._says: dict[tuple[object, ...], ReportView] = {}

    def begin(self, left: Mishaps) -> State:
        """All cells serve v1, and a rollout to v2 has just been asked for."""
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
            agents=tuple(Agent(order, membership_of(a), "v1") for order in orders if (a := order.assignment)),
            old_orders=(None,) * len(self._nodes),
            left=left,
        )

    def explore(self, left: Mishaps, most: int = 200_000) -> Explored:
        """Visit every state, but no more than `most`."""
        first = self.begin(left)
        found, numbers, waiting = Explored(), {first.key(): 0}, deque([first])
        into: list[list[int]] = [[]]
        ends: list[int] = []
        while waiting:
            state = waiting.popleft()
            number = numbers[state.key()]
            if self._is_end(state):
                ends.append(number)
            for follower in self.moves(state):
                key = follower.key()
                if key not in numbers:
                    if len(numbers) >= most:
                        found.is_whole = False
                        continue
                    numbers[key] = len(into)
                    into.append([])
                    waiting.append(follower)
                into[numbers[key]].append(number)
        found.states, found.ends = len(numbers), len(ends)
        found.stuck = len(numbers) - len(_reaching(into, ends)) if found.is_whole else 0
        found.violations = list(dict.fromkeys(self._violations))
        return found

    def moves(self, state: State) -> Iterator[State]:
        """Everything that can happen next."""
        yield from self._passes(state, EARLY)
        yield from self._passes(state, LATE)
        if state.held is not None:
            yield self._applied(replace(state, held=None), (state.held,))
        for index in range(len(self._nodes)):
            yield from self._node_moves(state, index)

    def _node_moves(self, state: State, index: int) -> Iterator[State]:
        agent, order = state.agents[index], self._order(state, index)
        if agent.order is None or order.version > agent.order.version:
            may_repeat = agent.order is not None and state.left.duplicates > 0
            kept = _put(state.old_orders, index, agent.order) if may_repeat else state.old_orders
            yield self._told(replace(state, old_orders=kept), index, order)
        old = state.old_orders[index]
        if old is not None and state.left.duplicates:
            left = replace(state.left, duplicates=state.left.duplicates - 1)
            # Once none may come again, what could have come is all the same.
            kept = state.old_orders if left.duplicates else (None,) * len(self._nodes)
            yield self._told(replace(state, left=left, old_orders=kept), index, old)
        if agent.engine is not None and not agent.healthy:
            yield replace(state, agents=_put(state.agents, index, replace(agent, healthy=True)))
        if agent.engine is not None and state.left.crashes:
            left = replace(state.left, crashes=state.left.crashes - 1)
            broken = self._converged(replace(agent, engine=None, healthy=False, failed=agent.engine))
            yield replace(state, agents=_put(state.agents, index, broken), left=left)
        said = self._report(agent)
        if said != state.reports[index]:
            yield replace(state, reports=_put(state.reports, index, said))

    # --- the control plane -------------------------------------------------------------------------------------------

    def _passes(self, state: State, now: datetime) -> Iterator[State]:
        """One round: all it decides, or only the first part of it, because it dies; or it stalls with the first."""
        for decisions in self._planned(state, now):
            after = self._applied(state, decisions)
            for count in range(1, len(decisions)):
                yield self._applied(state, decisions[:count])
            if state.left.stalls and state.held is None and not isinstance(decisions[0], ChangeRollout):
                left = replace(state.left, stalls=state.left.stalls - 1)
                yield replace(state, held=decisions[0], left=left)
            if after.key() != state.key():
                yield after
                return

    def _planned(self, state: State, now: datetime) -> Iterator[tuple[Decision, ...]]:
        """What each planner decides that decides anything, in their order."""
        stands = state.rollout
        judged = stands and (stands.state, stands.stage, stands.failed, stands.revision, stands.reason)
        known = self._plans.setdefault((state.cells, state.reports, judged, state.deployed, now), [])
        for number, planner in enumerate(PLANNERS):
            if number == len(known):
                known.append(planner(self._view(state, now), SETTINGS, now))
            if known[number]:
                yield known[number]

    def _order(self, state: State, index: int) -> Desired:
        """What this machine would be told now."""
        key = (state.cells, state.deployed, state.rollout is None, index, state.versions[index])
        if key not in self._orders:
            self._orders[key] = self._store(state).desired(self._nodes[index].id)
        return self._orders[key]

    def _applied(self, state: State, decisions: tuple[Decision, ...]) -> State:
        store = self._store(state)
        store.on_write = self._watch(store)
        for decision in decisions:
            try:
                # Applied late, so that the ledger counts every ready cell as available.
                store.apply(decision, LATE)
            except Stale:
                continue
        return replace(
            state,
            cells=tuple(_timeless(cell) for cell in store.cells.values()),
            versions=tuple(store.versions[node.id] for node in self._nodes),
            rollout=store.rollouts.get(NAME),
            deployed=store.deployments[NAME].version,
        )

    def _watch(self, store: Store) -> Callable[[Write], None]:
        def look(write: Write) -> None:
            before, after = write.before, write.after
            if before is None or after is None or before.state is not CellState.READY:
                return
            ready = sum(cell.state is CellState.READY for cell in store.cells.values())
            if after.state is CellState.DRAINING and ready < len(self._nodes) - POLICY.max_unavailable:
                self._violations.append(f"I1: {after.id} was taken down, {ready} serve")
            if after.state is CellState.DRAINING and after.disruption is None:
                self._violations.append(f"I10: {after.id} was taken down without a charge")

        return look

    def _store(self, state: State) -> Store:
        store = Store(self._view(state, EARLY))
        store.versions = Counter(dict(zip((node.id for node in self._nodes), state.versions, strict=True)))
        return store

    def _view(self, state: State, now: datetime) -> FleetView:
        nodes = [self._node(index, report, now) for index, report in enumerate(state.reports)]
        return replace(
            self._fleet,
            nodes={node.id: node for node in nodes},
            cells={cell.id: cell for cell in state.cells},
            deployments={NAME: replace(self._spec, version=state.deployed)},
            rollouts={NAME: state.rollout} if state.rollout is not None else {},
            listening_since=EARLY,
        )

    def _node(self, index: int, report: ReportView, now: datetime) -> NodeView:
        key = (index, report, now)
        if key not in self._seen_nodes:
            seen = replace(report, last_seen_at=now)
            self._seen_nodes[key] = replace(self._nodes[index], report=seen, spare_since=None)
        return self._seen_nodes[key]

    # --- the machines ------------------------------------------------------------------------------------------------

    def _told(self, state: State, index: int, order: Desired) -> State:
        agent = state.agents[index]
        if refusal(agent.order, order, self._nodes[index].id) is not None:
            return state
        return replace(state, agents=_put(state.agents, index, self._converged(replace(agent, order=order))))

    def _converged(self, agent: Agent) -> Agent:
        """Let it take steps until it waits."""
        key = agent.key()
        if key not in self._behaves:
            self._behaves[key] = self._steps_of(agent)
        return self._behaves[key]

    def _steps_of(self, agent: Agent) -> Agent:
        """Ends take no time here; starts do."""
        while True:
            assignment = agent.order.assignment if agent.order is not None else None
            steps = plan_convergence(assignment, _snapshot(agent), 0.0)
            before = agent
            for step in steps:
                match step:
                    case StartEngine(assignment=given):
                        agent = self._started(agent, membership_of(given), given.plan.served_model)
                    case StopEngine() | StopProxy():
                        agent = replace(agent, engine=None, version="", healthy=False)
                    case MarkFailed(membership=member):
                        agent = replace(agent, failed=member)
                    case StartProxy() | _:
                        pass
            if agent == before:
                return agent

    def _started(self, agent: Agent, member: Membership, version: str) -> Agent:
        if member.generation < agent.highest:
            self._violations.append(f"I5: {member} starts after generation {agent.highest}")
        if agent.engine is not None:
            self._violations.append(f"I5: {member} starts beside {agent.engine}")
        return replace(
            agent,
            engine=member,
            version=version,
            healthy=False,
            failed=None,
            highest=max(agent.highest, member.generation),
        )

    def _report(self, agent: Agent) -> ReportView:
        key = agent.key()
        if key not in self._says:
            assignment = agent.order.assignment if agent.order is not None else None
            seen = observe(assignment, _snapshot(agent), 0.0)
            since = self._nodes[0].report.connection_changed_at
            self._says[key] = ReportView(True, EARLY, since, seen.state, seen.cell or "", seen.generation)
        return self._says[key]

    def _is_end(self, state: State) -> bool:
        """No rollout, every cell serves the deployment's version, and agents run what rows say."""
        serving = {agent.engine.cell: agent for agent in state.agents if agent.engine is not None and agent.healthy}
        for cell in state.cells:
            agent = serving.get(cell.id)
            if cell.state is not CellState.READY or cell.version != state.deployed or agent is None:
                return False
            if agent.version != cell.version or agent.engine is None or agent.engine.generation != cell.generation:
                return False
        return state.rollout is None and len(state.cells) == len(self._nodes)


def _snapshot(agent: Agent) -> NodeSnapshot:
    process = RunningProcess(agent.engine, 1, 0.0) if agent.engine is not None else None
    failure = Failure(agent.failed, "crashed", 0.0) if agent.failed is not None else None
    health = Health(ok=agent.healthy) if agent.engine is not None else None
    return NodeSnapshot(
        engine=process, proxy=process, health=health, was_ready=agent.healthy, proxy_phase=Phase.SERVE, failure=failure
    )


def _timeless(cell: CellView) -> CellView:
    unrouted = None if cell.unrouted_at is None else EARLY
    return replace(cell, state_since=EARLY, created_at=EARLY, unrouted_at=unrouted, reason="", restarts=0)


def _put(values: tuple[T, ...], index: int, value: T) -> tuple[T, ...]:
    return (*values[:index], value, *values[index + 1 :])


def _reaching(into: list[list[int]], ends: list[int]) -> set[int]:
    """States from which some way leads to one of the ends."""
    reached, waiting = set(ends), deque(ends)
    while waiting:
        for before in into[waiting.popleft()]:
            if before not in reached:
                reached.add(before)
                waiting.append(before)
    return reached
