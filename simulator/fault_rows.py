"""What decisions about faults change in the simulated rows, as the services of `fleet/faults` do in the real ones."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime

from fleet.faults.planning.liveness import COUNTED, ReplacementBudget, over_budget
from fleet.faults.planning.views import FaultsView, IncidentView, ReplacementView, Rule
from fleet.reconcile.planning.decisions import (
    CloseIncident,
    CloseReplacement,
    NoteIncident,
    OpenIncident,
    ReplaceNode,
    RequestReplacement,
)
from fleet.reconcile.planning.settings import FaultSettings
from fleet.reconcile.planning.snapshot import NodeView

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
