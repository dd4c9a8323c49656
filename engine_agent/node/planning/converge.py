"""The next steps of a node and the state that it reports, from its order and its processes. These are the agent's only
decisions about processes.

A cell lives and dies as a whole. An engine that exited is therefore not restarted within its generation while the
control plane is reachable: the node reports `failed` with the reason, and the control plane starts all members under a
new generation. Without contact this is impossible, and a node must keep running its last order (I9, I11): it restarts
the engine in the same generation, after a backoff. Contact must be missing for `contact_grace_s`, so that a restart of
the control plane does not race with the new generation that it is about to assign. A proxy holds no state and is always
restarted immediately.

This keeps I5, which orders orders: a repeated order still changes nothing, and the restarted one is the last accepted
order. It keeps I2, because every rank that restarts this way has the same generation. It is safe when only some nodes
are cut off: peers in contact move to a higher generation, whose secret and rendezvous port the isolated rank does not
have, so its engine never joins; the routing table decides which cell gets requests.

Never: two engines at a time, an engine of a lower generation, a start before all of the old start has ended.

The reported state is `ready` with a healthy engine and, on the leader, an answering proxy. `starting` with a reason
stands for what the agent repairs (a proxy) and what may pass (bad health of a running engine); the control plane
decides how long that may last. An engine that exited or answers wrongly needs a new generation and is `failed`."""

from engine_agent.node.planning.node import (
    LIMITS,
    ConvergeLimits,
    Failure,
    MarkFailed,
    Membership,
    NodeSnapshot,
    RunningProcess,
    SetProxyPairs,
    SetProxyPhase,
    StartEngine,
    StartProxy,
    Step,
    StopEngine,
    StopProxy,
    Wait,
    failure_of,
    membership_of,
    restart_backoff_s,
)
from engine_agent.protocol.messages import Assignment, Health, Observed
from engine_agent.protocol.proxy_messages import pairs_of
from engine_agent.protocol.states import EngineState, MemberRole, Phase

Steps = tuple[Step, ...]


def plan_convergence(
    desired: Assignment | None, node: NodeSnapshot, now_s: float, limits: ConvergeLimits = LIMITS
) -> Steps:
    """The steps to take now, in this order; empty when the node is as ordered and nothing is awaited."""
    if desired is None:
        return _plan_stop(node.engine, node.proxy, "this node is in no cell", limits)
    wanted = membership_of(desired)
    newer = _newer_than(wanted, node)
    if newer is not None:
        return (Wait(None, f"the order is of generation {wanted.generation}, generation {newer} runs here"),)
    if desired.phase is Phase.STOP:
        return _plan_stop(node.engine, node.proxy, f"{wanted.cell} was ordered to stop", limits)
    old_engine, old_proxy = _if_not_wanted(wanted, node.engine), _if_not_wanted(wanted, node.proxy)
    if old_engine is not None or old_proxy is not None:
        reason = f"generation {wanted.generation} of {wanted.cell} takes this node"
        return _plan_stop(old_engine, old_proxy, reason, limits)
    return _plan_member(desired, node, now_s, limits)


def _plan_member(desired: Assignment, node: NodeSnapshot, now_s: float, limits: ConvergeLimits) -> Steps:
    """Steps while nothing of another start runs here and this one must serve or drain."""
    failure = failure_of(membership_of(desired), node.failure)
    if failure is not None and node.engine is not None:
        return _plan_stop(node.engine, None, failure.reason, limits)
    if desired.phase is Phase.DRAIN:
        return _plan_drain(node)
    if failure is not None:
        return _plan_restart(desired, node, failure, now_s, limits)
    return _plan_serve(desired, node, now_s, limits)


def _plan_stop(
    engine: RunningProcess | None, proxy: RunningProcess | None, reason: str, limits: ConvergeLimits
) -> Steps:
    """The proxy first: otherwise it would send requests to a stopping engine."""
    if proxy is not None:
        return (_wait_for_end_of("cell proxy") if proxy.stopping else StopProxy(limits.proxy_stop_grace_s, reason),)
    if engine is not None:
        return (_wait_for_end_of("engine") if engine.stopping else StopEngine(limits.engine_stop_grace_s, reason),)
    return ()


