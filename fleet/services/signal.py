"""Keeps what agents see of their hardware until it is settled. What follows from it is the planners' business."""

from datetime import datetime
from typing import Any

from django.db import transaction
from django.db.models import F

from engine_agent.protocol.signatures import FaultSignature, is_hard
from fleet.models import Node, Signal
from fleet.planning.states import NodeState
from fleet.services.repair import repair_record
from kernel import hints

KNOWN = frozenset(FaultSignature)


def signal_record(
    *, node: Node, cell: str, signature: str, summary: str, evidence: dict[str, Any], now: datetime
) -> None:
    """Note a hardware fault that a node's agent saw. Other evidence (an engine that ended) is not kept here.

    A fault that passes by itself counts as a repair: its engine was, or will be, loaded anew.
    """
    if signature not in KNOWN or node.state == NodeState.RETIRED:
        return
    with transaction.atomic():
        row, created = Signal.objects.get_or_create(
            node=node,
            signature=signature,
            settled_at=None,
            defaults={
                "instance_type": node.instance_type_id,
                "summary": summary,
                "evidence": evidence,
                "cell": cell,
                "first_at": now,
                "last_at": now,
            },
        )
        if not created:
            Signal.objects.filter(pk=row.pk).update(
                count=F("count") + 1, last_at=now, summary=summary, evidence=evidence, cell=cell
            )
        elif not is_hard(signature):
            repair_record(node=node.id, what="reload", reason=f"{signature}: {summary}", now=now)
        hints.ring("fleet.reconcile")


def signals_settle(*, now: datetime, **which: Any) -> int:
    """Count what `which` selects (by node, signature, …) as healed or dismissed. Returns how many."""
    return Signal.objects.filter(settled_at__isnull=True, **which).update(settled_at=now)
