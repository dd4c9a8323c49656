"""Carries out decisions about repairs of nodes that are out of use: orders resets, reboots and deep checks as rows, and
ends attempts. Agents reset devices, providers reboot machines. Each change is one compare-and-set with its event."""

import secrets
from datetime import datetime
from typing import Any

from django.db import transaction
from django.db.models import Q

from fleet.cells.models import CellMember
from fleet.faults.models import Incident, Repair
from fleet.faults.planning.views import IncidentKind, Rung
from fleet.faults.selectors.faults import ATTEMPTS
from fleet.faults.services.incidents import OF_SEVERAL_NODES, hardware_faults_settle, incidents_close
from fleet.machines.services.orders import provider_order
from fleet.nodes.models import Node, NodeCheck
from fleet.nodes.services.events import desired_changed, node_event
from fleet.reconcile.planning.decisions import CheckRepair, EndRepair, TryRepair
from fleet.reconcile.planning.states import IncidentState, NodeState, ProviderAction
from kernel import wake_ups
from kernel.tones import Tone
from kernel.transitions import StaleDecision, compare_and_set_or_stale

RESULT_CHARS = 1000


def repair_try(decision: TryRepair, *, now: datetime) -> None:
    """Begins an attempt. Raises StaleDecision if the node is in use or under repair already."""
    with transaction.atomic():
        node = _lock_faulty(decision.node)
        if Repair.objects.filter(node=node, what__in=ATTEMPTS, ended_at=None).exists():
            raise StaleDecision(f"node {node.id} is under repair already")
        repair = Repair.objects.create(node=node, what=decision.rung.value, reason=decision.reason, at=now)
        if decision.rung is Rung.RESET:
            _order_checks(repair, now, reset=list(decision.devices))
        else:
            provider_order(node=node.id, action=ProviderAction.REBOOT, reason=decision.reason, now=now)
        text = f"{decision.rung.noun} of {node.id}: {decision.reason}".replace("of its", "of the", 1)
        node_event(node, "node.repair", text[:1].upper() + text[1:], now=now, tone=Tone.MOVING)


def repair_check(decision: CheckRepair, *, now: datetime) -> None:
    """Orders the deep checks that follow a reboot. Raises StaleDecision if they were ordered or the attempt ended."""
    with transaction.atomic():
        repair = Repair.objects.select_for_update().filter(pk=decision.repair, ended_at=None, request="").first()
        if repair is None:
            raise StaleDecision(f"repair {decision.repair}")
        _order_checks(repair, now, reset=None)


def repair_end(decision: EndRepair, *, now: datetime) -> None:
    """Ends an attempt. A cured node, and the others that it was repaired with, become spares; their signals are settled
    and their incidents close. Raises StaleDecision if the attempt ended before, or a node is in use."""
    with transaction.atomic():
        node = _lock_faulty(decision.node)
        rows = Repair.objects.filter(pk=decision.repair, node=node, ended_at=None)
        result = decision.result.replace("\0", "")[:RESULT_CHARS]
        compare_and_set_or_stale(
            rows, what=f"repair {decision.repair}", ended_at=now, cured=decision.cured, result=result
        )
        what = f"{node.id}: {decision.rung.noun}"
        if not decision.cured:
            node_event(node, "node.repair_failed", f"{what} did not help: {result}", now=now, tone=Tone.WARN)
            wake_ups.send("fleet.reconcile")
            return
        names = [node.id, *(_lock_faulty(other).id for other in decision.others)]
        _keep_ladder(names, decision)
        reason = f"repaired by a {decision.rung.noun}: {result}"
        Node.objects.filter(id__in=names).update(
            state=NodeState.READY.value, cordoned=False, reason=reason, state_since=now, spare_since=now
        )
        hardware_faults_settle(node_id__in=names, now=now)
        incidents_close(node__in=names, kind__in=list(IncidentKind), resolution=reason, now=now)
        shared: dict[str, Any] = {"kind__in": OF_SEVERAL_NODES, "evidence__nodes__contained_by": names}
        incidents_close(node="", **shared, resolution=reason, now=now)
        for repaired in Node.objects.filter(id__in=names):
            node_event(repaired, "node.repaired", f"{repaired.id} was {reason}", now=now)
        wake_ups.send("fleet.reconcile")


def repair_refused(*, node: str, reason: str, now: datetime) -> None:
    """Ends a reboot that its provider refused, in the transaction that ends the order."""
    rows = Repair.objects.filter(node_id=node, what=Rung.REBOOT.value, ended_at=None)
    rows.update(ended_at=now, cured=False, result=f"its provider refused: {reason}"[:RESULT_CHARS])
    wake_ups.send("fleet.reconcile")


def _lock_faulty(node_id: str) -> Node:
    node = Node.objects.select_for_update(of=("self",)).filter(id=node_id, state=NodeState.FAULTY.value).first()
    if node is None or CellMember.objects.filter(node_id=node_id).exists():
        raise StaleDecision(f"node {node_id} is not out of use")
    return node


def _order_checks(repair: Repair, now: datetime, *, reset: list[str] | None) -> None:
    """`reset`: devices to reset before; empty: all of the node; None: none."""
    repair.request = secrets.token_hex(8)
    repair.save(update_fields=["request"])
    values: dict[str, Any] = {
        "request": repair.request,
        "peers": [],
        "secret": "",
        "reset": reset,
        "requested_at": now,
        "requested_by": "switchyard",
    }
    NodeCheck.objects.update_or_create(node_id=repair.node_id, defaults=values)
    desired_changed([repair.node_id])


def _keep_ladder(nodes: list[str], decision: EndRepair) -> None:
    """Records the last rung in the nodes' open incidents, which close now."""
    steps = [
        {**step, "state": "cured", "reason": decision.result} if step["rung"] == decision.rung else dict(step)
        for step in decision.ladder
    ]
    about = Q(node__in=nodes) | Q(node="", kind__in=OF_SEVERAL_NODES, evidence__nodes__contained_by=nodes)
    for incident in Incident.objects.select_for_update().filter(about, state=IncidentState.OPEN.value):
        if "ladder" in incident.evidence:
            incident.evidence = {**incident.evidence, "ladder": steps}
            incident.save(update_fields=["evidence"])
