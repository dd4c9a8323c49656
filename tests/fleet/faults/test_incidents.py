"""Incidents and fault rules: services, events and the REST API."""

from datetime import timedelta
from typing import Any

import pytest

from fleet.faults.models import FaultRule, Incident
from fleet.faults.services.incidents import incident_open, incidents_close
from kernel.models import Event
from tests.controlplane.api.client import bearer
from tests.fleet.rows import NOW

pytestmark = pytest.mark.django_db


def opened(subject: str = "c1", **where: str) -> Incident:
    return incident_open(kind="token-drift", subject=subject, summary="broke", evidence={"pid": 7}, now=NOW, **where)


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


def incident(subject: str, **columns: Any) -> Incident:
    return Incident.objects.create(
        **{"kind": "node-lost", "subject": subject, "summary": "s", "opened_at": NOW, **columns}
    )


def subjects(**query: Any) -> list[str]:
    return [row["subject"] for row in bearer().get("/api/v1/incidents", query).json()["results"]]


def test_an_incident_says_everything_about_itself() -> None:
    row = incident("n-00000001", node="n-00000001", region="us-east-1", evidence={"reason": "gone"})
    assert bearer().get(f"/api/v1/incidents/{row.id}").json() == {
        "id": row.id,
        "kind": "node-lost",
        "severity": "major",
        "subject": "n-00000001",
        "state": "open",
        "tone": "bad",
        "summary": "s",
        "resolution": "",
        "region": "us-east-1",
        "deployment": "",
        "cell": "",
        "node": "n-00000001",
        "evidence": {"reason": "gone"},
        "cohort": "",
        "shadow": False,
        "seen_at": None,
        "opened_at": "2026-11-21T12:00:00Z",
        "closed_at": None,
        "closed_by": "",
        "acknowledged_by": "",
        "acknowledged_at": None,
        "owner": "",
        "runbook": "node-lost",
        "parts": [],
        "notes": [],
        "replacements": [],
    }


def test_the_newest_comes_first_and_closed_ones_stay() -> None:
    incident("a", state="closed", closed_at=NOW)
    incident("b")
    assert subjects() == ["b", "a"]
    assert subjects(subject="a") == ["a"]
    assert subjects(state="open") == ["b"]


@pytest.mark.parametrize("field", ["kind", "region", "deployment", "cell", "node"])
def test_incidents_are_found_by_what_they_speak_of(field: str) -> None:
    wanted = incident("a", **{field: "this"})
    incident("b", **{field: "that"})
    assert subjects(**{field: "this"}) == [wanted.subject]


def test_incidents_are_found_by_when_they_opened() -> None:
    for minute, subject in enumerate("abc"):
        incident(subject, opened_at=NOW + timedelta(minutes=minute))
    assert subjects(since="2026-11-21T12:01:00Z", until="2026-11-21T12:02:00Z") == ["b"]


def test_an_operator_dismisses_an_open_incident_and_says_why() -> None:
    row = incident("n-00000001")
    answer = bearer().post(f"/api/v1/incidents/{row.id}/dismiss", {"why": "a test"}, format="json")
    assert answer.status_code == 200
    assert answer.json()["state"] == "closed"
    assert answer.json()["resolution"] == f"dismissed by {answer.json()['closed_by']}: a test"
    again = bearer().post(f"/api/v1/incidents/{row.id}/dismiss", {}, format="json")
    assert again.status_code == 409


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["hard_signature", "silence", "slow", "repeated_repairs"])
def test_a_rule_is_in_force_as_it_comes(rule: str) -> None:
    shown = bearer().get(f"/api/v1/fault-rules/{rule}").json()
    assert shown == {"rule": rule, "mode": "on", "actor": "", "changed_at": None}
    assert bearer().get("/api/v1/fault-rules").json()["results"] == []


def test_an_operator_puts_a_rule_into_shadow() -> None:
    answer = bearer().patch("/api/v1/fault-rules/slow", {"mode": "shadow", "why": "new"}, format="json")
    assert (answer.status_code, answer.json()["mode"]) == (200, "shadow")
    assert FaultRule.objects.get().rule == "slow"
    assert [rule["mode"] for rule in bearer().get("/api/v1/fault-rules").json()["results"]] == ["shadow"]
    assert "rule slow: on -> shadow by" in Event.objects.get().message
    bearer().patch("/api/v1/fault-rules/slow", {"mode": "shadow"}, format="json")
    assert Event.objects.count() == 1


def test_what_is_no_rule_or_no_mode_is_refused() -> None:
    assert bearer().get("/api/v1/fault-rules/operator").status_code == 404
    assert bearer().patch("/api/v1/fault-rules/slow", {"mode": "maybe"}, format="json").status_code == 400
    assert bearer().patch("/api/v1/fault-rules/slow", {"mod": "on"}, format="json").status_code == 400
