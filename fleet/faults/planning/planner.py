"""Decides what follows from faults: incidents with their evidence, and replacements of single faulty nodes. It never
blames a machine for a shared fault, replaces nothing where too many nodes are unhealthy, and does nothing while no
agent reports."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any, TypeVar

from fleet.cells.planner import drain_ended
from fleet.faults.planning.announced import Notices
from fleet.faults.planning.liveness import CONDEMNED, Guards, are_all_silent, losses_held_back, unreachable_nodes
from fleet.faults.planning.repairs import ladder_of, plan_repairs
from fleet.faults.planning.slow import find_slow
from fleet.faults.planning.suspicions import CommonCause, Suspicion, find_common_causes, find_suspicions
from fleet.faults.planning.views import (
    NEEDS_OPERATOR,
    IncidentKind,
    IncidentView,
    NoticeView,
    ReplacementView,
    Rule,
    RuleMode,
)
from fleet.reconcile.planning.decisions import (
    ChangeRollout,
    CloseIncident,
    CloseReplacement,
    CordonNode,
    Decision,
    DrainCell,
    NoteIncident,
    OpenIncident,
    ReplaceNode,
    RequestReplacement,
)
from fleet.reconcile.planning.settings import FleetSettings, Ledger
from fleet.reconcile.planning.snapshot import CellView, FleetView, NodeView
from fleet.reconcile.planning.states import CellState, DisruptionCause, NodeState, NoticeKind, RolloutState
from kernel.ages import age_text

HALTED_WITH_S = 10.0
"""A rollout that advanced within this time of the incident is halted as well. One that was resumed later is not."""
MOVING = frozenset({RolloutState.RUNNING, RolloutState.BAKING})
KINDS = frozenset(IncidentKind)
SIGNALLED = frozenset({IncidentKind.HARDWARE, IncidentKind.SOFT, IncidentKind.UNATTRIBUTED})


@dataclass
class _Pass:
    """Working memory of one plan. `seen`: the incidents whose fault is present now."""

    fleet: FleetView
    settings: FleetSettings
    now: datetime
    guards: Guards
    decisions: list[Decision] = field(default_factory=list)
    seen: set[tuple[str, str]] = field(default_factory=set)
    handled: set[str] = field(default_factory=set)

    def incident(self, kind: str, subject: str) -> IncidentView | None:
        return self._open_incidents.get((kind, subject))

    @cached_property
    def _open_incidents(self) -> dict[tuple[str, str], IncidentView]:
        return {(one.kind, one.subject): one for one in reversed(self.fleet.faults.incidents)}

    @cached_property
    def notices(self) -> Notices:
        return Notices(self.fleet, self.settings, self.now)

    @cached_property
    def ledger(self) -> Ledger:
        """Includes what this pass has charged."""
        return Ledger(self.fleet, self.settings.ledger, self.now)

    def cell_of(self, node: str) -> CellView | None:
        return self.fleet.cell_of(node)


def plan_faults(fleet: FleetView, settings: FleetSettings, now: datetime) -> tuple[Decision, ...]:
    """Incidents to open, update and close, and actions on single nodes."""
    work = _Pass(fleet, settings, now, Guards(fleet, settings, now))
    if are_all_silent(fleet, settings, now):
        _report_incident(work, IncidentKind.ALL_SILENT, "fleet", "No agent reports: the control plane is cut off", {})
        return tuple(work.decisions)
    if fleet.listening_since is None:
        return ()
    slow = find_slow(fleet, settings.faults)
    causes = find_common_causes(fleet, slow, settings.faults, now)
    for cause in causes:
        _halt_rollouts(work, cause)
    for freeze in work.guards.freezes:
        evidence = {"unhealthy": list(freeze.unhealthy), "nodes": freeze.size}
        summary = f"Nothing is replaced: {freeze.reason}"
        _report_incident(work, IncidentKind.FROZEN, freeze.scope, summary, evidence, region=freeze.region)
    for nodes, (verdict, why_not) in _by_machine(
        (node, (verdict, why_not)) for node, verdict, why_not in losses_held_back(fleet, settings, now)
    ):
        _report_held_back(work, nodes, verdict, why_not)
    for nodes, silence_s in _by_machine(unreachable_nodes(fleet, settings, now)):
        _report_unreachable(work, nodes, silence_s)
    _report_notices(work)
    for suspicion in find_suspicions(fleet, slow, settings.faults):
        _act_on_suspicion(work, suspicion, causes)
    for replacement in fleet.faults.replacements:
        _continue_replacement(work, replacement)
    work.decisions += plan_repairs(fleet, settings.faults, now)
    _close_unseen_incidents(work)
    return tuple(work.decisions)


# --- incidents ------------------------------------------------------------------------------------------------------


def _report_incident(
    work: _Pass, kind: IncidentKind, subject: str, summary: str, evidence: Mapping[str, Any], **where: Any
) -> None:
    """Opens the incident, or periodically records that its fault is still present."""
    work.seen.add((kind, subject))
    known = work.incident(kind, subject)
    if known is not None and known.shadow and not where.get("shadow"):
        work.decisions.append(CloseIncident(known.id, known.seen_at, "its rule is in force now"))
        known = None
    if known is None and not _is_muted(work, kind, subject):
        work.decisions.append(OpenIncident(kind, subject, summary, evidence, **where))
    elif known is not None and (work.now - known.seen_at).total_seconds() >= work.settings.faults.note_every_s:
        work.decisions.append(NoteIncident(known.id, summary, evidence))


def _is_muted(work: _Pass, kind: IncidentKind, subject: str) -> bool:
    """Whether it was dismissed recently. Dismissing settles signatures, so one that is seen again is new evidence."""
    return (kind, subject) in work.fleet.faults.muted and kind not in SIGNALLED


T = TypeVar("T")


def _by_machine(found: Iterable[tuple[NodeView, T]]) -> list[tuple[tuple[NodeView, ...], T]]:
    """One entry per machine, with its nodes and the finding about the first of them: a machine with several nodes is
    one incident."""
    nodes: dict[str, list[NodeView]] = defaultdict(list)
    first: dict[str, T] = {}
    for node, finding in found:
        nodes[node.machine].append(node)
        first.setdefault(node.machine, finding)
    return [(tuple(mine), first[machine]) for machine, mine in nodes.items()]


def _machine_or_node(nodes: tuple[NodeView, ...]) -> tuple[str, str]:
    """The subject of an incident about these nodes of one machine, and its name in a sentence."""
    if len(nodes) == 1:
        return nodes[0].id, f"node {nodes[0].id}"
    return nodes[0].machine, f"machine {nodes[0].machine} with {len(nodes)} nodes"


def _sentence(name: str) -> str:
    return f"{name[0].upper()}{name[1:]}"


def _machine_columns(work: _Pass, nodes: tuple[NodeView, ...]) -> dict[str, Any]:
    return _node_columns(work, nodes[0]) if len(nodes) == 1 else {"region": nodes[0].region}


def _report_held_back(work: _Pass, nodes: tuple[NodeView, ...], verdict: str, why_not: str) -> None:
    mode = work.fleet.faults.mode(Rule.SILENCE)
    if mode is RuleMode.OFF:
        return
    shadow = mode is RuleMode.SHADOW
    subject, name = _machine_or_node(nodes)
    summary = f"Would have declared {name} lost: {verdict}" if shadow else f"{_sentence(name)} {verdict}; {why_not}"
    evidence = {"held_back": why_not, **_nodes_evidence(nodes)}
    where = _machine_columns(work, nodes)
    _report_incident(work, IncidentKind.WITNESSED, subject, summary, evidence, **where, shadow=shadow)


def _nodes_evidence(nodes: tuple[NodeView, ...]) -> dict[str, Any]:
    return {"nodes": [node.id for node in nodes]} if len(nodes) > 1 else {}


def _report_unreachable(work: _Pass, nodes: tuple[NodeView, ...], silence_s: float) -> None:
    subject, name = _machine_or_node(nodes)
    summary = (
        f"{_sentence(name)}: no report for {age_text(silence_s)}, and no evidence that its machine is dead. "
        "Its agent cannot reach the control plane, or has lost its credential: replace the node, or read its agent.log"
    )
    first = nodes[0]
    evidence = {
        "provider": str(first.provider or ""),
        "connected": first.report.connected,
        **_nodes_evidence(nodes),
    }
    where = _machine_columns(work, nodes)
    _report_incident(work, IncidentKind.UNREACHABLE, subject, summary, evidence, **where)


def _report_notices(work: _Pass) -> None:
    """Reports impaired machines and zones, and in shadow mode what notices would have caused."""
    notices = work.notices
    for (region, zone), nodes in notices.troubled_zones.items():
        summary = f"Zone {zone} in {region}: {len(nodes)} machines are impaired; none is replaced for it"
        _report_incident(
            work, IncidentKind.CLOUD_NOTICE, f"zone {zone}", summary, {"nodes": list(nodes)}, region=region
        )
    is_shadow = work.fleet.faults.mode(Rule.NOTICE) is RuleMode.SHADOW
    after_s = work.settings.notices.impaired_after_s
    told: dict[NoticeKind, list[tuple[NodeView, NoticeView]]] = defaultdict(list)
    for node, mine in (notices.in_any_mode if is_shadow else notices.by_node).items():
        for notice in mine:
            lasts_s = (work.now - notice.at).total_seconds()
            if lasts_s >= after_s if notice.kind is NoticeKind.IMPAIRED else is_shadow:
                told[notice.kind].append((work.fleet.nodes[node], notice))
    for kind, found in told.items():
        for concerned, notice in _by_machine(found):
            subject, name = _machine_or_node(concerned)
            evidence = {"kind": str(kind), "at": notice.at.isoformat(), "text": notice.text}
            summary = f"Would have replaced {name}: {kind}, {notice.text}"
            if kind is NoticeKind.IMPAIRED:
                since = f"{notice.at:%H:%M} UTC"
                summary = f"{_sentence(name)}: its provider reports since {since} that it is impaired: {notice.text}"
            _report_incident(
                work,
                IncidentKind.CLOUD_NOTICE,
                subject,
                summary,
                {**evidence, **_nodes_evidence(concerned)},
                **_machine_columns(work, concerned),
                shadow=is_shadow,
            )


def _halt_rollouts(work: _Pass, cause: CommonCause) -> None:
    """A common cause halts rollouts and touches no hardware."""
    evidence = {
        "affected": list(cause.affected),
        "cohort": cause.cohort,
        "size": cause.size,
        "below": list(cause.place),
    }
    known = work.incident(IncidentKind.COMMON_CAUSE, cause.subject)
    _report_incident(work, IncidentKind.COMMON_CAUSE, cause.subject, cause.summary, evidence, cohort=cause.cohort)
    until = known.opened_at + timedelta(seconds=HALTED_WITH_S) if known else work.now
    for rollout in work.fleet.rollouts.values():
        if rollout.deployment in cause.deployments and rollout.state in MOVING and rollout.state_since <= until:
            work.decisions.append(
                ChangeRollout(
                    rollout.id, rollout.state, rollout.revision, RolloutState.PAUSED, rollout.stage, cause.summary
                )
            )


def _close_unseen_incidents(work: _Pass) -> None:
    """Closes incidents that were not seen for a while. A fault that comes and goes stays one incident."""
    close_after_s = work.settings.faults.close_after_s
    for known in work.fleet.faults.incidents:
        if known.kind not in KINDS or known.is_held or (known.kind, known.subject) in work.seen:
            continue
        node = work.fleet.nodes.get(known.node)
        is_held = known.kind in NEEDS_OPERATOR and node is not None and node.state is NodeState.FAULTY
        gone_s = (work.now - known.seen_at).total_seconds()
        if known.node and (node is None or node.state is NodeState.RETIRED):
            work.decisions.append(CloseIncident(known.id, known.seen_at, f"{known.node} was retired"))
        elif gone_s > close_after_s and not is_held:
            work.decisions.append(CloseIncident(known.id, known.seen_at, f"not seen for {age_text(gone_s)}"))


# --- nodes ----------------------------------------------------------------------------------------------------------


def _act_on_suspicion(work: _Pass, suspicion: Suspicion, causes: Iterable[CommonCause]) -> None:
    """Opens the incident. Cordons or replaces the node if its rule, the common causes and the guards allow it."""
    rule = suspicion.rule or (Rule.SLOW if suspicion.kind is IncidentKind.SLOW else None)
    mode = work.fleet.faults.mode(rule) if rule else RuleMode.ON
    if mode is RuleMode.OFF or _is_muted(work, suspicion.kind, suspicion.subject):
        return
    is_shadow = mode is RuleMode.SHADOW
    barred = "" if is_shadow else _why_untouched(work, suspicion, causes)
    acts = suspicion.rule is not None and not is_shadow and not barred
    found = {node.id: _why_later(work, node) for node in suspicion.nodes} if acts else {}
    why_waits = barred or next(filter(None, found.values()), "")
    waits = {"waits": why_waits} if why_waits else {}
    where = _node_columns(work, suspicion.node) if suspicion.node else _shared_columns(suspicion)
    summary = _summary(suspicion, is_shadow)
    evidence = {**suspicion.evidence, **waits, **_ladder_evidence(work, suspicion)}
    _report_incident(
        work, suspicion.kind, suspicion.subject, summary, evidence, **where, cohort=suspicion.cohort, shadow=is_shadow
    )
    for node in suspicion.nodes if acts else ():
        _act_on_node(work, node, suspicion)


def _ladder_evidence(work: _Pass, suspicion: Suspicion) -> dict[str, Any]:
    """The rungs of a repair, of the first node."""
    if suspicion.rule is not Rule.HARD_SIGNATURE or not suspicion.nodes:
        return {}
    ladder = ladder_of(work.fleet, suspicion.nodes[0], work.settings.faults, work.now)
    return {"ladder": [step.as_evidence() for step in ladder.steps]} if ladder is not None else {}


def _act_on_node(work: _Pass, node: NodeView, suspicion: Suspicion) -> None:
    if suspicion.rule is None or node.state in CONDEMNED:
        return
    if not node.cordoned and node.id not in work.handled:
        work.decisions.append(CordonNode(node.id, suspicion.reason))
    if not _why_later(work, node) and not _is_replaced(work, node):
        work.guards.take(node)
        work.decisions.append(_first_step(node, work.cell_of(node.id), suspicion.rule, suspicion))
    work.handled.add(node.id)


def _why_untouched(work: _Pass, suspicion: Suspicion, causes: Iterable[CommonCause]) -> str:
    """Why the machine is not touched at all, or ""."""
    if not suspicion.nodes or suspicion.rule is None:
        return ""
    for cause in causes:
        if cause.fault in suspicion.faults and any(node.id in cause.affected for node in suspicion.nodes):
            return f"common cause: {cause.subject}"
    frozen = work.guards.frozen(suspicion.nodes[0])
    return f"frozen: {frozen}" if frozen else ""


def _why_later(work: _Pass, node: NodeView) -> str:
    if node.state in CONDEMNED:
        return ""
    if _is_replaced(work, node):
        return _why_not_drained(work, work.cell_of(node.id))
    return work.guards.budget_refusal(node)


def _why_not_drained(work: _Pass, cell: CellView | None) -> str:
    """Why a serving cell may not be drained for a replacement now, or ""."""
    if cell is None or cell.state is not CellState.READY:
        return ""
    refused = work.ledger.refusal(cell, DisruptionCause.REPAIR)
    return f"its cell cannot be drained: {refused}" if refused else ""


def _is_replaced(work: _Pass, node: NodeView) -> bool:
    return node.id in work.handled or any(known.node == node.id for known in work.fleet.faults.replacements)


def _first_step(node: NodeView, cell: CellView | None, rule: Rule, suspicion: Suspicion) -> Decision:
    """Drains a serving cell first, unless it must stop serving now."""
    if cell is not None and cell.state is CellState.READY and not suspicion.is_urgent:
        return RequestReplacement(node.id, cell.id, rule, suspicion.reason)
    return _out_of_use(node, cell, rule, suspicion.reason)


def _out_of_use(node: NodeView, cell: CellView | None, rule: Rule, reason: str) -> ReplaceNode:
    return ReplaceNode(node.id, node.state, node.state_since, cell.id if cell else "", rule, reason)


def _continue_replacement(work: _Pass, replacement: ReplacementView) -> None:
    """Next step of a replacement: drain the cell, take the node out of use, or close it when the cell serves again."""
    node, cell = work.fleet.nodes.get(replacement.node), work.cell_of(replacement.node)
    if replacement.begun:
        if done := _why_over(work, replacement, cell):
            work.decisions.append(CloseReplacement(replacement.id, done))
        return
    if node is None or node.state not in {NodeState.READY, NodeState.SUSPECT}:
        work.decisions.append(CloseReplacement(replacement.id, "the node is out of use already"))
    elif cell is not None and cell.state is CellState.READY:
        if _why_not_drained(work, cell):
            return
        work.ledger.charge(cell, DisruptionCause.REPAIR)
        reason = f"{node.id} is to be replaced: {replacement.reason}"
        work.decisions.append(DrainCell(cell.id, cell.generation, DisruptionCause.REPAIR, reason))
    elif cell is None or _serves_no_more(work, cell):
        work.decisions.append(_out_of_use(node, cell, replacement.rule, replacement.reason))


def _serves_no_more(work: _Pass, cell: CellView) -> bool:
    return cell.state is not CellState.DRAINING or bool(drain_ended(cell, work.notices))


def _why_over(work: _Pass, replacement: ReplacementView, still_in: CellView | None) -> str:
    """Why a begun replacement is complete, or ""."""
    if still_in is not None:
        return ""
    cell = work.fleet.cells.get(replacement.cell)
    if cell is None:
        return "its cell is gone" if replacement.cell else "it served no cell"
    return f"{cell.id} is ready without it" if cell.state is CellState.READY else ""


def _summary(suspicion: Suspicion, is_shadow: bool) -> str:
    if is_shadow:
        return f"Would have replaced {suspicion.noun} {suspicion.subject}: {suspicion.reason}"
    return f"{suspicion.noun.capitalize()} {suspicion.subject}: {suspicion.reason}"


def _node_columns(work: _Pass, node: NodeView) -> dict[str, Any]:
    cell = work.cell_of(node.id)
    return {**_cell_columns(cell), "region": node.region, "node": node.id}


def _shared_columns(suspicion: Suspicion) -> dict[str, Any]:
    """Of several nodes, or of a cell."""
    return {"region": suspicion.nodes[0].region} if suspicion.nodes else _cell_columns(suspicion.cell)


def _cell_columns(cell: CellView | None) -> dict[str, Any]:
    return {"region": cell.region, "deployment": cell.deployment, "cell": cell.id} if cell else {}
