"""A simulated machine with its agent: the agent's own planners decide, this world only does what they say.

The journal outlives the agent, the engine outlives the agent, and neither outlives the machine.
"""

from dataclasses import dataclass, replace

from engine_agent.planning.converge import plan_convergence
from engine_agent.planning.node import (
    LIMITS,
    Failure,
    Membership,
    NodeSnapshot,
    RunningProcess,
    failure_of,
    membership_of,
    next_in_a_row,
)
from engine_agent.planning.observe import observe
from engine_agent.planning.orders import refusal
from engine_agent.planning.steps import (
    MarkFailed,
    SetProxyPhase,
    StartEngine,
    StartProxy,
    Step,
    StopEngine,
    StopProxy,
    Wait,
)
from engine_agent.protocol.messages import Assignment, Desired, Health, Observed
from engine_agent.protocol.states import EngineState, Phase
from simulator.engines import IN_FLIGHT, REQUEST_S, Engine, Engines
from simulator.site import Said, Site

REPORT_EVERY_S = 2.0
RECONNECT_S = (0.2, 5.0)
POLL_S = 0.2
ENGINE_ENDS_S = 0.5
"""From a request to end until an engine that obeys has ended; one that hangs takes the whole grace."""
PROXY_STARTS_S = 0.5
LINE_DEAD_AFTER_S = 20.0
"""Silence after which both ends of a line give it up."""


@dataclass
class Proxy:
    """The cell proxy beside a leader."""

    process: RunningProcess
    phase: Phase | None = None


