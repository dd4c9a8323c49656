"""Applies decisions and operators' requests about nodes, each with its event, actor and reason. Orders to providers are
only written down; the loop `fleet.provision` carries them out (`fleet.machines.services.provisioning`). Draining and
replacing is left to the reconciler."""

import contextlib
import logging
import secrets
from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

from django.db import IntegrityError, transaction
from django.db.models import F

from engine_agent.protocol.states import AgentKind
from fleet.agents.services.authority import agent_trust_end
from fleet.capacity.planning.pools import stored
from fleet.cells.models import Cell, CellMember
from fleet.cells.services import cell_drain, cell_start
from fleet.clouds.base import EmbeddedProvider, Machine, ProviderError, embedded_providers
from fleet.faults.models import Replacement
from fleet.faults.planning.views import NODE_LOST, IncidentKind, PartNoun, Rule
from fleet.faults.services.incidents import (
    hardware_faults_settle,
    incident_open,
    incident_parts_recover,
    incidents_close,
    is_replaced,
    replacement_begin,
    replacement_request,
)
from fleet.machines.models import MachineSlot
from fleet.machines.services.orders import machines_forget, provider_order
from fleet.machines.services.set_aside import hardware_set_aside
from fleet.nodes.models import Node, NodeCheck, NodeReport
from fleet.nodes.planner import NEXT_TRY, WAITS_FOR_MACHINE
from fleet.nodes.services.events import cell_of, desired_changed, node_event
from fleet.reconcile.planning.decisions import LaunchNodes, MoveNode, OrderPrefetch, RestartAgent, RetireNode, StartCell
from fleet.reconcile.planning.snapshot import ProviderStatus
from fleet.reconcile.planning.states import NODE_ALLOWED, NODE_TONE, CellState, NodeState, ProviderAction
from fleet.regions.models import Region
from kernel import live, wake_ups
from kernel.events import events_record
from kernel.models import Event
from kernel.refusals import Conflict, InvalidInput
from kernel.tones import Tone
from kernel.transitions import StaleDecision, compare_and_set_or_stale
from models_registry.instance_types.models import InstanceType

RESUMED = (CellState.STARTING, CellState.READY)

MAX_NAMED = 20
"""Above this number of changed nodes, browsers are not sent their names."""

log = logging.getLogger(__name__)


def node_move(decision: MoveNode, *, now: datetime) -> None:
    """Changes a node's state, with its event and, for a loss, an incident. Raises StaleDecision if the node changed its
    state or has reported since the decision."""
    if decision.to is not NodeState.LOST:
        if not nodes_move([decision], now=now):
            raise StaleDecision(f"node {decision.node}")
        return
    if decision.to not in NODE_ALLOWED[decision.seen]:
        raise ValueError(f"a node cannot go from {decision.seen} to {decision.to}")
    with transaction.atomic():
        _lock_unless_it_reported(decision)
        node = _change_state(decision.node, decision.seen, decision.to, decision.reason, now)
        member = CellMember.objects.filter(node=node).select_related("cell").first()
        machine = _lost_machine(node)
        incident_open(
            kind=NODE_LOST,
            subject=machine or node.id,
            summary=f"{f'Machine {machine}' if machine else f'Node {node.id}'} lost: {decision.reason}",
            evidence={"reason": decision.reason, **_last_report(decision)},
            now=now,
            region=node.region_id,
            node=node.id,
            cell=member.cell_id if member else "",
            deployment=member.cell.deployment_id if member else "",
        )
        if member:
            replacement_begin(node=node.id, cell=member.cell_id, rule=Rule.SILENCE, reason=decision.reason, now=now)


def _last_report(decision: MoveNode) -> dict[str, str]:
    return {"last_report_at": decision.reported_at.isoformat()} if decision.reported_at else {}


def _lost_machine(node: Node) -> str:
    """The machine that this node shares with others, if its own agent is silent as well: one incident for all of them.
    Otherwise ""."""
    slots = MachineSlot.objects.filter(runs=node.id, machine__connected=False)
    return slots.values_list("machine_id", flat=True).first() or ""


