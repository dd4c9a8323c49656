"""In any sequence of events a node never has two engines or an old generation, and finally reaches its order."""

from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine_agent.node.planning.converge import observe, plan_convergence
from engine_agent.node.planning.node import (
    Failure,
    MarkFailed,
    Membership,
    NodeSnapshot,
    RunningProcess,
    SetProxyPhase,
    StartEngine,
    StartProxy,
    Step,
    StopEngine,
    StopProxy,
    Wait,
    failure_of,
    membership_of,
    next_in_a_row,
    refusal,
)
from engine_agent.protocol.messages import Assignment, Desired, Health
from engine_agent.protocol.states import EngineState, MemberRole, Phase
from tests.engine_agent.orders import assignment, order


@dataclass
class World:
    """A node whose processes live in memory, under the agent's rules for orders."""

    now_s: float = 0.0
    in_force: Desired | None = None
    node: NodeSnapshot = field(default_factory=lambda: NodeSnapshot(no_contact_since_s=0.0))
    starts: list[Membership] = field(default_factory=list)
    pids: int = 0

    @property
    def desired(self) -> Assignment | None:
        return self.in_force.assignment if self.in_force is not None else None

    def receive(self, received: Desired) -> None:
        running = self.node.engine or self.node.proxy
        if refusal(self.in_force, received, "n-1", running.membership if running else None) is None:
            self.in_force = received

    def die(self, reason: str) -> None:
        engine = self.node.engine
        if engine is not None:
            failure = Failure(engine.membership, reason, self.now_s, next_in_a_row(self.node.failure, ran_stably=False))
            self.node = replace(
                self.node,
                engine=None,
                health=None,
                was_ready=False,
                failure=self.node.failure if engine.stopping else failure,
            )

    def proxy_dies(self) -> None:
        proxy = self.node.proxy
        if proxy is not None:
            failure = Failure(proxy.membership, "proxy died", self.now_s)
            kept = self.node.proxy_failure if proxy.stopping else failure
            self.node = replace(self.node, proxy=None, proxy_phase=None, proxy_failure=kept)

    def answer(self, healthy: bool) -> None:
        if self.node.engine is not None:
            self.node = replace(self.node, health=Health(ok=healthy), was_ready=self.node.was_ready or healthy)
        if self.node.proxy is not None and self.node.proxy_phase is None:
            self.node = replace(self.node, proxy_phase=Phase.SERVE)

    def converge(self) -> tuple[Step, ...]:
        steps = plan_convergence(self.desired, self.node, self.now_s)
        for step in steps:
            self._apply(step)
        return steps

    def _apply(self, step: Step) -> None:
        desired, node = self.desired, self.node
        match step:
            case StartEngine(assignment=started):
                assert started == desired
                assert node.engine is None, "two engines at a time"
                assert node.proxy is None or node.proxy.membership == membership_of(started), "an old proxy is left"
                self.starts.append(membership_of(started))
                self.node = replace(node, engine=self._process(started), failure=None, was_ready=False, health=None)
            case StartProxy(assignment=started):
                assert started == desired
                assert node.proxy is None, "two proxies at a time"
                assert started.role is MemberRole.LEADER
                self.node = replace(node, proxy=self._process(started), proxy_failure=None)
            case StopEngine():
                assert node.engine is not None
                assert node.proxy is None or failure_of(node.engine.membership, node.failure), "the proxy ends first"
                self.node = replace(node, engine=replace(node.engine, stopping=True))
            case StopProxy():
                assert node.proxy is not None
                self.node = replace(node, proxy=replace(node.proxy, stopping=True))
            case SetProxyPhase(phase=phase):
                self.node = replace(node, proxy_phase=phase)
            case MarkFailed(membership=given_up, reason=reason):
                self.node = replace(node, failure=Failure(given_up, reason, self.now_s))
            case Wait():
                pass

    def _process(self, desired: Assignment) -> RunningProcess:
        self.pids += 1
        return RunningProcess(membership_of(desired), self.pids, self.now_s)


orders = st.builds(
    order,
    version=st.integers(1, 6),
    given=st.none()
    | st.builds(
        assignment,
        generation=st.integers(1, 4),
        phase=st.sampled_from(Phase),
        rank=st.integers(0, 1),
        cell=st.sampled_from(["c-1", "c-2"]),
    ),
)
happenings = st.lists(
    st.one_of(
        orders,
        st.sampled_from(["engine dies", "proxy dies", "healthy", "unhealthy", "contact lost", "contact back"]),
        st.floats(0.1, 100.0),
    ),
    max_size=40,
)


