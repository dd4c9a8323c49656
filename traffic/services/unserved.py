"""Opens an incident about a deployment that no cell of a region can serve, and closes it when one can again."""

import contextlib
from collections.abc import Iterable
from datetime import datetime

from django.db import transaction

from fleet.models import Incident
from fleet.planning.decisions import NoteIncident
from fleet.planning.fault_rules import NO_USABLE_CELL
from fleet.planning.states import IncidentState
from fleet.services.incident import incident_note, incident_open, incidents_close
from kernel.transitions import StaleDecision
from traffic.models import TrafficWindow
from traffic.planning.shift import TrafficView
from traffic.planning.unserved import CLOSE_AFTER_S, Judgement, Noted, Place, judge_place
from traffic.selectors.unserved import places

NOTE_EVERY_S = 4.0
"""Every second look: each note makes browsers fetch the incident again."""


def unserved_judge(views: Iterable[TrafficView], *, now: datetime) -> None:
    """One look at every deployment in every region."""
    judged = {place.subject: (place, judge_place(place, now)) for place in places(views, now)}
    with transaction.atomic():
        incidents = Incident.objects.filter(kind=NO_USABLE_CELL)
        known = {row.subject: row for row in incidents.filter(state=IncidentState.OPEN.value)}
        muted = set(incidents.filter(muted_until__gt=now).values_list("subject", flat=True))
        for place, judgement in judged.values():
            _note(place, judgement.noted)
            if judgement.unserved is not None and place.subject not in muted:
                _report(place, judgement, known.get(place.subject), now)
        for subject, incident in known.items():
            why = judged[subject][1] if subject in judged else None
            if why is not None and why.noted.since is not None:
                continue
            seen_s = (now - (incident.seen_at or incident.opened_at)).total_seconds()
            if why is None or seen_s >= CLOSE_AFTER_S:
                resolution = why.resolution if why else "the deployment or its ingress is no more"
                incidents_close(kind=NO_USABLE_CELL, subject=subject, resolution=resolution, now=now)


def _note(place: Place, noted: Noted) -> None:
    if noted == Noted(place.served, place.since, place.refused_before):
        return
    rows = TrafficWindow.objects.filter(deployment=place.deployment, region=place.region)
    rows.update(served=noted.served, unserved_since=noted.since, refused_before=dict(noted.refused_before))


def _report(place: Place, judgement: Judgement, known: Incident | None, now: datetime) -> None:
    unserved = judgement.unserved
    if unserved is None:
        return
    if known is None:
        incident_open(
            kind=NO_USABLE_CELL,
            subject=place.subject,
            summary=unserved.summary,
            evidence=unserved.evidence,
            now=now,
            region=place.region,
            deployment=place.deployment,
        )
    elif (now - (known.seen_at or known.opened_at)).total_seconds() >= NOTE_EVERY_S:
        with contextlib.suppress(StaleDecision):  # an operator has just dismissed it
            incident_note(NoteIncident(known.pk, unserved.summary, unserved.evidence), now=now)