def nodes_move(decisions: Sequence[MoveNode], *, now: datetime) -> list[MoveNode]:
    """Changes the states of many nodes with their events, in few statements, because a whole fleet changes after an
    outage of web. Not for losses. Returns the decisions whose node was still in the expected state."""
    for each in decisions:
        _check_transition(each.seen, each.to)
    with transaction.atomic():
        named = Node.objects.select_for_update(of=("self",)).filter(id__in=[each.node for each in decisions])
        nodes = {node.id: node for node in named.order_by("id").only("id", "state", "region_id")}
        moved = [each for each in decisions if each.node in nodes and nodes[each.node].state == each.seen]
        alike: dict[tuple[NodeState, NodeState, str], list[str]] = defaultdict(list)
        for each in moved:
            alike[each.seen, each.to, each.reason].append(each.node)
        for (seen, to, reason), names in alike.items():
            joined = {"spare_since": now} if seen is NodeState.JOINING else {}
            Node.objects.filter(id__in=names).update(state=to.value, reason=reason, state_since=now, **joined)
        _record_moves([(nodes[each.node], each.to, each.reason) for each in moved], now)
        desired_changed(each.node for each in moved)
    return moved


def prefetch_order(decision: OrderPrefetch, *, now: datetime) -> None:
    """Changes what a node fetches in advance. Raises StaleDecision if it was changed since the decision."""
    with transaction.atomic():
        nodes = Node.objects.filter(id=decision.node, prefetch=list(decision.seen))
        if not nodes.exclude(state=NodeState.RETIRED.value).update(prefetch=list(decision.versions)):
            raise StaleDecision(f"node {decision.node}")
        desired_changed([decision.node])
        if decision.versions:
            node = Node.objects.get(id=decision.node)
            message = f"{node.id} fetches {' and '.join(decision.versions)} in advance: {decision.reason}"
            node_event(node, "node.prefetch", message, now=now, tone=Tone.MOVING)


def _lock_unless_it_reported(decision: MoveNode) -> None:
    """Locks the report until the commit. A report after the snapshot disproves the loss."""
    report = NodeReport.objects.select_for_update().filter(node_id=decision.node).first()
    if report is not None and report.last_seen_at != decision.reported_at:
        raise StaleDecision(f"node {decision.node} has reported since")


def nodes_launch(decision: LaunchNodes, *, now: datetime) -> None:
    """Creates nodes, each with an order to its provider to launch it. Raises StaleDecision if nodes were launched or
    retired since the decision."""
    region = Region.objects.get(name=decision.region)
    instance_type = InstanceType.objects.get(name=decision.instance_type)
    with transaction.atomic():
        _lock_pool(region, instance_type, decision.there)
        for unit in _unit_ids(decision):
            node = Node.objects.create(
                id=f"n-{secrets.token_hex(4)}",
                region=region,
                instance_type=instance_type,
                state=NodeState.JOINING.value,
                reason=decision.reason,
                markets=stored(decision.markets),
                created_at=now,
                state_since=now,
            )
            provider_order(
                node=node.id,
                action=ProviderAction.LAUNCH,
                reason=decision.reason,
                near=decision.near,
                unit=unit,
                now=now,
            )
            _record_moves([(node, NodeState.JOINING, decision.reason)], now)


def _unit_ids(decision: LaunchNodes) -> Iterator[str]:
    for _ in range(0, decision.count, decision.unit):
        unit = f"u-{secrets.token_hex(4)}" if decision.unit > 1 else ""
        yield from [unit] * decision.unit


def launch_failed(*, node: str, reason: str, now: datetime) -> None:
    """Marks a node that gets no machine as lost, unless it has joined or changed meanwhile."""
    with contextlib.suppress(StaleDecision), transaction.atomic():
        _change_state(node, NodeState.JOINING, NodeState.LOST, reason, now)


def launch_waits(*, node: str, reason: str, next_try: datetime, now: datetime) -> None:
    """Records what a joining node waits for, with an event if that is new."""
    waits = f"{WAITS_FOR_MACHINE}{reason}"
    row = Node.objects.select_for_update(of=("self",)).filter(id=node, state=NodeState.JOINING).first()
    if row is None:
        return
    is_new = not row.reason.startswith(waits)
    Node.objects.filter(id=node).update(reason=f"{waits}{NEXT_TRY}{next_try:%H:%M:%S} UTC")
    if is_new:
        node_event(row, "node.waiting", f"{node}: {waits}", now=now, tone=Tone.WARN)


