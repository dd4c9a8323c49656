"""Revokes the credentials and certificates of a node or machine that may be compromised. Its socket is cut within 5 s;
all other hosts receive the revocation and reject its next connection."""

from datetime import datetime

from django.db import transaction
from django.db.models import Q

from engine_agent.protocol.states import AgentKind
from fleet.agents.selectors import is_trusted
from fleet.agents.services.authority import agent_trust_end
from fleet.faults.planning.views import Rule
from fleet.faults.services.incidents import replacement_begin
from fleet.machines.models import Machine, MachineSlot
from fleet.machines.planner import WITH_MACHINE_AGENT, has_machine_agent
from fleet.machines.services.machines import machine_move, nodes_on
from fleet.nodes.models import Node
from fleet.nodes.services.events import cell_of, desired_changed, node_event
from fleet.reconcile.planning.states import NODE_ALLOWED, MachineState, NodeState
from kernel import live, wake_ups
from kernel.events import event_record
from kernel.refusals import Conflict
from kernel.tones import Tone


def node_revoke(*, node_id: str, actor: str, now: datetime, why: str = "") -> None:
    """Revokes a node. It is faulty from now on, whatever limits repairs have: it gets no requests, and its cell is lost
    and gets another node. A joined host under it is revoked too with all of its nodes, because it could enrol them
    again. Does nothing if nothing is left to revoke. Raises Conflict if the node is retired; it was revoked then."""
    with transaction.atomic():
        machine = host_locked(node_id)
        node = Node.objects.select_for_update().get(id=node_id)
        if node.state == NodeState.RETIRED:
            raise Conflict(f"node {node.id} is retired; its credential and certificates were revoked then")
        others = _nodes_locked(machine) if machine is not None else []
        _revoke(machine, [node, *(other for other in others if other.id != node.id)], actor, now, why)


def host_locked(agent_id: str) -> Machine | None:
    """Locks the joined host of this node or ingress, in the caller's transaction. Returns None if there is none."""
    of_slot = MachineSlot.objects.filter(runs=agent_id).values("machine")
    rows = Machine.objects.select_for_update().filter(provider__in=WITH_MACHINE_AGENT)
    return rows.filter(Q(runs=agent_id) | Q(id__in=of_slot)).exclude(state=MachineState.GONE).first()


def _nodes_locked(machine: Machine) -> list[Node]:
    rows = Node.objects.select_for_update().filter(id__in=nodes_on(machine)).exclude(state=NodeState.RETIRED)
    return list(rows.order_by("id"))


def _revoke(machine: Machine | None, nodes: list[Node], actor: str, now: datetime, why: str) -> None:
    if _is_revoked(machine, nodes, now):
        return
    if machine is not None:
        _revoke_machine_row(machine, actor, now, why)
    for node in nodes:
        _revoke_node_row(node, actor, now, why)


def _revoke_node_row(node: Node, actor: str, now: datetime, why: str) -> None:
    agent_trust_end(kind=AgentKind.NODE, subject=node.id, now=now)
    reason = _revocation_reason(actor, why)
    node.cordoned = True
    if NodeState.FAULTY in NODE_ALLOWED[NodeState(node.state)]:
        node.state, node.reason, node.state_since = NodeState.FAULTY.value, reason, now
        replacement_begin(node=node.id, cell=cell_of(node.id), rule=Rule.OPERATOR, reason=reason, now=now)
    node.save(update_fields=["cordoned", "state", "reason", "state_since"])
    desired_changed([node.id])
    said = f"{node.id} is no longer trusted: {reason}"
    node_event(node, "node.revoked", said, now=now, tone=Tone.BAD, actor=actor)
    wake_ups.send("fleet.reconcile")


def machine_revoke(*, machine_id: str, actor: str, now: datetime, why: str = "") -> None:
    """Revokes a machine and its node or ingress. A joined host is gone immediately, or once its node is replaced. Does
    nothing if nothing is left to revoke."""
    with transaction.atomic():
        machine = Machine.objects.select_for_update().get(id=machine_id)
        _revoke(machine, _nodes_locked(machine), actor, now, why)


def _is_revoked(machine: Machine | None, nodes: list[Node], now: datetime) -> bool:
    agents = [(AgentKind.NODE.value, node.id) for node in nodes]
    if machine is not None:
        agents += [(AgentKind.MACHINE.value, machine.id), *((machine.role, name) for name in nodes_on(machine))]
    return (
        (machine is None or not has_machine_agent(machine.provider) or machine.revoked_at is not None)
        and all(node.cordoned and NodeState.FAULTY not in NODE_ALLOWED[NodeState(node.state)] for node in nodes)
        and not any(is_trusted(kind, subject, now) for kind, subject in agents)
    )


def _revoke_machine_row(machine: Machine, actor: str, now: datetime, why: str) -> None:
    agent_trust_end(kind=AgentKind.MACHINE, subject=machine.id, now=now)
    for name in nodes_on(machine):
        agent_trust_end(kind=machine.role, subject=name, now=now)
    reason = _revocation_reason(actor, why)
    if has_machine_agent(machine.provider) and machine.revoked_at is None:
        Machine.objects.filter(id=machine.id).update(revoked_at=now, leaving=True, reason=reason)
        if machine.state not in {MachineState.TAKEN, MachineState.GONE}:
            machine_move(machine, MachineState.GONE, reason, now=now, runs="")
    event_record(
        kind="machine.revoked",
        message=f"{machine.id} is no longer trusted: {reason}",
        tone=Tone.BAD,
        now=now,
        actor=actor,
        region=machine.region_id,
    )
    live.push("machines")


def _revocation_reason(actor: str, why: str) -> str:
    return f"revoked by {actor}" + (f": {why}" if why else "")