def _plan_drain(node: NodeSnapshot) -> Steps:
    """A drain starts nothing: an exited process has no requests in flight."""
    if node.proxy is not None and not node.proxy.stopping and node.proxy_phase is Phase.SERVE:
        return (SetProxyPhase(Phase.DRAIN, "the cell takes no new requests"),)
    return ()


def _plan_restart(
    desired: Assignment, node: NodeSnapshot, failure: Failure, now_s: float, limits: ConvergeLimits
) -> Steps:
    if node.no_contact_since_s is None:
        return (Wait(None, f"the control plane restarts the cell: {failure.reason}"),)
    restart_at_s = max(
        failure.at_s + restart_backoff_s(failure.in_a_row, limits), node.no_contact_since_s + limits.contact_grace_s
    )
    if now_s < restart_at_s:
        return (Wait(restart_at_s, f"no contact to report to; restarting after {failure.reason}"),)
    start = StartEngine(
        desired, f"no contact with the control plane, restart {failure.in_a_row} after: {failure.reason}"
    )
    return (start, *_plan_proxy(desired, node, now_s, limits))


def _plan_serve(desired: Assignment, node: NodeSnapshot, now_s: float, limits: ConvergeLimits) -> Steps:
    engine = node.engine
    if engine is None:
        start = StartEngine(desired, f"generation {desired.generation} of {desired.cell} is to serve")
        return (start, *_plan_proxy(desired, node, now_s, limits))
    if engine.stopping:
        return (_wait_for_end_of("engine"),)
    steps = _plan_proxy(desired, node, now_s, limits)
    if node.was_ready:
        return steps
    ready_by_s = engine.watched_since_s + desired.plan.ready_timeout_s
    if now_s >= ready_by_s:
        seen = node.health.reason if node.health is not None else "it never answered"
        reason = f"not ready within {desired.plan.ready_timeout_s:g} s: {seen}"
        return (MarkFailed(membership_of(desired), reason), StopEngine(limits.engine_stop_grace_s, reason))
    return steps or (Wait(ready_by_s, "the engine is starting"),)


def _plan_proxy(desired: Assignment, node: NodeSnapshot, now_s: float, limits: ConvergeLimits) -> Steps:
    if desired.role is not MemberRole.LEADER:
        return ()
    proxy = node.proxy
    if proxy is None:
        return (_plan_proxy_start(desired, node, now_s, limits),)
    if proxy.stopping:
        return (_wait_for_end_of("cell proxy"),)
    if _is_hung(proxy, node.proxy_silent_since_s, now_s, limits):
        return (StopProxy(limits.proxy_stop_grace_s, f"no answer for {limits.proxy_silent_s:g} s"),)
    if node.proxy_phase is Phase.DRAIN:
        return (SetProxyPhase(Phase.SERVE, "the cell takes requests"),)
    pairs = pairs_of(desired)
    if node.proxy_pairs is not None and node.proxy_pairs != pairs.name:
        return (SetProxyPairs(pairs, "the cell has other pairs"),)
    return ()


def _plan_proxy_start(desired: Assignment, node: NodeSnapshot, now_s: float, limits: ConvergeLimits) -> Step:
    failure = failure_of(membership_of(desired), node.proxy_failure)
    if failure is None:
        return StartProxy(desired, "the leader needs its cell proxy")
    pause_s = 0.0 if failure.in_a_row == 1 else restart_backoff_s(failure.in_a_row - 1, limits)
    if now_s < failure.at_s + pause_s:
        return Wait(failure.at_s + pause_s, f"restarting the cell proxy: {failure.reason}")
    return StartProxy(desired, failure.reason)


def _is_hung(proxy: RunningProcess, silent_since_s: float | None, now_s: float, limits: ConvergeLimits) -> bool:
    if silent_since_s is None or now_s - proxy.watched_since_s < limits.proxy_start_s:
        return False
    return now_s - silent_since_s >= limits.proxy_silent_s


