"""Opens and closes incidents. Always inside the transaction of the change that they belong to."""

from datetime import datetime
from typing import Any

from django.db import transaction

from controlplane.kernel import live
from controlplane.kernel.events import event_record
from controlplane.kernel.tones import Tone
from fleet.models import Incident
from fleet.planning.states import IncidentState


def incident_open(
    *, kind: str, subject: str, summary: str, evidence: dict[str, Any], now: datetime, **where: Any
) -> Incident:
    """Open an incident, or return the one open for (kind, subject). `where`: region, deployment, cell, node."""
    with transaction.atomic():
        incident, created = Incident.objects.get_or_create(
            kind=kind,
            subject=subject,
            state=IncidentState.OPEN.value,
            defaults={"summary": summary, "evidence": evidence, "opened_at": now, **where},
        )
        if created:
            event_record(kind="incident.opened", message=summary, tone=Tone.BAD, now=now, **where)
            live.push("incidents")
    return incident


def incidents_close(*, resolution: str, now: datetime, **which: str) -> int:
    """Close every open incident that `which` selects (by cell, node, kind, …). Returns how many."""
    with transaction.atomic():
        closed = 0
        for incident in Incident.objects.select_for_update().filter(state=IncidentState.OPEN.value, **which):
            incident.state, incident.closed_at, incident.resolution = IncidentState.CLOSED.value, now, resolution
            incident.save(update_fields=["state", "closed_at", "resolution"])
            event_record(
                kind="incident.closed",
                message=f"{incident.summary}: {resolution}",
                tone=Tone.OK,
                now=now,
                region=incident.region,
                deployment=incident.deployment,
                cell=incident.cell,
                node=incident.node,
            )
            closed += 1
        if closed:
            live.push("incidents")
    return closed
