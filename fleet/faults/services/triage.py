"""What users do with an incident: acknowledge it, give it an owner, write notes. None of it changes what the planners
do."""

from datetime import datetime

from django.contrib.auth.models import User
from django.db import transaction

from fleet.faults.models import Incident, IncidentNote
from fleet.reconcile.planning.states import IncidentState
from kernel import live
from kernel.events import event_record
from kernel.refusals import Conflict, InvalidInput
from kernel.tones import Tone

NOTE_MAX = 4000
NOTES_MAX = 200
"""Notes of one incident. A page shows all of them."""


def incident_acknowledge(*, incident_id: int, actor: str, now: datetime, why: str = "") -> None:
    """Records that the actor has seen it. Without an owner, the actor becomes the owner. Raises Conflict if it is
    closed or acknowledged."""
    with transaction.atomic():
        incident = Incident.objects.select_for_update().get(pk=incident_id)
        if incident.state != IncidentState.OPEN:
            raise Conflict(f"incident {incident.pk} is {incident.state}; only an open one can be acknowledged")
        if incident.acknowledged_by:
            raise Conflict(f"incident {incident.pk} was acknowledged by {incident.acknowledged_by}")
        incident.acknowledged_by, incident.acknowledged_at = actor, now
        incident.owner = incident.owner or actor
        incident.save(update_fields=["acknowledged_by", "acknowledged_at", "owner"])
        _triage_event(incident, "acknowledged", f"Acknowledged by {actor}" + (f": {why}" if why else ""), actor, now)


def incident_assign(*, incident_id: int, owner: str, actor: str, now: datetime, why: str = "") -> None:
    """Makes a user its owner; "" releases it. Raises InvalidInput if there is no such active user."""
    owner = owner.strip()
    if owner and not User.objects.filter(username=owner, is_active=True).exists():
        raise InvalidInput(field="owner", rule="exists", message=f"there is no active user {owner!r}")
    with transaction.atomic():
        incident = Incident.objects.select_for_update().get(pk=incident_id)
        if incident.owner == owner:
            return
        incident.owner = owner
        incident.save(update_fields=["owner"])
        text = f"Assigned to {owner}" if owner else "Released by its owner"
        _triage_event(incident, "assigned", text + (f": {why}" if why else ""), actor, now)


def incident_note_add(*, incident_id: int, text: str, actor: str, now: datetime) -> None:
    """Adds a note, also to a closed incident. Raises InvalidInput if it is empty or too long, and Conflict if the
    incident has too many."""
    text = text.strip()
    if not 0 < len(text) <= NOTE_MAX:
        raise InvalidInput(
            field="text", rule="length", message=f"a note has 1 to {NOTE_MAX} characters; this one has {len(text)}"
        )
    with transaction.atomic():
        incident = Incident.objects.select_for_update().get(pk=incident_id)
        if incident.notes.count() >= NOTES_MAX:
            raise Conflict(f"incident {incident.pk} has {NOTES_MAX} notes already, the most that are kept")
        IncidentNote.objects.create(incident=incident, at=now, actor=actor, text=text)
        _triage_event(incident, "noted", f"Note: {text}", actor, now)


def _triage_event(incident: Incident, what: str, message: str, actor: str, now: datetime) -> None:
    event_record(
        kind=f"incident.{what}",
        message=message,
        tone=Tone.IDLE,
        now=now,
        actor=actor,
        region=incident.region,
        deployment=incident.deployment,
        detail={"incident": incident.pk},
    )
    live.push("incidents")
