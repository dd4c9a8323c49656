"""Keeps evidence of faults until it is settled: what agents see of their hardware, which cells ingresses cannot reach,
what was repaired, and how fast ranks compute. What follows from it is the planners' business."""

from datetime import datetime
from typing import Any

from django.db import transaction
from django.db.models import F

from engine_agent.protocol.signatures import FaultSignature, is_hard
from engine_agent.protocol.states import EngineState
from fleet.models import CellSighting, Node, NodeReport, Repair, Signal, StepRecord
from fleet.planning.settings import FaultSettings
from fleet.planning.states import NodeState
from kernel import wake_ups
from kernel.leases import lease_release, lease_take, this_holder

STEP_WINDOWS_LEASE = "step-windows"
STEP_WINDOWS_LEASE_TTL_S = 30.0
Sums = dict[str, dict[str, Any]]


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
        wake_ups.send("fleet.reconcile")


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
    repair itself. `what`: one of `replacement`, `agent_restart`, `reload`."""
    Repair.objects.create(node_id=node, what=what, reason=reason, at=now)


def step_windows_cut(*, now: datetime, settings: FaultSettings | None = None) -> int:
    """Cut what ranks computed since their engines started into windows, to compare like with like: close the window of
    every rank that is in a new one. A window that was not cut in time is left out, never guessed.

    Returns how many ranks reported.
    """
    chosen = settings or FaultSettings()
    holder = this_holder()
    if lease_take(name=STEP_WINDOWS_LEASE, holder=holder, ttl_s=STEP_WINDOWS_LEASE_TTL_S, now=now) is None:
        return 0
    try:
        return _cut_windows(int(now.timestamp() // chosen.step_window_s), chosen)
    finally:
        lease_release(name=STEP_WINDOWS_LEASE, holder=holder, now=now)


def _cut_windows(index: int, settings: FaultSettings) -> int:
    StepRecord.objects.filter(node__state=NodeState.RETIRED.value).delete()
    known = {record.node_id: record for record in StepRecord.objects.all()}
    reports: Any = NodeReport.objects.filter(steps__isnull=False, state=EngineState.READY.value, connected=True)
    changed, seen = [], 0
    for node, cell, generation, totals in reports.values_list("node_id", "cell", "generation", "steps"):
        seen += 1
        record = known.get(node)
        if record is None or (record.cell, record.generation) != (cell, generation):
            changed.append(StepRecord(node_id=node, cell=cell, generation=generation, index=index, totals=totals))
        elif record.index < index:
            if record.index == index - 1 and (window := _between(record.totals, totals)):
                record.windows = [*record.windows, {"index": record.index, **window}][-settings.step_windows :]
            record.index, record.totals = index, totals
            changed.append(record)
    columns = ["cell", "generation", "index", "totals", "windows"]
    StepRecord.objects.bulk_create(changed, update_conflicts=True, unique_fields=["node"], update_fields=columns)
    return seen


def _between(before: Sums, after: Sums) -> Sums:
    """What was added; empty if nothing was, or if the engine counts anew."""
    grown = {bucket: total - before["steps"].get(bucket, 0) for bucket, total in after["steps"].items()}
    steps = {bucket: more for bucket, more in grown.items() if more != 0}
    if not steps or any(more < 0 for more in steps.values()):
        return {}
    compute_ms = {b: after["compute_ms"].get(b, 0.0) - before["compute_ms"].get(b, 0.0) for b in steps}
    return {"steps": steps, "compute_ms": compute_ms}
