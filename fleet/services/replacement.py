"""Applies decisions about faulty nodes, each as one compare-and-set with its event. Launches and ends no machine: the
reconciler sees a faulty node, gives its cell another and then has the machine ended.

A replacement begins under a lock that is held until the commit, and counts again: two reconcilers that race cannot
condemn two nodes of a cell, or more of a pool than may be.
"""

from datetime import datetime
from typing import Any

from django.db import connection, transaction

from fleet.models import Incident, Node, Replacement
from fleet.planning.decisions import CloseReplacement, CordonNode, ReplaceNode, RequestReplacement, UncordonNode
from fleet.planning.fault_rules import Rule
from fleet.planning.faults.guards import CONDEMNED, COUNTED, ReplacementBudget, over_budget
from fleet.planning.settings import FaultSettings
from fleet.planning.states import NODE_ALLOWED, IncidentState, NodeState
from fleet.services.desired import desired_changed
from fleet.services.fault_evidence import repair_record
from fleet.services.node_event import cell_of, node_event
from kernel import wake_ups
from kernel.tones import Tone
from kernel.transitions import StaleDecision, compare_and_set_or_stale

SWITCHYARD = "switchyard"
LOCK = 0x53_57_52_50
"""Key of PostgreSQL's advisory lock: "SWRP", the replacements of the whole fleet."""


def node_cordon_faulty(decision: CordonNode, *, now: datetime) -> None:
    """Keep a suspected node out of new placements.

    Raises:
        StaleDecision: it is cordoned or retired already.
    """
    with transaction.atomic():
        rows = Node.objects.filter(id=decision.node, cordoned=False).exclude(state=NodeState.RETIRED)
        compare_and_set_or_stale(
            rows, what=f"node {decision.node}", cordoned=True, cordoned_for_notice=decision.for_notice
        )
        node = Node.objects.get(id=decision.node)
        node_event(node, "node.cordoned", f"{node.id} cordoned: {decision.reason}", now=now, tone=Tone.WARN)


def node_uncordon_called_off(decision: UncordonNode, *, now: datetime) -> None:
    """Let a node be chosen again.

    Raises:
        StaleDecision: somebody else cordoned it, or it is out of use already.
    """
    with transaction.atomic():
        rows = Node.objects.filter(id=decision.node, cordoned=True, cordoned_for_notice=True)
        rows = rows.exclude(state__in=[NodeState.RETIRED.value, *(state.value for state in CONDEMNED)])
        compare_and_set_or_stale(rows, what=f"node {decision.node}", cordoned=False, cordoned_for_notice=False)
        node = Node.objects.get(id=decision.node)
        node_event(node, "node.uncordoned", f"{node.id} uncordoned: {decision.reason}", now=now, tone=Tone.OK)


def node_replace(decision: ReplaceNode, *, now: datetime, settings: FaultSettings | None = None) -> None:
    """Take a node out of use: it is faulty and cordoned from now on, its cell is lost and gets another one.

    Raises:
        StaleDecision: the node has left the state that was seen since then, even if it came back to it, or is in
            another cell, or too many other nodes are being replaced.
    """
    if NodeState.FAULTY not in NODE_ALLOWED[decision.seen]:
        raise ValueError(f"a node cannot go from {decision.seen} to faulty")
    with transaction.atomic():
        _guard(decision, settings or FaultSettings())
        rows = Node.objects.filter(id=decision.node, state=decision.seen.value, state_since=decision.since)
        compare_and_set_or_stale(
            rows,
            what=f"node {decision.node}",
            state=NodeState.FAULTY.value,
            cordoned=True,
            reason=decision.reason,
            state_since=now,
        )
        if cell_of(decision.node) != decision.cell:
            raise StaleDecision(f"node {decision.node} is in another cell meanwhile")
        node = Node.objects.get(id=decision.node)
        node_event(node, f"node.{NodeState.FAULTY}", f"{node.id} is faulty: {decision.reason}", now=now)
        desired_changed([node.id])
        replacement_begin(node=node.id, cell=decision.cell, rule=decision.rule, reason=decision.reason, now=now)
        repair_record(node=node.id, what="replacement", reason=decision.reason, now=now)
        wake_ups.send("fleet.reconcile")


