"""Incidents: at most one open for a thing, and every change of one is in the timeline."""

import pytest

from fleet.models import Incident
from fleet.services.incident import incident_open, incidents_close
from kernel.models import Event
from tests.fleet.rows import NOW

pytestmark = pytest.mark.django_db


def opened(subject: str = "c1", **where: str) -> Incident:
    return incident_open(kind="cell-failed", subject=subject, summary="broke", evidence={"pid": 7}, now=NOW, **where)


def test_an_incident_is_opened_with_its_evidence_and_told() -> None:
    incident = opened(cell="c1", region="us-east-1")
    assert (incident.evidence, incident.cell, incident.opened_at) == ({"pid": 7}, "c1", NOW)
    event = Event.objects.get()
    assert (event.kind, event.tone, event.cell, event.region) == ("incident.opened", "bad", "c1", "us-east-1")


def test_an_open_one_is_not_opened_again() -> None:
    assert opened() == opened()
    assert Event.objects.count() == 1


def test_another_one_follows_a_closed_one() -> None:
    first = opened(cell="c1")
    incidents_close(resolution="ready again", now=NOW, cell="c1")
    assert opened(cell="c1") != first
    assert Incident.objects.filter(state="open").count() == 1


def test_closing_closes_all_that_is_asked_for_and_nothing_else() -> None:
    opened("c1", cell="c1"), opened("c2", cell="c1"), opened("c3", cell="c3")
    assert incidents_close(resolution="healed", now=NOW, cell="c1") == 2
    assert Incident.objects.get(state="open").subject == "c3"
    closed = Incident.objects.filter(state="closed")
    assert set(closed.values_list("resolution", "closed_at")) == {("healed", NOW)}
    assert Event.objects.filter(kind="incident.closed", tone="ok").count() == 2


def test_closing_what_is_not_open_says_nothing() -> None:
    assert incidents_close(resolution="healed", now=NOW, cell="c1") == 0
    assert not Event.objects.exists()