def _newer_than(wanted: Membership, node: NodeSnapshot) -> int | None:
    """The generation of the same cell that runs here, if it is above the ordered one."""
    running = [process.membership for process in (node.engine, node.proxy) if process is not None]
    generations = [one.generation for one in running if one.cell == wanted.cell]
    newest = max(generations, default=wanted.generation)
    return newest if newest > wanted.generation else None


def _if_not_wanted(wanted: Membership, process: RunningProcess | None) -> RunningProcess | None:
    return process if process is not None and process.membership != wanted else None


def _wait_for_end_of(what: str) -> Wait:
    return Wait(None, f"the {what} is stopping")


StateAndReason = tuple[EngineState, str]


def observe(desired: Assignment | None, node: NodeSnapshot, now_s: float, limits: ConvergeLimits = LIMITS) -> Observed:
    """The node's state under the order in force; cell and generation are the order's, not the process's."""
    if desired is None:
        state, reason = _stopping(node)
        leaving = node.engine or node.proxy
        cell = leaving.membership.cell if leaving is not None else None
        generation = leaving.membership.generation if leaving is not None else 0
        return Observed(state=state, cell=cell, generation=generation, reason=reason)
    state, reason = _state(desired, node, now_s, limits)
    engine = node.engine
    pid = engine.pid if engine is not None and engine.membership == membership_of(desired) else None
    return Observed(
        state=state,
        cell=desired.cell,
        generation=desired.generation,
        rank=desired.rank,
        reason=reason,
        engine_pid=pid,
    )


def _stopping(node: NodeSnapshot) -> StateAndReason:
    if node.engine is None and node.proxy is None:
        return EngineState.IDLE, ""
    return EngineState.DRAINING, "stopping the " + ("cell proxy" if node.proxy is not None else "engine")


def _state(desired: Assignment, node: NodeSnapshot, now_s: float, limits: ConvergeLimits) -> StateAndReason:
    if desired.phase is Phase.STOP:
        return _stopping(node)
    wanted = membership_of(desired)
    for process in (node.engine, node.proxy):
        if process is not None and process.membership != wanted:
            old = process.membership
            return EngineState.STARTING, f"generation {old.generation} of {old.cell} has not ended yet"
    failure = failure_of(wanted, node.failure)
    if failure is not None:
        return EngineState.FAILED, failure.reason
    if desired.phase is Phase.DRAIN:
        is_idle = node.engine is None
        return (EngineState.IDLE, "nothing runs here to drain") if is_idle else (EngineState.DRAINING, "")
    if node.engine is None:
        return EngineState.STARTING, node.before_start or "the engine is about to start"
    if desired.role is MemberRole.LEADER:
        trouble = _proxy_trouble(desired, node, now_s, limits)
        if trouble is not None:
            return trouble
    return _by_health(node.health)


def _proxy_trouble(
    desired: Assignment, node: NodeSnapshot, now_s: float, limits: ConvergeLimits
) -> StateAndReason | None:
    failure = failure_of(membership_of(desired), node.proxy_failure)
    if failure is not None and failure.in_a_row > limits.proxy_failures_tolerated:
        return EngineState.FAILED, f"{failure.in_a_row} times in a row: {failure.reason}"
    if node.proxy is None:
        return EngineState.STARTING, failure.reason if failure is not None else "the cell proxy is about to start"
    if node.proxy.stopping:
        return EngineState.STARTING, "the cell proxy is being restarted"
    if node.proxy_phase is None:
        return EngineState.STARTING, "the cell proxy has not answered yet"
    silent_since_s = node.proxy_silent_since_s
    if silent_since_s is not None and now_s - silent_since_s >= limits.proxy_silence_tolerated_s:
        return EngineState.STARTING, "the cell proxy does not answer"
    return None


def _by_health(health: Health | None) -> StateAndReason:
    if health is None:
        return EngineState.STARTING, "no answer yet"
    if health.ok:
        return EngineState.READY, ""
    return EngineState.FAILED if health.wrong else EngineState.STARTING, health.reason
