"""What decisions about faults change in the simulated rows, as the services of `fleet/faults` do in the real ones."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime

from fleet.faults.planning.ladder import RESET_CHECK
from fleet.faults.planning.liveness import COUNTED, ReplacementBudget, over_budget
from fleet.faults.planning.views import Attempt, FaultsView, IncidentView, ReplacementView, Rule, Rung
from fleet.reconcile.planning.decisions import (
    CheckRepair,
    CloseIncident,
    CloseReplacement,
    EndRepair,
    NoteIncident,
    OpenIncident,
    ReplaceNode,
    RequestReplacement,
    TryRepair,
)
from fleet.reconcile.planning.settings import FaultSettings
from fleet.reconcile.planning.snapshot import NodeView
from fleet.reconcile.planning.states import NodeState

FaultDecision = OpenIncident | NoteIncident | CloseIncident | RequestReplacement | ReplaceNode | CloseReplacement


def faults_after(
    faults: FaultsView, decision: FaultDecision, node: NodeView | None, now: datetime, number: int
) -> FaultsView:
    """Returns the rows after the decision. `node`: the one it is about, if any; `number`: of a new row."""
    match decision:
        case OpenIncident():
            return replace(faults, incidents=(*faults.incidents, _opened(decision, now, number)))
        case NoteIncident(incident=known):
            noted = (replace(one, seen_at=now) if one.id == known else one for one in faults.incidents)
            return replace(faults, incidents=tuple(noted))
        case CloseIncident(incident=known):
            return replace(faults, incidents=tuple(one for one in faults.incidents if one.id != known))
        case CloseReplacement(replacement=known):
            return replace(faults, replacements=tuple(one for one in faults.replacements if one.id != known))
        case RequestReplacement() | ReplaceNode():
            begun = isinstance(decision, ReplaceNode)
            before = next((one for one in faults.replacements if one.node == decision.node), None)
            others = tuple(one for one in faults.replacements if one is not before)
            after = _replacement(number, decision, node, begun) if before is None else replace(before, begun=True)
            return replace(faults, replacements=(*others, after))


Repairing = TryRepair | CheckRepair | EndRepair


def repairs_after(faults: FaultsView, decision: Repairing, now: datetime, number: int) -> FaultsView:
    """Returns the rows after a decision about a repair. `number`: of a new attempt."""
    mine = faults.attempts.get(decision.node, ())
    match decision:
        case TryRepair(rung=rung, reason=reason):
            request = "" if rung is Rung.REBOOT else f"r{number}"
            mine = (*mine, Attempt(number, decision.node, rung, reason, now, request))
        case CheckRepair():
            mine = (*mine[:-1], replace(mine[-1], request=f"r{number}"))
        case EndRepair(cured=cured, result=result):
            mine = (*mine[:-1], replace(mine[-1], ended_at=now, cured=cured, result=result))
            if cured:
                faults = _settled(faults, decision.node)
    return replace(faults, attempts={**faults.attempts, decision.node: mine})


def why_not_repaired(faults: FaultsView, decision: Repairing, node: NodeView | None, cell: str) -> str:
    """Returns why the rows no longer allow it; empty if they do."""
    if node is None or node.state is not NodeState.FAULTY or cell:
        return f"node {decision.node} is not out of use"
    running = [attempt for attempt in faults.attempts.get(node.id, ()) if attempt.ended_at is None]
    if isinstance(decision, TryRepair):
        return f"node {node.id} is under repair already" if running else ""
    is_known = bool(running) and running[-1].id == decision.repair
    is_ordered = isinstance(decision, CheckRepair) and is_known and running[-1].request
    return "" if is_known and not is_ordered else f"repair {decision.repair}"


def with_checks(faults: FaultsView, node: str, is_well: bool) -> FaultsView:
    """The results of the deep checks of a node's running attempt."""
    mine = faults.attempts.get(node, ())
    if not mine or mine[-1].ended_at is not None:
        return faults
    checks = ((RESET_CHECK, True, "reset"), ("matmul", is_well, "exact" if is_well else "7 of 9 sums are wrong"))
    return replace(faults, attempts={**faults.attempts, node: (*mine[:-1], replace(mine[-1], checks=checks))})


def _settled(faults: FaultsView, node: str) -> FaultsView:
    signals = tuple(replace(one, settled=True) if one.node == node else one for one in faults.signals)
    return replace(faults, signals=signals, incidents=tuple(one for one in faults.incidents if one.node != node))


def why_stale(faults: FaultsView, decision: FaultDecision, nodes: Mapping[str, NodeView], cell: str) -> str:
    """Returns why the rows no longer allow it; empty if they do. `cell`: the one that the decision's node is in."""
    match decision:
        case CloseReplacement(replacement=known):
            return "" if any(one.id == known for one in faults.replacements) else f"replacement {known} was closed"
        case RequestReplacement() | ReplaceNode():
            return _why_not_replaced(faults, decision, nodes, cell)
        case _:
            return ""


def _why_not_replaced(
    faults: FaultsView, decision: RequestReplacement | ReplaceNode, nodes: Mapping[str, NodeView], cell: str
) -> str:
    if decision.cell != cell:
        return f"node {decision.node} has moved to another cell"
    if any(one.node == decision.node for one in faults.replacements):
        return "" if isinstance(decision, ReplaceNode) else f"node {decision.node} is replaced already"
    if decision.rule is Rule.NOTICE:
        return ""
    node = nodes[decision.node]
    pool = (node.region, node.instance_type)
    counted = {n.machine for n in nodes.values() if (n.region, n.instance_type) == pool and n.state in COUNTED}
    underway = ReplacementBudget(
        pool=pool,
        open=len(
            {
                _machine(one.node, nodes)
                for one in faults.replacements
                if (one.region, one.instance_type) == pool and one.rule is not Rule.NOTICE
            }
            - {node.machine}
        ),
        pool_size=len(counted),
        cell=cell,
        peer=next(
            (
                one.node
                for one in faults.replacements
                if cell and one.cell == cell and _machine(one.node, nodes) != node.machine
            ),
            "",
        ),
    )
    return over_budget(underway, FaultSettings())


def _machine(node: str, nodes: Mapping[str, NodeView]) -> str:
    return nodes[node].machine if node in nodes else node


def with_lost(faults: FaultsView, node: NodeView, cell: str, reason: str, number: int) -> FaultsView:
    """A lost member is being replaced from that time on."""
    replaced = RequestReplacement(node.id, cell, Rule.SILENCE, reason)
    others = tuple(one for one in faults.replacements if one.node != node.id)
    known = next((one for one in faults.replacements if one.node == node.id), None)
    if known is not None:
        return replace(faults, replacements=(*others, replace(known, begun=True, cell=cell)))
    return replace(faults, replacements=(*others, _replacement(number, replaced, node, begun=True)))


def _opened(decision: OpenIncident, now: datetime, number: int) -> IncidentView:
    return IncidentView(
        id=number,
        kind=decision.kind,
        subject=decision.subject,
        opened_at=now,
        seen_at=now,
        summary=decision.summary,
        node=decision.node,
        cell=decision.cell,
        shadow=decision.shadow,
    )


def _replacement(
    number: int, decision: RequestReplacement | ReplaceNode, node: NodeView | None, begun: bool
) -> ReplacementView:
    return ReplacementView(
        id=number,
        node=decision.node,
        rule=decision.rule,
        region=node.region if node else "",
        instance_type=node.instance_type if node else "",
        cell=decision.cell,
        begun=begun,
        reason=decision.reason,
    )