class Machine:
    """One node. `has_power`, `agent_lives` and `has_line` are the three ways in which it can be gone."""

    def __init__(self, node: str, site: Site, engines: Engines) -> None:
        self.node = node
        self.has_power = True
        self.agent_lives = True
        self.has_line = True
        self.connection = 0
        self.order: Desired | None = None
        self.failure: Failure | None = None
        self.engine: Engine | None = None
        self.engine_stopping = False
        self.proxy: Proxy | None = None
        self.was_ready = False
        self.blind = False
        self.no_contact_since_s: float | None = site.queue.now_s
        self.unrouted_since_s: float | None = None
        self.said: Said | None = None
        self._last_failure: Failure | None = None
        self._watched_since_s = 0.0
        self._site = site
        self._engines = engines
        self._life = 0
        self._beats = 0
        self._wakes_at_s: float | None = None

    # --- the agent ---------------------------------------------------------------------------------------------------

    @property
    def acts(self) -> bool:
        """Whether its agent can decide anything now."""
        return self.has_power and self.agent_lives

    @property
    def desired(self) -> Assignment | None:
        return self.order.assignment if self.order is not None else None

    def boot(self) -> None:
        """Its agent starts, adopts what runs, and connects."""
        self.agent_lives = True
        self._life += 1
        self._watched_since_s = self._site.queue.now_s
        if self.engine is not None and self.engine.ended:
            self._set_failure(self.engine.membership, "the engine ended while no agent watched it", stable=False)
            self.engine = None
        self.no_contact_since_s = self._site.queue.now_s
        self._connect_soon(0.0)
        self.converge()

    def receive(self, order: Desired) -> None:
        """Take an order if it is of a later state; journal it before acting."""
        if not self.acts:
            return
        if refusal(self.order, order, self.node) is not None:
            self._site.journal.counts["refused order"] += 1
            return
        if order != self.order:
            self.order = order
            self.converge()

    def converge(self) -> None:
        """Plan, do, and say what is so if that changed."""
        if not self.acts:
            return
        now_s = self._site.queue.now_s
        snapshot = self._snapshot()
        for step in plan_convergence(self.desired, snapshot, now_s):
            self._take(step)
        observed = observe(self.desired, self._snapshot(), now_s)
        if self.said is None or observed != self.said.observed:
            self.say(observed)

    def say(self, observed: Observed | None = None) -> None:
        """Report, now."""
        seen = observed or observe(self.desired, self._snapshot(), self._site.queue.now_s)
        self.said = Said(self.connection, seen, self._health_of(seen), self.in_flight())
        self._send(self.said)
        if self.connection and self._beats != self.connection:
            self._beats = self.connection
            self._beat_later(self.connection)

    def report_again(self) -> None:
        """Say the whole state, as after a silence."""
        if self.acts:
            self.converge()
            self.say()

    def in_flight(self) -> int:
        """Requests that the cell works on, if this is its leader."""
        if self.engine is None or self.proxy is None or self.engine.ready_since_s is None:
            return 0
        if self.unrouted_since_s is None:
            return IN_FLIGHT
        left = 1.0 - (self._site.queue.now_s - self.unrouted_since_s) / REQUEST_S
        return max(0, round(IN_FLIGHT * left))

    # --- what can happen to it ---------------------------------------------------------------------------------------

    def agent_dies(self) -> None:
        """Only the agent: what it started runs on. Its connection closes at once."""
        if self.acts:
            self.agent_lives = False
            self._disconnect()

    def power_off(self, *, silently: bool = True) -> None:
        """Everything ends. Silently: the other end of its line finds out later."""
        if self.has_power:
            self.has_power = False
            if self.engine is not None:
                self._engines.end(self.engine, "power", by_order=True)
            connection = self.connection
            delay_s = LINE_DEAD_AFTER_S if silently else 0.0
            self._site.queue.after(delay_s, lambda: self._site.server.left(self.node, connection))

    def cut_line(self) -> None:
        """Nothing comes through in either direction; both ends find out later."""
        if self.has_line:
            self.has_line = False
            connection = self.connection
            self._site.queue.after(LINE_DEAD_AFTER_S, lambda: self._line_dead(connection))

    def mend_line(self) -> None:
        if not self.has_line:
            self.has_line = True
            if not self.connection:
                self._connect_soon(0.0)

    def disconnected(self, connection: int) -> None:
        """The server closed the line, or ended."""
        if connection == self.connection:
            self.connection = 0
            self.no_contact_since_s = self._site.queue.now_s
            if self.acts:
                self._connect_soon()

    # --- its processes -----------------------------------------------------------------------------------------------

    def _snapshot(self) -> NodeSnapshot:
        engine, proxy, health = self.engine, self.proxy, None
        running = None
        if engine is not None:
            watched_s = max(engine.started_s, self._watched_since_s)
            running = RunningProcess(engine.membership, engine.pid, watched_s, self.engine_stopping)
            leads = engine.is_leader
            if not leads or (proxy is not None and proxy.process.membership == engine.membership and proxy.phase):
                health = self._probe(engine)
        return NodeSnapshot(
            engine=running,
            proxy=proxy.process if proxy is not None else None,
            health=health,
            was_ready=self.was_ready,
            proxy_phase=proxy.phase if proxy is not None else None,
            failure=self.failure,
            no_contact_since_s=self.no_contact_since_s,
        )

    def _probe(self, engine: Engine) -> Health:
        behaviour = self._site.behaviour(engine.assignment.plan.served_model)
        health = engine.health(behaviour.answers_wrong)
        self.was_ready = self.was_ready or health.ok
        return health

    def _health_of(self, observed: Observed) -> Health | None:
        health = self._snapshot().health
        if observed.state in (EngineState.STARTING, EngineState.FAILED) and (health is None or health.ok):
            return Health(ok=False, reason=observed.reason)
        return health

    def _take(self, step: Step) -> None:
        match step:
            case StartEngine(assignment=given):
                self._start_engine(given)
            case StopEngine(grace_s=grace_s):
                self._stop_engine(grace_s)
            case StartProxy(assignment=given):
                self._start_proxy(given)
            case StopProxy():
                self._stop_proxy()
            case SetProxyPhase(phase=phase):
                self._site.queue.after(0.05, lambda: self._phase_set(phase))
            case MarkFailed(membership=member, reason=reason):
                self._set_failure(member, reason, stable=False)
            case Wait(until_s=until_s) if until_s is not None:
                self._wake_at(until_s)
            case _:
                pass

    def _start_engine(self, given: Assignment) -> None:
        if self.no_contact_since_s is None:
            self._site.journal.starts[self.node, given.cell, given.generation] += 1
        if self.engine is not None and not self.engine.ended:
            self._site.journal.violation(self._site.queue.now_s, "I5", f"{self.node} starts a second engine")
        self.was_ready = False
        self.unrouted_since_s = None
        self.failure = None
        self.engine_stopping = False
        self.engine = self._engines.start(given, self.engine_ended, self.news)
        self.engine.blind = self.blind

    def _stop_engine(self, grace_s: float) -> None:
        engine = self.engine
        if engine is None:
            return
        desired = self.desired
        kept = desired is not None and desired.phase is not Phase.STOP and membership_of(desired) == engine.membership
        if self.no_contact_since_s is not None and kept and self.was_ready and self._probe(engine).ok:
            self._site.journal.violation(self._site.queue.now_s, "I9", f"{self.node} ends an engine while cut off")
        self.engine_stopping = True
        delay_s = grace_s if engine.hung else ENGINE_ENDS_S
        self._site.queue.after(delay_s, lambda: self._engine_stopped(engine))

    def _engine_stopped(self, engine: Engine) -> None:
        if self.engine is engine:
            self._engines.end(engine, "as ordered", by_order=True)
            self.engine, self.engine_stopping, self.was_ready = None, False, False
            self.converge()

    def engine_ended(self, engine: Engine, reason: str) -> None:
        """By itself. Without an agent nobody sees it before one starts again."""
        if self.engine is not engine or not self.acts:
            return
        ran_stably = self.was_ready and self._site.queue.now_s - engine.started_s >= LIMITS.stable_after_s
        if not self.engine_stopping:
            self._set_failure(engine.membership, f"the engine ended: {reason}", stable=ran_stably)
        self.engine, self.engine_stopping, self.was_ready = None, False, False
        self.converge()

    def _set_failure(self, member: Membership, reason: str, *, stable: bool) -> None:
        previous = failure_of(member, self._last_failure)
        self.failure = Failure(member, reason, self._site.queue.now_s, next_in_a_row(previous, stable))
        self._last_failure = self.failure

    def _start_proxy(self, given: Assignment) -> None:
        process = RunningProcess(membership_of(given), self._site.next_serial(), self._site.queue.now_s)
        self.proxy = proxy = Proxy(process)
        self._site.queue.after(PROXY_STARTS_S, lambda: self._proxy_answers(proxy))

    def _proxy_answers(self, proxy: Proxy) -> None:
        if self.proxy is proxy and proxy.phase is None:
            proxy.phase = Phase.SERVE
            self.converge()

    def _stop_proxy(self) -> None:
        if self.proxy is not None:
            self.proxy = gone = Proxy(replace(self.proxy.process, stopping=True), self.proxy.phase)
            self._site.queue.after(0.2, lambda: self._proxy_ended(gone))

    def _proxy_ended(self, proxy: Proxy) -> None:
        if self.proxy is proxy:
            self.proxy = None
            self.converge()

    def _phase_set(self, phase: Phase) -> None:
        if self.proxy is not None and self.has_power and self.proxy.phase is not None:
            self.proxy.phase = phase
            if phase is Phase.DRAIN and self.unrouted_since_s is None:
                self.unrouted_since_s = self._site.queue.now_s
            self.converge()

    def news(self) -> None:
        """Something about the engine changed; the next poll sees it."""
        self._site.queue.after(POLL_S * self._site.random.random(), self.converge)

    def _wake_at(self, at_s: float) -> None:
        if self._wakes_at_s is None or at_s < self._wakes_at_s:
            self._wakes_at_s = at_s
            self._site.queue.at(at_s, self._wake)

    def _wake(self) -> None:
        self._wakes_at_s = None
        self.converge()

    # --- its line ----------------------------------------------------------------------------------------------------

    def _connect_soon(self, delay_s: float | None = None) -> None:
        low, high = RECONNECT_S
        pause_s = low + (high - low) * self._site.random.random() ** 2 if delay_s is None else delay_s
        life = self._life
        self._site.queue.after(pause_s, lambda: self._connect(life))

    def _connect(self, life: int) -> None:
        if life != self._life or not self.acts or self.connection or not self.has_line:
            return
        self.connection = connection = self._site.next_serial()
        self.no_contact_since_s = None
        self._site.server.joined(self.node, connection)
        if self.connection == connection:
            self.say()

    def _disconnect(self) -> None:
        connection, self.connection = self.connection, 0
        self.no_contact_since_s = self._site.queue.now_s
        if connection and self.has_line:
            self._site.server.left(self.node, connection)

    def _line_dead(self, connection: int) -> None:
        self._site.server.left(self.node, connection)
        if connection and connection == self.connection:
            self.connection = 0
            self.no_contact_since_s = self._site.queue.now_s
            if self.acts:
                self.converge()
                self._connect_soon()

    def _beat_later(self, connection: int) -> None:
        pause_s = REPORT_EVERY_S * (0.9 + 0.2 * self._site.random.random())
        self._site.queue.after(pause_s, lambda: self._beat(connection))

    def _beat(self, connection: int) -> None:
        """Say it again, unless nothing is news and that is known."""
        if connection != self.connection or not self.acts:
            return
        self.converge()
        self.say()
        if self._site.steady and self.said is not None and self._site.server.knows(self.node, self.said):
            self._beats = 0
        else:
            self._beat_later(connection)

    def _send(self, said: Said) -> None:
        if said.connection and self.has_line:
            self._site.network.carry(lambda: self._site.server.heard(self.node, said))
