"""Incident decisions on real rows: opened once, updated, closed with a reason, dismissed by an operator."""

from datetime import timedelta
from typing import Any

import pytest

from fleet.faults.models import Incident, Signal
from fleet.faults.planning.views import IncidentKind
from fleet.faults.services.incidents import (
    hardware_fault_record,
    incident_close,
    incident_dismiss,
    incident_note,
    incident_open_decided,
)
from fleet.reconcile.planning.decisions import CloseIncident, NoteIncident, OpenIncident
from fleet.reconcile.selectors.snapshot import fleet_view
from kernel.models import Event
from kernel.refusals import Conflict
from kernel.tones import Tone
from kernel.transitions import StaleDecision
from tests.fleet import rows
from tests.fleet.rows import NOW

pytestmark = pytest.mark.django_db

LATER = NOW + timedelta(seconds=30)


def opened(**changes: Any) -> Incident:
    decision = {
        "kind": IncidentKind.SLOW,
        "subject": "n-a",
        "summary": "slow",
        "evidence": {"score": 0.5},
        "node": "n-a",
    }
    incident_open_decided(OpenIncident(**{**decision, **changes}), now=NOW)
    return Incident.objects.get()


def test_opening_twice_makes_one_incident_and_one_event() -> None:
    assert opened() == opened()
    assert Event.objects.get().kind == "incident.opened"


def test_a_shadow_incident_feels_idle() -> None:
    assert opened(shadow=True).tone is Tone.IDLE
    assert Event.objects.get().tone == Tone.IDLE


def test_a_note_keeps_what_is_known_now() -> None:
    row = opened()
    incident_note(NoteIncident(row.pk, "slower", {"score": 0.4}), now=LATER)
    row.refresh_from_db()
    assert (row.summary, row.evidence, row.seen_at) == ("slower", {"score": 0.4}, LATER)


def test_an_incident_whose_fault_came_back_meanwhile_stays_open() -> None:
    row = opened()
    incident_note(NoteIncident(row.pk, "slow", {}), now=LATER)
    with pytest.raises(StaleDecision):
        incident_close(CloseIncident(row.pk, NOW, "gone"), now=LATER)
    incident_close(CloseIncident(row.pk, LATER, "gone"), now=LATER)
    row.refresh_from_db()
    assert (row.state, row.resolution, row.closed_by) == ("closed", "gone", "switchyard")


def test_dismissing_says_who_and_why_settles_the_evidence_and_keeps_it_quiet() -> None:
    hardware_fault_record(node=rows.node("n-a"), cell="", signature="nvidia_xid", summary="s", evidence={}, now=NOW)
    row = opened()
    incident_dismiss(incident_id=row.pk, actor="ann", why="a test", now=LATER)
    row.refresh_from_db()
    assert (row.state, row.resolution, row.closed_by) == ("closed", "dismissed by ann: a test", "ann")
    assert Signal.objects.get().settled_at == LATER
    assert fleet_view(now=LATER).faults.muted == {(IncidentKind.SLOW, "n-a")}
    assert fleet_view(now=LATER + timedelta(hours=1)).faults.muted == frozenset()
    with pytest.raises(Conflict, match="only an open one"):
        incident_dismiss(incident_id=row.pk, actor="ann", now=LATER)