def machine_store(*, node: str, machine: Machine) -> None:
    """Stores what is known about a node's machine. Topology may change; address and ports may not. Raises Conflict if
    another node has this address and these ports."""
    rows = Node.objects.filter(id=node)
    try:
        with transaction.atomic():
            if machine.address is not None and machine.port_base is not None:
                rows.filter(port_base=None).update(address=machine.address, port_base=machine.port_base)
            if machine.topology:
                rows.update(topology=list(machine.topology))
            if machine.market:
                rows.update(markets=[machine.market])
    except IntegrityError:
        raise Conflict(f"another node has the ports {machine.address}:{machine.port_base}") from None


def node_retire(decision: RetireNode, *, now: datetime) -> None:
    """Retires a node: its credential is revoked, its incidents close, and its provider is ordered to terminate it.
    Raises StaleDecision if the node changed or joined a cell meanwhile, or its provider has an order already."""
    with transaction.atomic():
        if decision.seen is not NodeState.RETIRED:
            _retire_node(decision, now)
        provider_order(node=decision.node, action=ProviderAction.TERMINATE, reason=decision.reason, now=now)


def _retire_node(decision: RetireNode, now: datetime) -> None:
    # Locks before it reads: a single statement would see the members as they were before it waited.
    Node.objects.select_for_update().filter(id=decision.node).first()
    if CellMember.objects.filter(node_id=decision.node).exists():
        raise StaleDecision(f"node {decision.node} joined a cell")
    node = _change_state(decision.node, decision.seen, NodeState.RETIRED, decision.reason, now)
    agent_trust_end(kind=AgentKind.NODE, subject=node.id, now=now)
    NodeReport.objects.filter(node=node).delete()
    incident_parts_recover(PartNoun.NODE, [node.id], resolution="replaced and retired", now=now)
    incidents_close(node=node.id, kind=NODE_LOST, resolution="replaced and retired", now=now)
    if decision.seen is NodeState.FAULTY:
        hardware_set_aside(node, now=now)
    hardware_faults_settle(node_id=node.id, now=now)


def agent_restart(decision: RestartAgent, *, now: datetime) -> None:
    """Orders the provider to restart a dead agent. The engine keeps running. Raises StaleDecision if its provider has
    an order already."""
    with transaction.atomic():
        provider_order(node=decision.node, action=ProviderAction.RESTART_AGENT, reason=decision.reason, now=now)


def _lock_pool(region: Region, instance_type: InstanceType, there: int) -> None:
    """Until the commit, no other worker launches nodes in this region."""
    Region.objects.select_for_update().get(name=region.name)
    pool = Node.objects.filter(region=region, instance_type=instance_type).exclude(state=NodeState.RETIRED)
    if (count := pool.count()) != there:
        raise StaleDecision(f"{region.name} has {count} nodes of {instance_type.name}, not {there}")


def _change_state(node_id: str, seen: NodeState, to: NodeState, reason: str, now: datetime, **changes: Any) -> Node:
    _check_transition(seen, to)
    rows = Node.objects.filter(id=node_id, state=seen.value)
    compare_and_set_or_stale(rows, what=f"node {node_id}", state=to.value, reason=reason, state_since=now, **changes)
    node = Node.objects.select_related("region").get(id=node_id)
    _record_moves([(node, to, reason)], now)
    desired_changed([node_id])
    return node


def _check_transition(seen: NodeState, to: NodeState) -> None:
    if to not in NODE_ALLOWED[seen]:
        raise ValueError(f"a node cannot go from {seen} to {to}")


def _record_moves(moves: Sequence[tuple[Node, NodeState, str]], now: datetime) -> None:
    events_record(
        [
            Event(
                at=now,
                kind=f"node.{to}",
                message=f"{node.id} is {to}: {reason}",
                tone=NODE_TONE[to],
                region=node.region_id,
                node=node.id,
            )
            for node, to, reason in moves
        ]
    )
    names = [node.id for node, _, _ in moves]
    for name in names if len(names) <= MAX_NAMED else [""]:
        live.push("nodes", name)


