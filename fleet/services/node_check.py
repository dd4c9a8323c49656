"""Has nodes make their deep checks, alone or together: a request is part of a node's desired state, and what was found
comes with its reports. What fails is judged by the rules for faults."""

import secrets
from collections.abc import Sequence
from datetime import datetime

from django.db import transaction
from django.db.models import F

from fleet.models import Node, NodeCheck
from fleet.planning.states import NodeState
from fleet.services.node_event import node_event
from kernel import live
from kernel.refusals import Conflict, InvalidInput
from kernel.tones import Tone

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
