"""Cuts what ranks computed since their engines started into windows, to compare like with like. One worker at a time
does it; a window that nobody cut in time is left out, never guessed."""

from datetime import datetime
from typing import Any

from engine_agent.protocol.states import EngineState
from fleet.models import NodeReport, StepRecord
from fleet.planning.settings import FaultSettings
from fleet.planning.states import NodeState
from kernel.leases import lease_release, lease_take, this_holder

LEASE = "step-windows"
LEASE_TTL_S = 30.0
Sums = dict[str, dict[str, Any]]


def step_windows_cut(*, now: datetime, settings: FaultSettings | None = None) -> int:
    """Close the window of every rank that is in a new one. Returns how many ranks were looked at."""
    chosen = settings or FaultSettings()
    holder = this_holder()
    if lease_take(name=LEASE, holder=holder, ttl_s=LEASE_TTL_S, now=now) is None:
        return 0
    try:
        return _cut(int(now.timestamp() // chosen.step_window_s), chosen)
    finally:
        lease_release(name=LEASE, holder=holder, now=now)


def _cut(index: int, settings: FaultSettings) -> int:
    StepRecord.objects.filter(node__state=NodeState.RETIRED.value).delete()
    known = {record.node_id: record for record in StepRecord.objects.all()}
    said: Any = NodeReport.objects.filter(steps__isnull=False, state=EngineState.READY.value, connected=True)
    changed, seen = [], 0
    for node, cell, generation, totals in said.values_list("node_id", "cell", "generation", "steps"):
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
