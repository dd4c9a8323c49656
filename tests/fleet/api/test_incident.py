"""Incidents over HTTP."""

from datetime import timedelta
from typing import Any

import pytest

from fleet.models import Incident
from tests.controlplane.api.client import bearer
from tests.fleet.rows import NOW

pytestmark = pytest.mark.django_db


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
