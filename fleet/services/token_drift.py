"""Opens an incident about a cell that counts tokens otherwise than its engine, and closes it when that is over."""

from datetime import datetime, timedelta
from typing import Any

from django.db import transaction

from fleet.models import Cell, Incident, NodeReport
from fleet.planning.states import CellState, IncidentState
from fleet.planning.token_drift import KIND, CheckedCell, plan_token_drift
from fleet.services.incident import incident_open, incidents_close

FRESH_FOR = timedelta(seconds=15)
"""What was reported before says nothing about now."""
MOST = 2**53
"""No total that is meant is as large."""


def token_drift_judge(*, now: datetime) -> None:
    """One look at what leaders report."""
    open_about = set(
        Incident.objects.filter(kind=KIND, state=IncidentState.OPEN.value).values_list("subject", flat=True)
    )
    there = Cell.objects.exclude(state=CellState.STOPPED.value)
    known = set(there.filter(pk__in=open_about).values_list("pk", flat=True))
    plan = plan_token_drift(_checked(now), known, open_about)
    with transaction.atomic():
        for each, summary in plan.opened:
            cell = Cell.objects.filter(pk=each.cell).first()
            if cell is not None:
                incident_open(
                    kind=KIND,
                    subject=each.cell,
                    summary=summary,
                    evidence=_evidence(each),
                    now=now,
                    region=cell.region_id,
                    deployment=cell.deployment_id,
                    cell=cell.pk,
                )
        for subject, why in plan.closed:
            incidents_close(kind=KIND, subject=subject, resolution=why, now=now)


def _checked(now: datetime) -> list[CheckedCell]:
    """What leaders say of their own cells."""
    reports = NodeReport.objects.filter(
        load__has_key="token_check", last_seen_at__gt=now - FRESH_FOR, node__member__rank=0
    ).exclude(load__token_check=None)
    said = reports.values_list("node__member__cell_id", "cell", "load__token_check")
    return [
        _checked_cell(cell, check) for cell, reported, check in said if cell == reported and isinstance(check, dict)
    ]


def _checked_cell(cell: str, check: dict[str, Any]) -> CheckedCell:
    prompt, completion, our_prompt, our_completion = (
        max(0, min(int(check.get(name, 0)), MOST))
        for name in (
            *("engine_prompt_total", "engine_completion_total"),
            *("counted_prompt_total", "counted_completion_total"),
        )
    )
    since = float(check.get("since", 0.0))
    return CheckedCell(cell, since, (prompt, completion), (our_prompt, our_completion))


def _evidence(each: CheckedCell) -> dict[str, Any]:
    return {
        "since": each.since,
        "engine_prompt_tokens": each.engine[0],
        "engine_completion_tokens": each.engine[1],
        "counted_prompt_tokens": each.counted[0],
        "counted_completion_tokens": each.counted[1],
    }