def embedded_fleet_resume(*, now: datetime) -> int:
    """Boots the machines of embedded providers after all of them were stopped, as by `make down`. Cells whose machines
    are gone start a new generation on the same nodes. A machine without its folder stays down, and the reconciler
    replaces it. Returns the number of machines booted."""
    return sum(_resume_provider(provider, now) for provider in embedded_providers())


def _resume_provider(provider: EmbeddedProvider, now: datetime) -> int:
    regions = Region.objects.filter(provider=provider.name)
    nodes = Node.objects.filter(region__in=regions, provider_call=None)
    nodes = nodes.exclude(state__in=[NodeState.RETIRED, NodeState.LOST])
    statuses = provider.describe(list(nodes.values_list("id", flat=True)))
    gone = {node for node, status in statuses.items() if status is ProviderStatus.GONE}
    for cell in Cell.objects.filter(state__in=RESUMED, members__node__in=gone).distinct():
        _restart_cell(cell, now)
    booted = 0
    for node in sorted(gone):
        try:
            provider.restart_agent(node)
            booted += 1
        except ProviderError as error:
            log.warning("%s", error)
    machines_forget(gone, now=now)
    return booted


def _restart_cell(cell: Cell, now: datetime) -> None:
    nodes = tuple(cell.members.order_by("rank").values_list("node_id", flat=True))
    decision = StartCell(
        cell.id, CellState(cell.state), cell.generation, nodes, "its machines were stopped and boot again"
    )
    try:
        cell_start(decision, now=now)
    except StaleDecision as stale:
        log.info("left as it is: %s", stale)


def node_cordon(*, node_id: str, actor: str, now: datetime, why: str = "") -> bool:
    """Cordons a node. Returns False if it was cordoned already. Raises Conflict if the node is retired."""
    return _set_cordoned(node_id, True, actor, why, now)


def node_uncordon(*, node_id: str, actor: str, now: datetime, why: str = "") -> bool:
    """Uncordons a node. Returns False if it was not cordoned. The operator declares the machine healthy: if it is
    faulty and in no cell it becomes ready, its signals are settled, its incidents close, and a scheduled replacement is
    cancelled. Raises Conflict if the node is retired, or faulty and still in a cell."""
    with transaction.atomic():
        changed = _set_cordoned(node_id, False, actor, why, now)
        if changed:
            _declare_healthy(Node.objects.get(id=node_id), actor, why, now)
    return changed


def _declare_healthy(node: Node, actor: str, why: str, now: datetime) -> None:
    reason = f"uncordoned by {actor}" + (f": {why}" if why else "")
    if node.state == NodeState.FAULTY:
        if CellMember.objects.filter(node=node).exists():
            raise Conflict(f"node {node.id} is faulty and still in a cell; wait until its replacement took its place")
        node.state, node.reason, node.state_since, node.spare_since = NodeState.READY.value, reason, now, now
        node.save(update_fields=["state", "reason", "state_since", "spare_since"])
    hardware_faults_settle(node_id=node.id, now=now)
    incidents_close(node=node.id, kind__in=list(IncidentKind), resolution=reason, now=now)
    Replacement.objects.filter(node=node, closed_at__isnull=True).update(closed_at=now, resolution=reason)


@transaction.atomic
def _set_cordoned(node_id: str, cordoned: bool, actor: str, why: str, now: datetime) -> bool:
    node = Node.objects.select_for_update().get(id=node_id)
    verb = "cordoned" if cordoned else "uncordoned"
    if node.state == NodeState.RETIRED:
        raise Conflict(f"node {node.id} is retired; it cannot be {verb}")
    is_new = node.cordoned is not cordoned
    node.cordoned, node.cordoned_for_notice = cordoned, False
    node.save(update_fields=["cordoned", "cordoned_for_notice"])
    if not is_new:
        return False
    message = f"{node.id} {verb} by {actor}" + (f": {why}" if why else "")
    node_event(node, f"node.{verb}", message, now=now, tone=Tone.WARN if cordoned else Tone.OK, actor=actor)
    wake_ups.send("fleet.reconcile")
    return True


REPLACEABLE = frozenset({NodeState.READY, NodeState.SUSPECT})


