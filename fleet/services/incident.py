"""Opens, notes and closes incidents. Always inside the transaction of the change that they belong to."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from django.db import transaction

from fleet.models import CellMember, Incident
from fleet.planning.decisions import CloseIncident, NoteIncident, OpenIncident
from fleet.planning.settings import FaultSettings
from fleet.planning.states import IncidentState
from fleet.planning.webhooks.delivery import WebhookEvent
from fleet.services.fault_evidence import hardware_faults_settle
from fleet.services.webhook_outbox import webhooks_notify
from kernel import live, wake_ups
from kernel.events import event_record
from kernel.refusals import Conflict
from kernel.tones import Tone
from kernel.transitions import compare_and_set_or_stale

SWITCHYARD = "switchyard"


def incident_open(
    *, kind: str, subject: str, summary: str, evidence: Mapping[str, Any], now: datetime, **columns: Any
) -> Incident:
    """Open an incident, or return the one open for (kind, subject). `columns`: region, deployment, cell, node, …"""
    with transaction.atomic():
        incident, created = Incident.objects.get_or_create(
            kind=kind,
            subject=subject,
            state=IncidentState.OPEN.value,
            defaults={"summary": summary, "evidence": dict(evidence), "opened_at": now, "seen_at": now, **columns},
        )
        if created:
            _announce(incident, "incident.opened", summary, incident.tone, now, SWITCHYARD)
            webhooks_notify(event=WebhookEvent.INCIDENT_OPENED, body=incident_body(incident), now=now)
    return incident


def incident_open_decided(decision: OpenIncident, *, now: datetime) -> None:
    """Open what the planner of faults found."""
    incident_open(
        kind=decision.kind,
        subject=decision.subject,
        summary=decision.summary,
        evidence=decision.evidence,
        now=now,
        region=decision.region,
        deployment=decision.deployment,
        cell=decision.cell,
        node=decision.node,
        cohort=decision.cohort,
        shadow=decision.shadow,
    )


def incident_note(decision: NoteIncident, *, now: datetime) -> None:
    """Its fault is still there.

    Raises:
        StaleDecision: it is closed.
    """
    with transaction.atomic():
        rows = Incident.objects.filter(pk=decision.incident, state=IncidentState.OPEN.value)
        changes = {"summary": decision.summary, "evidence": dict(decision.evidence), "seen_at": now}
        compare_and_set_or_stale(rows, what=f"incident {decision.incident}", **changes)
        live.push("incidents")


def incident_close(decision: CloseIncident, *, now: datetime) -> None:
    """Its fault is gone.

    Raises:
        StaleDecision: it is closed, or its fault was seen again meanwhile.
    """
    with transaction.atomic():
        rows = Incident.objects.filter(pk=decision.incident, state=IncidentState.OPEN.value)
        incident = rows.select_for_update().first()
        unseen = incident is not None and (incident.seen_at or incident.opened_at) == decision.seen_at
        compare_and_set_or_stale(rows if unseen else rows.none(), what=f"incident {decision.incident}", seen_at=now)
        if incident is not None:
            _close(incident, decision.reason, SWITCHYARD, now)


def incident_dismiss(*, incident_id: int, actor: str, now: datetime, why: str = "") -> None:
    """Close an incident in which an operator sees nothing to heal: its evidence is settled, and while the same goes on
    without new evidence it stays quiet for an hour.

    Raises:
        Conflict: it is closed already.
    """
    with transaction.atomic():
        incident = Incident.objects.select_for_update().get(pk=incident_id)
        if incident.state != IncidentState.OPEN:
            raise Conflict(f"incident {incident.pk} is {incident.state}; only an open one can be dismissed")
        incident.muted_until = now + timedelta(seconds=FaultSettings().muted_s)
        if incident.node:
            hardware_faults_settle(node_id=incident.node, now=now)
        elif incident.cell:
            members = CellMember.objects.filter(cell_id=incident.cell).values_list("node_id", flat=True)
            hardware_faults_settle(node_id__in=list(members), now=now)
        _close(incident, f"dismissed by {actor}" + (f": {why}" if why else ""), actor, now)
        wake_ups.send("fleet.reconcile")


def incidents_close(*, resolution: str, now: datetime, **which: Any) -> int:
    """Close every open incident that `which` selects (by cell, node, kind, …). Returns how many."""
    with transaction.atomic():
        incidents = list(Incident.objects.select_for_update().filter(state=IncidentState.OPEN.value, **which))
        for incident in incidents:
            _close(incident, resolution, SWITCHYARD, now)
    return len(incidents)


def incident_body(incident: Incident) -> dict[str, Any]:
    """The body of webhook messages about an incident."""
    return {
        "id": incident.pk,
        "kind": incident.kind,
        "subject": incident.subject,
        "state": str(incident.state),
        "shadow": incident.shadow,
        "summary": incident.summary,
        "resolution": incident.resolution,
        "region": incident.region,
        "deployment": incident.deployment,
        "cell": incident.cell,
        "node": incident.node,
        "evidence": incident.evidence,
        "opened_at": incident.opened_at.isoformat(),
        "closed_at": incident.closed_at.isoformat() if incident.closed_at else None,
    }


def _close(incident: Incident, resolution: str, actor: str, now: datetime) -> None:
    incident.state, incident.closed_at, incident.resolution = IncidentState.CLOSED.value, now, resolution
    incident.closed_by = actor
    incident.save(update_fields=["state", "closed_at", "resolution", "closed_by", "muted_until"])
    _announce(incident, "incident.closed", f"{incident.summary}: {resolution}", Tone.OK, now, actor)
    webhooks_notify(event=WebhookEvent.INCIDENT_CLOSED, body=incident_body(incident), now=now)


def _announce(incident: Incident, kind: str, message: str, tone: Tone, now: datetime, actor: str) -> None:
    event_record(
        kind=kind,
        message=message,
        tone=tone,
        now=now,
        actor=actor,
        region=incident.region,
        deployment=incident.deployment,
        cell=incident.cell,
        node=incident.node,
        detail={"incident": incident.pk},
    )
    live.push("incidents")
