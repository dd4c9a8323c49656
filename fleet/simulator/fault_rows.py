"""What decisions about faults do to the simulated rows, as `fleet.services.{incident,replacement}` do to the real ones.
It decides nothing."""

from dataclasses import replace
from datetime import datetime

from fleet.planning.fault_decisions import (
    CloseIncident,
    CloseReplacement,
    NoteIncident,
    OpenIncident,
    ReplaceNode,
    WishReplacement,
)
from fleet.planning.fault_views import FaultsView, IncidentView, ReplacementView
from fleet.planning.snapshot import NodeView

FaultDecision = OpenIncident | NoteIncident | CloseIncident | WishReplacement | ReplaceNode | CloseReplacement


def faults_after(faults: FaultsView, decision: FaultDecision, node: NodeView | None, now: datetime) -> FaultsView:
    """The rows once the decision is carried out. `node`: the one that it speaks of, if any."""
    match decision:
        case OpenIncident():
            return replace(faults, incidents=(*faults.incidents, _opened(faults, decision, now)))
        case NoteIncident(incident=known):
            noted = (replace(one, seen_at=now) if one.id == known else one for one in faults.incidents)
            return replace(faults, incidents=tuple(noted))
        case CloseIncident(incident=known):
            return replace(faults, incidents=tuple(one for one in faults.incidents if one.id != known))
        case CloseReplacement(replacement=known):
            return replace(faults, replacements=tuple(one for one in faults.replacements if one.id != known))
        case WishReplacement() | ReplaceNode():
            others = tuple(one for one in faults.replacements if one.node != decision.node)
            begun = isinstance(decision, ReplaceNode)
            return replace(faults, replacements=(*others, _replacement(faults, decision, node, begun)))


def _opened(faults: FaultsView, decision: OpenIncident, now: datetime) -> IncidentView:
    return IncidentView(
        id=max((one.id for one in faults.incidents), default=0) + 1,
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
    faults: FaultsView, decision: WishReplacement | ReplaceNode, node: NodeView | None, begun: bool
) -> ReplacementView:
    return ReplacementView(
        id=max((one.id for one in faults.replacements), default=0) + 1,
        node=decision.node,
        rule=decision.rule,
        region=node.region if node else "",
        instance_type=node.instance_type if node else "",
        cell=decision.cell,
        begun=begun,
        reason=decision.reason,
    )
