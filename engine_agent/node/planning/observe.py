"""What a node reports, from its order and what runs on it. It decides state and reason only, never steps.

`ready` needs a healthy engine and, on the leader, a proxy that answers. What the agent repairs by itself (a proxy) and
what may pass (bad health of an engine that lives) is `starting` with its reason: how long that may last is for the
control plane to judge. What ended, or answers what its version must not, needs a new generation and is `failed`.
"""

from engine_agent.node.planning.node import LIMITS, ConvergeLimits, NodeSnapshot, failure_of, membership_of
from engine_agent.protocol.messages import Assignment, Health, Observed
from engine_agent.protocol.states import EngineState, MemberRole, Phase

StateAndReason = tuple[EngineState, str]


def observe(desired: Assignment | None, node: NodeSnapshot, now_s: float, limits: ConvergeLimits = LIMITS) -> Observed:
    """The node's state in terms of the order in force: the cell and generation are the order's, not the process's."""
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
    return EngineState.DRAINING, "ending the " + ("cell proxy" if node.proxy is not None else "engine")


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
        return _draining(node)
    if node.engine is None:
        return EngineState.STARTING, "the engine is about to start"
    if desired.role is MemberRole.LEADER:
        trouble = _proxy_trouble(desired, node, now_s, limits)
        if trouble is not None:
            return trouble
    return _by_health(node.health)


def _draining(node: NodeSnapshot) -> StateAndReason:
    return (EngineState.DRAINING, "") if node.engine is not None else (EngineState.IDLE, "nothing runs here to drain")


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
