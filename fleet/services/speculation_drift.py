"""Opens an incident about a deployment that guesses worse than its version was calibrated to, and closes it."""

from datetime import datetime, timedelta
from typing import Any

from django.db import transaction

from fleet.models import Cell, Deployment, Incident, NodeReport
from fleet.planning.speculation_drift import KIND, Guessing, plan_speculation_drift
from fleet.planning.states import CellState, IncidentState
from fleet.services.incident import incident_open, incidents_close
from models_registry.selectors.calibration import chains_expected

FRESH_FOR = timedelta(seconds=15)
"""What was reported before says nothing about now."""
MOST = 2**53
"""No count that is meant is as large."""


def speculation_drift_judge(*, now: datetime) -> None:
    """One look at what leaders report."""
    open_about = set(
        Incident.objects.filter(kind=KIND, state=IncidentState.OPEN.value).values_list("subject", flat=True)
    )
    known = set(Deployment.objects.filter(pk__in=open_about).values_list("pk", flat=True))
    plan = plan_speculation_drift(_guessing(now), known, open_about)
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
                kind=KIND,
                subject=each.deployment,
                summary=summary,
                evidence=evidence,
                now=now,
                deployment=each.deployment,
            )
        for subject, why in plan.closed:
            incidents_close(kind=KIND, subject=subject, resolution=why, now=now)


def _guessing(now: datetime) -> list[Guessing]:
    """What leaders say of their own cells, and of no other, where the version is calibrated."""
    reports = NodeReport.objects.filter(
        load__has_key="speculation", last_seen_at__gt=now - FRESH_FOR, node__member__rank=0
    ).exclude(load__speculation=None)
    rows = reports.values_list("node__member__cell_id", "cell", "load__speculation")
    said = {cell: load for cell, reported, load in rows if cell == reported and isinstance(load, dict)}
    if not said:
        return []
    cells = list(
        Cell.objects.filter(pk__in=said).exclude(state=CellState.STOPPED.value).select_related("model_version")
    )
    chains = chains_expected({cell.model_version_id for cell in cells})
    return [
        _of(cell, said[cell.pk], chains[cell.model_version_id]) for cell in cells if cell.model_version_id in chains
    ]


def _of(cell: Cell, load: dict[str, Any], chains: dict[str, tuple[float, ...]]) -> Guessing:
    drafts, guessed, accepted = (
        max(0, min(int(load.get(name, 0)), MOST)) for name in ("drafts", "guessed_tokens", "accepted_tokens")
    )
    covered_s = float(load.get("covered_s", 0.0))
    return Guessing(cell.deployment_id, cell.model_version.reference, covered_s, drafts, guessed, accepted, chains)
