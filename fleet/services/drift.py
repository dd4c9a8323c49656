"""Opens and closes incidents about drift: cells that count tokens differently from their engine, and deployments whose
speculation is accepted less often than calibrated."""

from datetime import datetime, timedelta
from typing import Any

from django.db import transaction

from fleet.models import Cell, Deployment, Incident, NodeReport
from fleet.planning.drift import OF_SPECULATION, OF_TOKENS, CheckedCell, plan_speculation_drift, plan_token_drift
from fleet.planning.states import CellState, IncidentState
from fleet.selectors.speculation import guessing_calibrated
from fleet.services.incident import incident_open, incidents_close

FRESH_FOR = timedelta(seconds=15)
"""What was reported before says nothing about now."""
MOST = 2**53
"""No total that is meant is as large."""


def token_drift_judge(*, now: datetime) -> None:
    """One look at what leaders report."""
    open_about = set(
        Incident.objects.filter(kind=OF_TOKENS, state=IncidentState.OPEN.value).values_list("subject", flat=True)
    )
    there = Cell.objects.exclude(state=CellState.STOPPED.value)
    known = set(there.filter(pk__in=open_about).values_list("pk", flat=True))
    plan = plan_token_drift(_checked(now), known, open_about)
    with transaction.atomic():
        for each, summary in plan.opened:
            cell = Cell.objects.filter(pk=each.cell).first()
            if cell is not None:
                incident_open(
                    kind=OF_TOKENS,
                    subject=each.cell,
                    summary=summary,
                    evidence=_evidence(each),
                    now=now,
                    region=cell.region_id,
                    deployment=cell.deployment_id,
                    cell=cell.pk,
                )
        for subject, why in plan.closed:
            incidents_close(kind=OF_TOKENS, subject=subject, resolution=why, now=now)


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


# Opens an incident about a deployment that guesses worse than its version was calibrated to, and closes it.


def speculation_drift_judge(*, now: datetime) -> None:
    """One look at what leaders report."""
    open_about = set(
        Incident.objects.filter(kind=OF_SPECULATION, state=IncidentState.OPEN.value).values_list("subject", flat=True)
    )
    known = set(Deployment.objects.filter(pk__in=open_about).values_list("pk", flat=True))
    plan = plan_speculation_drift(guessing_calibrated(now), known, open_about)
    with transaction.atomic():
        for each, summary in plan.opened:
            evidence = {
                "version": each.version,
                "drafts": each.drafts,
                "guessed_tokens": round(each.guessed, 3),
                "accepted_tokens": round(each.accepted, 3),
                "expected_tokens": round(each.expected, 3),
            }
            incident_open(
                kind=OF_SPECULATION,
                subject=each.deployment,
                summary=summary,
                evidence=evidence,
                now=now,
                deployment=each.deployment,
            )
        for subject, why in plan.closed:
            incidents_close(kind=OF_SPECULATION, subject=subject, resolution=why, now=now)
