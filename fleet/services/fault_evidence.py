"""Keeps evidence of faults until it is settled: what agents see of their hardware, which cells ingresses cannot reach,
and what was repaired. What follows from it is the planners' business."""

from datetime import datetime
from typing import Any

from django.db import transaction
from django.db.models import F

from engine_agent.protocol.signatures import FaultSignature, is_hard
from fleet.models import CellSighting, Node, Repair, Signal
from fleet.planning.states import NodeState
from kernel import hints

SIGNATURES = frozenset(FaultSignature)


def hardware_fault_record(
    *, node: Node, cell: str, signature: str, summary: str, evidence: dict[str, Any], now: datetime
) -> None:
    """Keep a hardware fault that a node's agent saw. Other evidence (an engine that ended) is not kept here.

    A fault that passes by itself counts as a repair: its engine was, or will be, loaded anew.
    """
    if signature not in SIGNATURES or node.state == NodeState.RETIRED:
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


def hardware_faults_settle(*, now: datetime, **which: Any) -> int:
    """Count what `which` selects (by node, signature, …) as healed or dismissed. Returns how many."""
    return Signal.objects.filter(settled_at__isnull=True, **which).update(settled_at=now)


def cell_sightings_store(*, witness: str, down: dict[str, int], now: datetime) -> None:
    """Which cells an ingress (the `witness`) cannot reach, by generation. Its latest statement counts, while fresh."""
    if down:
        CellSighting.objects.update_or_create(witness=witness, defaults={"seen_at": now, "down": down})
    else:
        CellSighting.objects.filter(witness=witness).exclude(down={}).update(seen_at=now, down={})


def repair_record(*, node: str, what: str, reason: str, now: datetime) -> None:
    """Count a repair, so that a node that needs too many is handed to an operator. Call it in the transaction of the
    repair itself. `what`: a word such as `replacement`, `agent_restart`, `reload`."""
    Repair.objects.create(node_id=node, what=what, reason=reason, at=now)
