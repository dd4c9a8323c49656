"""A simulated machine with its agent: the live agent's planners decide, this module carries out their steps. Journal
and engine outlive the agent; nothing outlives the machine."""

from dataclasses import dataclass, replace

from engine_agent.node.planning.converge import observe, plan_convergence
from engine_agent.node.planning.node import (
    LIMITS,
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
from engine_agent.protocol.messages import Assignment, Desired, Health, Observed
from engine_agent.protocol.states import EngineState, Phase
from fleet.faults.planning.views import Rung
from simulator.agent_link import DEAD_AFTER_S, AgentLink
from simulator.context import AgentReport, SimulationContext
from simulator.engines import IN_FLIGHT, REQUEST_S, Engine, Engines

POLL_S = 0.2
ENGINE_ENDS_S = 0.5
"""From a request to stop until a healthy engine has exited; a hung engine takes the whole grace period."""
PROXY_STARTS_S = 0.5


@dataclass
class Proxy:
    process: RunningProcess
    phase: Phase | None = None


class Machine(AgentLink):
    """One node. `has_power`, `agent_lives` and `has_network` are the three ways in which it can fail."""

    def __init__(self, node: str, context: SimulationContext, engines: Engines) -> None:
        super().__init__(node, context)
        self.has_power = True
        self.agent_lives = True
        self.cured_by: Rung | None = None
        """The rung that cures its broken device; None: it is well."""
        self.order: Desired | None = None
        self.failure: Failure | None = None
        self.engine: Engine | None = None
        self.engine_stopping = False
        self.proxy: Proxy | None = None
        self.was_ready = False
        self.blind = False
        self.unrouted_since_s: float | None = None
        self._last_failure: Failure | None = None
        self._watched_since_s = 0.0
        self._engines = engines
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
        """Its agent starts, adopts running processes, and connects."""
        self.agent_lives = True
        self._agent_starts += 1
        self._watched_since_s = self._context.queue.now_s
        if self.engine is not None and self.engine.ended:
            self._set_failure(self.engine.membership, "the engine ended while no agent watched it", stable=False)
            self.engine = None
        self.no_contact_since_s = self._context.queue.now_s
        self._connect_soon(0.0)
        self.converge()

    def receive(self, order: Desired) -> None:
        """Accepts an order if it is of a later state; writes it to the journal before acting."""
        if not self.acts:
            return
        if refusal(self.order, order, self.node) is not None:
            self._context.timeline.counts["refused order"] += 1
            return
        if order != self.order:
            self.order = order
            self.converge()

    def converge(self) -> None:
        if not self.acts:
            return
        now_s = self._context.queue.now_s
        snapshot = self._snapshot()
        steps = plan_convergence(self.desired, snapshot, now_s)
        for step in steps:
            self._take_step(step)
        observed = observe(self.desired, self._snapshot() if steps else snapshot, now_s)
        if self.last_report is None or observed != self.last_report.observed:
            self.report(observed)

    def compose_report(self, observed: Observed | None) -> AgentReport:
        snapshot = self._snapshot()
        seen = observed or observe(self.desired, snapshot, self._context.queue.now_s)
        return AgentReport(self.connection_id, seen, _reported_health(seen, snapshot.health), self.in_flight())

    def in_flight(self) -> int:
        """Requests that the cell works on, if this is its leader."""
        if self.engine is None or self.proxy is None or self.engine.ready_since_s is None:
            return 0
        if self.unrouted_since_s is None:
            return IN_FLIGHT
        left = 1.0 - (self._context.queue.now_s - self.unrouted_since_s) / REQUEST_S
        return max(0, round(IN_FLIGHT * left))

    # --- what can happen to it ---------------------------------------------------------------------------------------

    def agent_dies(self) -> None:
        """Only the agent exits: its processes keep running. Its connection closes."""
        if self.acts:
            self.agent_lives = False
            self._disconnect()

    def power_off(self, *, silently: bool = True) -> None:
        """Everything stops. `silently`: the server detects it later."""
        if self.has_power:
            self.has_power = False
            if self.engine is not None:
                self._engines.end(self.engine, "power", by_order=True)
            connection_id = self.connection_id
            delay_s = DEAD_AFTER_S if silently else 0.0
            self._context.queue.after(delay_s, lambda: self._context.server.disconnected(self.node, connection_id))

    def power_on(self) -> None:
        """Boots after `power_off`, with the order that its agent has on disk."""
        if not self.has_power:
            self.has_power, self.engine, self.proxy, self.connection_id = True, None, None, 0
            self.boot()

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
        behaviour = self._context.behaviour(engine.assignment.plan.served_model)
        health = engine.health(behaviour.answers_wrong)
        self.was_ready = self.was_ready or health.ok
        return health

    def _take_step(self, step: Step) -> None:
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
                self._context.queue.after(0.05, lambda: self._phase_set(phase))
            case MarkFailed(membership=member, reason=reason):
                self._set_failure(member, reason, stable=False)
            case Wait(until_s=until_s) if until_s is not None:
                self._wake_at(until_s)
            case _:
                pass

    def _start_engine(self, given: Assignment) -> None:
        if self.no_contact_since_s is None:
            self._context.timeline.starts[self.node, given.cell, given.generation] += 1
        if self.engine is not None and not self.engine.ended:
            self._context.timeline.violation(self._context.queue.now_s, "I5", f"{self.node} starts a second engine")
        self.was_ready = False
        self.unrouted_since_s = None
        self.failure = None
        self.engine_stopping = False
        self.engine = self._engines.start(given, self.engine_ended, self.engine_changed)
        self.engine.blind = self.blind

    def _stop_engine(self, grace_s: float) -> None:
        engine = self.engine
        if engine is None:
            return
        desired = self.desired
        kept = desired is not None and desired.phase is not Phase.STOP and membership_of(desired) == engine.membership
        if self.no_contact_since_s is not None and kept and self.was_ready and self._probe(engine).ok:
            self._context.timeline.violation(
                self._context.queue.now_s, "I9", f"{self.node} stops an engine while disconnected"
            )
        self.engine_stopping = True
        delay_s = grace_s if engine.hung else ENGINE_ENDS_S
        self._context.queue.after(delay_s, lambda: self._engine_stopped(engine))

    def _engine_stopped(self, engine: Engine) -> None:
        if self.engine is engine:
            self._engines.end(engine, "as ordered", by_order=True)
            self.engine, self.engine_stopping, self.was_ready = None, False, False
            self.converge()

    def engine_ended(self, engine: Engine, reason: str) -> None:
        """The engine exited unexpectedly. Without an agent it is detected when one starts again."""
        if self.engine is not engine or not self.acts:
            return
        ran_stably = self.was_ready and self._context.queue.now_s - engine.started_s >= LIMITS.stable_after_s
        if not self.engine_stopping:
            self._set_failure(engine.membership, f"the engine ended: {reason}", stable=ran_stably)
        self.engine, self.engine_stopping, self.was_ready = None, False, False
        self.converge()

    def _set_failure(self, member: Membership, reason: str, *, stable: bool) -> None:
        previous = failure_of(member, self._last_failure)
        self.failure = Failure(member, reason, self._context.queue.now_s, next_in_a_row(previous, stable))
        self._last_failure = self.failure

    def _start_proxy(self, given: Assignment) -> None:
        process = RunningProcess(membership_of(given), self._context.next_serial(), self._context.queue.now_s)
        self.proxy = proxy = Proxy(process)
        self._context.queue.after(PROXY_STARTS_S, lambda: self._proxy_answers(proxy))

    def _proxy_answers(self, proxy: Proxy) -> None:
        if self.proxy is proxy and proxy.phase is None:
            proxy.phase = Phase.SERVE
            self.converge()

    def _stop_proxy(self) -> None:
        if self.proxy is not None:
            self.proxy = gone = Proxy(replace(self.proxy.process, stopping=True), self.proxy.phase)
            self._context.queue.after(0.2, lambda: self._proxy_ended(gone))

    def _proxy_ended(self, proxy: Proxy) -> None:
        if self.proxy is proxy:
            self.proxy = None
            self.converge()

    def _phase_set(self, phase: Phase) -> None:
        if self.proxy is not None and self.has_power and self.proxy.phase is not None:
            self.proxy.phase = phase
            if phase is Phase.DRAIN and self.unrouted_since_s is None:
                self.unrouted_since_s = self._context.queue.now_s
            self.converge()

    def engine_changed(self) -> None:
        self._context.queue.after(POLL_S * self._context.random.random(), self.converge)

    def _wake_at(self, at_s: float) -> None:
        if self._wakes_at_s is None or at_s < self._wakes_at_s:
            self._wakes_at_s = at_s
            self._context.queue.at(at_s, self._wake)

    def _wake(self) -> None:
        self._wakes_at_s = None
        self.converge()


def _reported_health(observed: Observed, probed: Health | None) -> Health | None:
    """The result of the probe, unless the state shows that the engine does not serve."""
    if observed.state in (EngineState.STARTING, EngineState.FAILED) and (probed is None or probed.ok):
        return Health(ok=False, reason=observed.reason)
    return probed
