"""Opens an incident about a deployment that guesses worse than its version was calibrated to, and closes it."""

from datetime import datetime

from django.db import transaction

from fleet.models import Deployment, Incident
from fleet.planning.speculation_drift import KIND, plan_speculation_drift
from fleet.planning.states import IncidentState
from fleet.selectors.speculation import guessing_calibrated
from fleet.services.incident import incident_open, incidents_close


def speculation_drift_judge(*, now: datetime) -> None:
    """One look at what leaders report."""
    open_about = set(
        Incident.objects.filter(kind=KIND, state=IncidentState.OPEN.value).values_list("subject", flat=True)
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
                kind=KIND,
                subject=each.deployment,
                summary=summary,
                evidence=evidence,
                now=now,
                deployment=each.deployment,
            )
        for subject, why in plan.closed:
            incidents_close(kind=KIND, subject=subject, resolution=why, now=now)