def replacement_begin(*, node: str, cell: str, rule: Rule, reason: str, now: datetime) -> None:
    """Call in the transaction that takes a node out of use. One that was scheduled begins now."""
    if Replacement.objects.filter(node_id=node, closed_at__isnull=True).update(begun_at=now, cell=cell):
        return
    _open(node, cell, rule, reason, now, SWITCHYARD, begun_at=now)


def replacement_schedule(decision: RequestReplacement, *, now: datetime, settings: FaultSettings | None = None) -> None:
    """From now on the node's cell is drained for its replacement.

    Raises:
        StaleDecision: the node is in another cell or already being replaced, or too many other nodes are.
    """
    with transaction.atomic():
        _guard(decision, settings or FaultSettings())
        node = Node.objects.select_for_update().get(id=decision.node)
        if cell_of(node.id) != decision.cell or is_replaced(node.id):
            raise StaleDecision(f"node {node.id} is replaced already, or in another cell")
        _open(node.id, decision.cell, decision.rule, decision.reason, now, SWITCHYARD)
        said = f"{node.id} is to be replaced: {decision.reason}"
        node_event(node, "node.replacement", said, now=now, tone=Tone.MOVING)


def replacement_close(decision: CloseReplacement, *, now: datetime) -> None:
    """The work is done.

    Raises:
        StaleDecision: it was closed already.
    """
    with transaction.atomic():
        rows = Replacement.objects.filter(pk=decision.replacement, closed_at__isnull=True)
        compare_and_set_or_stale(
            rows, what=f"replacement {decision.replacement}", closed_at=now, resolution=decision.reason
        )
        row = Replacement.objects.select_related("node").get(pk=decision.replacement)
        node_event(row.node, "node.replaced", f"Replacement of {row.node_id}: {decision.reason}", now=now, tone=Tone.OK)


def is_replaced(node: str) -> bool:
    """Whether a replacement of this node is open."""
    return Replacement.objects.filter(node_id=node, closed_at__isnull=True).exists()


def _guard(decision: ReplaceNode | RequestReplacement, settings: FaultSettings) -> None:
    """Until the commit no other worker begins a replacement. One that was scheduled was counted then. A machine that
    its provider takes away goes with or without leave."""
    node_id, cell = decision.node, decision.cell
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [LOCK])
    if is_replaced(node_id) or decision.rule is Rule.NOTICE:
        return
    node = Node.objects.get(id=node_id)
    pool = Node.objects.filter(region_id=node.region_id, instance_type_id=node.instance_type_id)
    work = Replacement.objects.filter(closed_at__isnull=True)
    other = work.filter(cell=cell).values_list("node_id", flat=True).first() if cell else None
    underway = ReplacementBudget(
        pool=(node.region_id, node.instance_type_id),
        open=work.filter(node__in=pool).exclude(rule=Rule.NOTICE).count(),
        pool_size=pool.filter(state__in=[state.value for state in COUNTED]).count(),
        cell=cell,
        peer=other or "",
    )
    if crowded := over_budget(underway, settings):
        raise StaleDecision(f"node {node_id} stays: {crowded}")


def _open(node: str, cell: str, rule: Rule, reason: str, now: datetime, actor: str, **columns: Any) -> Replacement:
    incident = Incident.objects.filter(node=node, state=IncidentState.OPEN.value, shadow=False).first()
    return Replacement.objects.create(
        node_id=node, cell=cell, rule=rule, reason=reason, actor=actor, incident=incident, opened_at=now, **columns
    )


def replacement_request(*, node: Node, cell: str, actor: str, reason: str, now: datetime) -> Replacement:
    """Record an operator's request, inside its transaction."""
    return _open(node.id, cell, Rule.OPERATOR, reason, now, actor)
