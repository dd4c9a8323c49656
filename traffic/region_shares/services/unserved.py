"""Opens and closes incidents about deployments that no cell of a region can serve, and about regions that lost all of
their traffic. The incident of a lost region replaces those of its deployments."""

import contextlib
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any

from django.db import transaction
from django.db.models import Q

from fleet.faults.models import Incident
from fleet.faults.planning.views import NO_USABLE_CELL, REGION_LOST
from fleet.faults.services.incidents import incident_note, incident_open, incidents_close
from fleet.nodes.models import NodeReport, holds_since
from fleet.reconcile.planning.decisions import NoteIncident
from fleet.reconcile.planning.states import IncidentState
from kernel.transitions import StaleDecision
from traffic.region_shares.models import TrafficWindow
from traffic.region_shares.planning.autopilot import TrafficView
from traffic.region_shares.planning.load import (
    CLOSE_AFTER_S,
    IngressSilence,
    Place,
    Unserved,
    WindowState,
    assess_place,
    lost_regions,
)
from traffic.region_shares.selectors.traffic import IngressView
from traffic.region_shares.selectors.unserved import places

NOTE_EVERY_S = 4.0
"""Every second pass: each update makes browsers fetch the incident again."""
AGENTS_WITHIN = timedelta(seconds=15)
"""While no agent has reported for this long, the control plane is cut off and knows nothing about regions."""


def unserved_check(
    views: Iterable[TrafficView],
    windows: Iterable[TrafficWindow],
    ingresses: Mapping[str, Iterable[IngressView]],
    *,
    now: datetime,
) -> None:
    assessed = {place.subject: (place, assess_place(place, now)) for place in places(views, windows, now)}
    silences = {
        region: [IngressSilence(one.id, one.seen_at) for one in found if one.seen_at is not None]
        for region, found in ingresses.items()
    }
    lost = lost_regions(assessed.values(), silences, _agents_report(now), now)
    with transaction.atomic():
        known, muted = _known_incidents(now)
        for region, loss in lost.items():
            if (REGION_LOST, region) not in muted:
                _report_incident(REGION_LOST, region, loss, known, now, region=region)
        for place, judgement in assessed.values():
            _note_window(place, judgement.noted)
            is_told = judgement.unserved is None or place.region in lost or (NO_USABLE_CELL, place.subject) in muted
            if judgement.unserved is not None and not is_told:
                where = {"region": place.region, "deployment": place.deployment}
                _report_incident(NO_USABLE_CELL, place.subject, judgement.unserved, known, now, **where)
        for (kind, subject), incident in known.items():
            seen_s = (now - (incident.seen_at or incident.opened_at)).total_seconds()
            if kind == REGION_LOST:
                if subject not in lost and seen_s >= CLOSE_AFTER_S:
                    incidents_close(kind=kind, subject=subject, resolution="it serves again", now=now)
                continue
            why = assessed[subject][1] if subject in assessed else None
            if why is not None and why.noted.since is not None:
                continue
            if why is None or seen_s >= CLOSE_AFTER_S:
                resolution = why.resolution if why else "the deployment or its ingress was removed"
                incidents_close(kind=kind, subject=subject, resolution=resolution, now=now)


Key = tuple[str, str]


def _known_incidents(now: datetime) -> tuple[dict[Key, Incident], set[Key]]:
    """The open ones, and those that were dismissed recently."""
    is_open, is_muted = Q(state=IncidentState.OPEN.value), Q(muted_until__gt=now)
    rows = list(Incident.objects.filter(is_open | is_muted, kind__in=[NO_USABLE_CELL, REGION_LOST]))
    known = {(row.kind, row.subject): row for row in rows if row.state == IncidentState.OPEN.value}
    muted = {(row.kind, row.subject) for row in rows if row.muted_until and row.muted_until > now}
    return known, muted


def _agents_report(now: datetime) -> bool:
    return NodeReport.objects.filter(holds_since(now - AGENTS_WITHIN), connected=True).exists()


def _note_window(place: Place, noted: WindowState) -> None:
    if noted == WindowState(place.served, place.since, place.refused_before):
        return
    rows = TrafficWindow.objects.filter(deployment=place.deployment, region=place.region)
    rows.update(served=noted.served, unserved_since=noted.since, refused_before=dict(noted.refused_before))


def _report_incident(
    kind: str, subject: str, unserved: Unserved, known: Mapping[Key, Incident], now: datetime, **where: Any
) -> None:
    incident = known.get((kind, subject))
    if incident is None:
        incident_open(
            kind=kind, subject=subject, summary=unserved.summary, evidence=unserved.evidence, now=now, **where
        )
    elif (now - (incident.seen_at or incident.opened_at)).total_seconds() >= NOTE_EVERY_S:
        with contextlib.suppress(StaleDecision):  # an operator has just dismissed it
            incident_note(NoteIncident(incident.pk, unserved.summary, unserved.evidence), now=now)