def happen(world: World, what: Desired | str | float) -> None:
    if isinstance(what, Desired):
        world.receive(what)
    elif isinstance(what, float):
        world.now_s += what
    elif what == "engine dies":
        world.die("died")
    elif what == "proxy dies":
        world.proxy_dies()
    elif what in ("healthy", "unhealthy"):
        world.answer(what == "healthy")
    else:
        world.node = replace(world.node, no_contact_since_s=world.now_s if what == "contact lost" else None)


def live(world: World, whats: list[Desired | str | float]) -> None:
    for what in whats:
        happen(world, what)
        world.converge()


def settle(world: World) -> None:
    """Nothing more goes wrong: what was told to end ends, what runs is healthy, time passes."""
    for _ in range(12):
        if world.node.proxy is not None and world.node.proxy.stopping:
            world.proxy_dies()
        if world.node.engine is not None and world.node.engine.stopping:
            world.die("ended")
        world.answer(healthy=True)
        world.converge()
        world.now_s += 40.0


@pytest.mark.slow
@given(happenings)
def test_never_two_engines_nor_an_engine_that_ends_before_its_proxy(whats: list[Desired | str | float]) -> None:
    live(World(), whats)  # the world itself refuses two engines and a wrong order of ending


@given(st.lists(st.integers(1, 4) | st.sampled_from(["engine dies", "proxy dies", "healthy"]), min_size=4, max_size=30))
def test_a_cell_never_starts_an_older_generation(generations_and_deaths: list[int | str]) -> None:
    world = World()
    for version, what in enumerate(generations_and_deaths, start=1):
        happen(world, what if isinstance(what, str) else order(version, given=assignment(generation=what)))
        world.converge()
    started = [membership.generation for membership in world.starts]
    assert started == sorted(started)


@given(happenings)
def test_in_contact_a_generation_is_started_once_however_often_its_engine_dies(
    whats: list[Desired | str | float],
) -> None:
    world = World(node=NodeSnapshot())
    live(world, [what for what in whats if _keeps_serving(what)])
    for before, after in pairwise(world.starts):
        assert before != after


def _keeps_serving(what: Desired | str | float) -> bool:
    """Neither loses contact nor takes the node out of its cell, after which an order may start the same again."""
    if isinstance(what, Desired):
        return what.assignment is not None and what.assignment.phase is Phase.SERVE
    return what not in ("contact lost", "contact back")


@given(happenings)
@example([order(1, assignment(generation=2)), order(1, None), order(1, assignment(generation=1))])
def test_when_nothing_more_goes_wrong_the_node_ends_up_as_told_or_says_failed(
    whats: list[Desired | str | float],
) -> None:
    world = World()
    live(world, whats)
    settle(world)
    steps = world.converge()
    assert all(isinstance(step, Wait) for step in steps)
    node, desired = world.node, world.desired
    if desired is None or desired.phase is Phase.STOP:
        assert (node.engine, node.proxy) == (None, None)
        return
    state = observe(desired, node, world.now_s).state
    if node.failure is not None and failure_of(membership_of(desired), node.failure):
        assert state is EngineState.FAILED
        assert node.no_contact_since_s is None or desired.phase is Phase.DRAIN
    elif desired.phase is Phase.SERVE:
        assert state is EngineState.READY
        assert (node.proxy is not None) == (desired.role is MemberRole.LEADER)


@given(happenings)
def test_a_node_cut_off_for_ever_serves_again_whatever_died(whats: list[Desired | str | float]) -> None:
    world = World()
    live(world, whats)
    happen(world, "contact lost")
    settle(world)
    if world.desired is not None and world.desired.phase is Phase.SERVE:
        assert observe(world.desired, world.node, world.now_s).state is EngineState.READY


@given(happenings)
def test_repeating_the_order_in_force_changes_nothing(whats: list[Desired | str | float]) -> None:
    world = World()
    live(world, whats)
    settle(world)
    if world.in_force is not None:
        before = world.node
        world.receive(world.in_force)
        assert all(isinstance(step, Wait) for step in world.converge())
        assert world.node == before
