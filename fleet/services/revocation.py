"""What an operator does about a machine that somebody else may have: its credential and its certificates count no more.

Its socket is cut within 5 s. Everybody else hears of it at once, and believes it from the next connection on.
"""

from datetime import datetime

from django.db import transaction

from engine_agent.protocol.states import AgentKind
from fleet.models import CellMember, Machine, Node
from fleet.planning.fault_rules import Rule
from fleet.planning.states import NODE_ALLOWED, NodeState
from fleet.services.certificate import agent_trust_end
from fleet.services.desired import desired_changed
from fleet.services.replacement import replacement_begin
from kernel import hints, live
from kernel.events import event_record
from kernel.refusals import Conflict
from kernel.tones import Tone


def node_revoke(*, node_id: str, actor: str, now: datetime, why: str = "") -> None:
    """Trust a node no longer. It is faulty from now on, whatever limits repairs have: no request goes there, its cell
    is lost and gets another node.

    Raises:
        Conflict: the node is retired; what it had was revoked then.
    """
    with transaction.atomic():
        node = Node.objects.select_for_update().get(id=node_id)
        if node.state == NodeState.RETIRED:
            raise Conflict(f"node {node.id} is retired; its credential and certificates were revoked then")
        agent_trust_end(kind=AgentKind.NODE, subject=node.id, now=now)
        reason = _reason(actor, why)
        cell = CellMember.objects.filter(node=node).values_list("cell_id", flat=True).first() or ""
        node.cordoned = True
        if NodeState.FAULTY in NODE_ALLOWED[NodeState(node.state)]:
            node.state, node.reason, node.state_since = NodeState.FAULTY.value, reason, now
            replacement_begin(node=node.id, cell=cell, rule=Rule.OPERATOR, reason=reason, now=now)
        node.save(update_fields=["cordoned", "state", "reason", "state_since"])
        desired_changed([node.id])
        event_record(
            kind="node.revoked",
            message=f"{node.id} is trusted no longer: {reason}",
            tone=Tone.BAD,
            now=now,
            actor=actor,
            region=node.region_id,
            node=node.id,
            cell=cell,
        )
        live.push("nodes", node.id)
        hints.ring("fleet.reconcile")


def machine_revoke(*, machine_id: str, actor: str, now: datetime, why: str = "") -> None:
    """Trust a machine no longer, nor the node that it runs."""
    with transaction.atomic():
        machine = Machine.objects.select_for_update().get(id=machine_id)
        agent_trust_end(kind=AgentKind.MACHINE, subject=machine.id, now=now)
        node = Node.objects.filter(id=machine.runs).exclude(state=NodeState.RETIRED).first()
        if node is not None:
            node_revoke(node_id=node.id, actor=actor, now=now, why=why)
        event_record(
            kind="machine.revoked",
            message=f"{machine.id} is trusted no longer: {_reason(actor, why)}",
            tone=Tone.BAD,
            now=now,
            actor=actor,
            region=machine.region_id,
        )
        live.push("machines")


def _reason(actor: str, why: str) -> str:
    return f"revoked by {actor}" + (f": {why}" if why else "")