def node_drain(*, node_id: str, actor: str, now: datetime, why: str = "") -> None:
    """Cordons a node and drains its cell. A cell on other nodes takes its place. The machine stays. Raises Conflict if
    the node is retired, or its cell is starting or changed meanwhile."""
    with transaction.atomic():
        node_cordon(node_id=node_id, actor=actor, now=now, why=why)
        member = CellMember.objects.filter(node_id=node_id).select_related("cell").first()
        if member is not None and member.cell.state != CellState.DRAINING:
            cell_drain(cell_id=member.cell_id, actor=actor, now=now, why=why or f"to empty {node_id}")


def node_replacement_request(*, node_id: str, actor: str, now: datetime, why: str = "") -> None:
    """Requests the replacement of a node: its cell is drained, another node takes its place, and the machine is
    terminated. Raises Conflict if the node is not in use, or is being replaced already."""
    with transaction.atomic():
        node = Node.objects.select_for_update().get(id=node_id)
        if NodeState(node.state) not in REPLACEABLE:
            allowed = " or ".join(sorted(REPLACEABLE))
            raise Conflict(f"node {node.id} is {node.state}; only one that is {allowed} can be replaced")
        if is_replaced(node.id):
            raise Conflict(f"node {node.id} is being replaced already")
        node_cordon(node_id=node.id, actor=actor, now=now, why=why)
        reason = f"replacement requested by {actor}" + (f": {why}" if why else "")
        replacement_request(node=node, cell=cell_of(node.id), actor=actor, reason=reason, now=now)
        message = f"{node.id} is to be replaced: {reason}"
        node_event(node, "node.replacement", message, now=now, tone=Tone.MOVING, actor=actor)
        wake_ups.send("fleet.reconcile")


# A request for deep checks is part of a node's desired state; results arrive in its reports.

MAX_CHECKED_TOGETHER = 32
"""Limit of nodes whose links are checked together, because every pair is measured one after the other."""


def node_checks_request(
    *, node_id: str, actor: str, now: datetime, why: str = "", with_nodes: Sequence[str] = ()
) -> list[str]:
    """Orders a node to run its deep checks, including its links to `with_nodes`, which run them as well. Returns the
    nodes, by rank. Raises InvalidInput if another node does not exist or is named twice, or there are too many. Raises
    Conflict if a node is retired or not ready, or links are to be checked and a node is in a cell."""
    names = [node_id, *with_nodes]
    if len(set(names)) != len(names):
        raise InvalidInput(field="with_nodes", rule="once", message="a node is named twice")
    if len(names) > MAX_CHECKED_TOGETHER:
        message = f"{len(names)} nodes; links of at most {MAX_CHECKED_TOGETHER} are checked together"
        raise InvalidInput(field="with_nodes", rule="count", message=message)
    with transaction.atomic():
        found = {row.id: row for row in Node.objects.select_for_update().filter(id__in=names).order_by("id")}
        for name in names:
            if name not in found:
                raise InvalidInput(field="with_nodes", rule="exists", message=f"there is no node {name!r}")
            _check_possible(found[name], together=bool(with_nodes))
        request, secret = secrets.token_hex(8), secrets.token_hex(16) if with_nodes else ""
        for name in names:
            values = {
                "request": request,
                "peers": names if with_nodes else [],
                "secret": secret,
                "reset": None,
                "requested_at": now,
                "requested_by": actor,
            }
            NodeCheck.objects.update_or_create(node=found[name], defaults=values)
            message = f"{name} is being checked, requested by {actor}" + (f": {why}" if why else "")
            node_event(found[name], "node.check_requested", message, now=now, tone=Tone.MOVING, actor=actor)
        Node.objects.filter(id__in=names).update(desired_version=F("desired_version") + 1)
        live.push_desired(names)
    return names


def _check_possible(node: Node, *, together: bool) -> None:
    if node.state in {NodeState.RETIRED, NodeState.JOINING, NodeState.LOST}:
        raise Conflict(f"node {node.id} is {node.state}; only nodes that have joined can be checked")
    if together and hasattr(node, "member"):
        raise Conflict(f"node {node.id} is in cell {node.member.cell_id}, whose engine uses the ports; choose a spare")
