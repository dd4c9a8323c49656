"""Carries out decisions and operators' requests about repairs of nodes that are out of use: orders resets, reboots and
deep checks as rows, and ends attempts. Agents reset devices, providers reboot machines. Each change is one
compare-and-set with its event."""

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
from fleet.machines.models import MachineSlot, ProviderCall
from fleet.machines.planner import provider_limits
from fleet.machines.selectors import nodes_that_may_reboot
from fleet.machines.services.orders import provider_order
from fleet.nodes.models import Node, NodeCheck
from fleet.nodes.services.events import desired_changed, node_event
from fleet.reconcile.planning.decisions import CheckRepair, EndRepair, TryRepair
from fleet.reconcile.planning.states import DEAD, IncidentState, NodeState, ProviderAction
from kernel import live, wake_ups
from kernel.refusals import Conflict
from kernel.tones import Tone
from kernel.transitions import StaleDecision, compare_and_set_or_stale

RESULT_CHARS = 1000


def repair_try(decision: TryRepair, *, now: datetime, actor: str = "switchyard") -> None:
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
        node_event(node, "node.repair", text[:1].upper() + text[1:], now=now, tone=Tone.MOVING, actor=actor)


def repair_request(*, node_id: str, rung: Rung, actor: str, now: datetime, why: str = "") -> None:
    """Resets the devices of a node or reboots its machine, as an operator requests; deep checks follow. The node is out
    of use meanwhile: a cured one becomes a spare again, another one is replaced. Raises Conflict if the node is in a
    cell, neither ready nor faulty, under repair, or on a machine that cannot be rebooted."""
    with transaction.atomic():
        node = Node.objects.select_for_update(of=("self",)).get(id=node_id)
        if reason := why_no_repair(node, rung):
            raise Conflict(reason)
        reason = f"requested by {actor}" + (f": {why}" if why else "")
        columns = {"state": NodeState.FAULTY.value, "reason": f"{rung.noun} {reason}", "state_since": now}
        Node.objects.filter(id=node.id).update(**columns)
        repair_try(TryRepair(node.id, rung, reason, ()), now=now, actor=actor)
        live.push("nodes", node.id)
        wake_ups.send("fleet.reconcile")


def why_no_repair(node: Node, rung: Rung) -> str:
    """Why an operator cannot reset or reboot a node now, or ""."""
    if member := CellMember.objects.filter(node=node).first():
        return f"node {node.id} is in cell {member.cell_id}; drain it first"
    if node.state not in {NodeState.READY, NodeState.FAULTY}:
        return f"node {node.id} is {node.state}; only a node that is faulty or ready can be repaired"
    if Repair.objects.filter(node=node, what__in=ATTEMPTS, ended_at=None).exists():
        return f"node {node.id} is under repair already"
    if ProviderCall.objects.filter(node=node).exists():
        return f"the provider of node {node.id} carries out another order for it"
    return _why_impossible_here(node, rung)


def _why_impossible_here(node: Node, rung: Rung) -> str:
    if rung is Rung.RESET and not node.accelerators:
        return f"node {node.id} has no accelerator to reset"
    if others := _nodes_of_its_machine(node):
        return f"node {node.id} shares its machine with {', '.join(others)}"
    if rung is Rung.RESET:
        return ""
    if provider_limits(node.region.provider).has_power_control or node.id in nodes_that_may_reboot():
        return ""
    return f"the machine of node {node.id} cannot be rebooted: its provider has no power control"


def _nodes_of_its_machine(node: Node) -> list[str]:
    """Other nodes of its machine that are in use: a reboot ends them, and so may a reset."""
    names = MachineSlot.objects.filter(machine__slots__runs=node.id).exclude(runs__in=["", node.id]).values("runs")
    return list(Node.objects.filter(id__in=names).exclude(state__in=DEAD).order_by("id").values_list("id", flat=True))


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
