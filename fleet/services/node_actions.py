"""What operators do with one node: cordon, uncordon, drain and replace it. Each is recorded with its actor and reason.

The reconciler does the rest: it drains what still serves as the disruption ledger allows, and swaps the node.
"""

import secrets
from collections.abc import Sequence
from datetime import datetime

from django.db import transaction
from django.db.models import F

from fleet.models import CellMember, Node, NodeCheck, Replacement
from fleet.planning.fault_rules import IncidentKind
from fleet.planning.states import CellState, NodeState
from fleet.services.cell_actions import cell_drain
from fleet.services.fault_evidence import hardware_faults_settle
from fleet.services.incident import incidents_close
from fleet.services.node_event import cell_of, node_event
from fleet.services.replacement import is_replaced, replacement_request
from kernel import live, wake_ups
from kernel.refusals import Conflict, InvalidInput
from kernel.tones import Tone


def node_cordon(*, node_id: str, actor: str, now: datetime, why: str = "") -> bool:
    """Cordon a node. Returns False if it was cordoned already.

    Raises:
        Conflict: the node is retired.
    """
    return _set_cordoned(node_id, True, actor, why, now)


def node_uncordon(*, node_id: str, actor: str, now: datetime, why: str = "") -> bool:
    """Let a node be chosen again. Returns False if it was not cordoned.

    The operator vouches for the machine: a faulty one that is in no cell is ready again, what its agent saw of its
    hardware is settled, its incidents close, and a replacement that has not begun is called off.

    Raises:
        Conflict: the node is retired, or faulty and still in a cell.
    """
    with transaction.atomic():
        changed = _set_cordoned(node_id, False, actor, why, now)
        if changed:
            _vouch(Node.objects.get(id=node_id), actor, why, now)
    return changed


def _vouch(node: Node, actor: str, why: str, now: datetime) -> None:
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
        raise Conflict(f"node {node.id} is retired; only nodes that are still there can be {verb}")
    is_new = node.cordoned is not cordoned
    node.cordoned, node.cordoned_for_notice = cordoned, False
    node.save(update_fields=["cordoned", "cordoned_for_notice"])
    if not is_new:
        return False
    said = f"{node.id} {verb} by {actor}" + (f": {why}" if why else "")
    node_event(node, f"node.{verb}", said, now=now, tone=Tone.WARN if cordoned else Tone.OK, actor=actor)
    wake_ups.send("fleet.reconcile")
    return True


REPLACEABLE = frozenset({NodeState.READY, NodeState.SUSPECT})


def node_drain(*, node_id: str, actor: str, now: datetime, why: str = "") -> None:
    """Cordon a node and drain the cell that it is in: requests in flight finish or meet the deadline, the cell stops,
    and another one on other nodes makes up for it. The machine stays.

    Raises:
        Conflict: the node is retired, or its cell is starting or changed meanwhile.
    """
    with transaction.atomic():
        node_cordon(node_id=node_id, actor=actor, now=now, why=why)
        member = CellMember.objects.filter(node_id=node_id).select_related("cell").first()
        if member is not None and member.cell.state != CellState.DRAINING:
            cell_drain(cell_id=member.cell_id, actor=actor, now=now, why=why or f"to empty {node_id}")


def node_replacement_request(*, node_id: str, actor: str, now: datetime, why: str = "") -> None:
    """Have a node replaced: its cell is drained, another node takes its place, and the machine is ended.

    Raises:
        Conflict: the node is not in use, or is being replaced already.
    """
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
        said = f"{node.id} is to be replaced: {reason}"
        node_event(node, "node.replacement", said, now=now, tone=Tone.MOVING, actor=actor)
        wake_ups.send("fleet.reconcile")


# Has nodes make their deep checks, alone or together: a request is part of a node's desired state, and what was
# found comes with its reports. What fails is judged by the rules for faults.

TOGETHER_MOST = 32
"""Nodes whose links are checked at once: every pair is measured, one after the other."""


def node_checks_request(
    *, node_id: str, actor: str, now: datetime, why: str = "", with_nodes: Sequence[str] = ()
) -> list[str]:
    """Have a node checked, and its links to `with_nodes`, which are checked, too. Returns the nodes, by rank.

    Raises:
        InvalidInput: one of the others does not exist or is named twice, or they are too many.
        Conflict: one of them is retired, is not there yet, or, where links are checked, is in a cell.
    """
    names = [node_id, *with_nodes]
    if len(set(names)) != len(names):
        raise InvalidInput(
            field="with_nodes", rule="once", message="a node is named twice; name each of the others once"
        )
    if len(names) > TOGETHER_MOST:
        message = f"{len(names)} nodes; links of at most {TOGETHER_MOST} are checked at once"
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
                "requested_at": now,
                "requested_by": actor,
            }
            NodeCheck.objects.update_or_create(node=found[name], defaults=values)
            said = f"{name} is checked, requested by {actor}" + (f": {why}" if why else "")
            node_event(found[name], "node.check_requested", said, now=now, tone=Tone.MOVING, actor=actor)
        Node.objects.filter(id__in=names).update(desired_version=F("desired_version") + 1)
        live.push_desired(names)
    return names


def _check_possible(node: Node, *, together: bool) -> None:
    if node.state in {NodeState.RETIRED, NodeState.JOINING, NodeState.LOST}:
        raise Conflict(f"node {node.id} is {node.state}; only nodes that are there can be checked")
    if together and hasattr(node, "member"):
        raise Conflict(
            f"node {node.id} is in cell {node.member.cell_id}, whose engine has the ports; links are checked of spares"
        )
