"""What users do with incidents, and what an incident did to users' requests."""

from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client

from audit.models import AuditRecord
from fleet.cells.models import Cell
from fleet.faults.models import Incident, IncidentNote
from fleet.faults.planning.report import Impact, TenantImpact
from fleet.faults.selectors.stories import healing_of, impact_of
from fleet.faults.services.triage import NOTE_MAX
from fleet.load.models import LoadSubject, LoadWindow
from kernel.models import Event
from tests.controlplane.access.callers import make_user
from tests.controlplane.api.client import bearer
from tests.controlplane.dashboard.clients import fragment, signed_in
from tests.fleet import rows
from tests.fleet.rows import NOW
from traffic.usage.models import UsageHour
from traffic.usage.selectors.usage import tenants_hit

pytestmark = [pytest.mark.django_db, pytest.mark.slow]

ZEROS = {"cells": 1, "in_flight": 0, "queued": 0, "tokens_per_s": 0, "covered_s": 15}


def incident(**columns: object) -> Incident:
    usual = {"kind": "node-lost", "subject": "n-a", "summary": "Node n-a lost: <b>gone</b>", "opened_at": NOW}
    return Incident.objects.create(**{**usual, **columns})


def post(row: Incident, action: str, **body: str) -> tuple[int, Any]:
    answer = bearer().post(f"/api/v1/incidents/{row.pk}/{action}", body, format="json")
    return answer.status_code, answer.json()


def test_an_incident_is_acknowledged_once_and_gets_an_owner() -> None:
    row = incident()
    status, shown = post(row, "acknowledge", why="on it")
    assert (status, shown["owner"]) == (200, shown["acknowledged_by"])
    assert "on it" in Event.objects.get(kind="incident.acknowledged").message
    assert AuditRecord.objects.filter(action="incident.acknowledge", object=f"incident/{row.pk}").exists()
    assert post(row, "acknowledge")[0] == 409
    assert post(incident(subject="b", state="closed"), "acknowledge")[0] == 409


def test_only_users_who_exist_become_owners() -> None:
    row = incident()
    User.objects.create_user("ada")
    User.objects.create_user("left", is_active=False)
    assert (post(row, "assign", owner="ada")[1]["owner"], post(row, "assign", owner="")[1]["owner"]) == ("ada", "")
    assert {post(row, "assign", owner=name)[0] for name in ("left", "nobody", "a" * 65)} == {400}
    assert Event.objects.filter(kind="incident.assigned").count() == 2


def test_notes_are_kept_in_order_with_their_author_and_bounded() -> None:
    row = incident(state="closed", closed_at=NOW)
    assert post(row, "note", text="  first\nline ")[0] == 200
    notes = post(row, "note", text="<script>")[1]["notes"]
    assert [note["text"] for note in notes] == ["first\nline", "<script>"]
    assert {post(row, "note", text=text)[0] for text in ("", "   ", "a" * (NOTE_MAX + 1))} == {400}
    page = fragment(signed_in(), f"/incidents/{row.pk}/", "incident")
    assert "&lt;script&gt;" in page
    assert "<script>" not in page
    IncidentNote.objects.bulk_create(IncidentNote(incident=row, at=NOW, actor="a", text="t") for _ in range(198))
    assert post(row, "note", text="one too many")[0] == 409


def test_incidents_are_found_by_severity_owner_and_acknowledgement() -> None:
    for number, kind in enumerate(("no-usable-cell", "node-lost", "node-slow")):
        incident(kind=kind, subject=str(number), owner="ada" if number else "", acknowledged_at=NOW if number else None)
    incident(kind="node-slow", subject="shadow", shadow=True)

    def subjects(query: str) -> list[str]:
        return [row["subject"] for row in bearer().get(f"/api/v1/incidents?{query}").json()["results"]]

    assert [subjects(f"severity={one}") for one in ("critical", "major", "minor", "info")] == [
        ["0"], ["1"], ["2"], ["shadow"],
    ]  # fmt: skip
    assert (subjects("owner=ada"), subjects("acknowledged=false")) == (["2", "1"], ["shadow", "0"])


def window(subject: str, at_s: float, requests: int, errors: int = 0, slow: int = 0) -> None:
    known, _ = LoadSubject.objects.get_or_create(name=subject, defaults={"seen_at": NOW})
    LoadWindow.objects.create(
        subject=known, step_s=15, at=NOW + timedelta(seconds=at_s), requests=requests, errors=errors, slow=slow, **ZEROS
    )


def test_the_impact_counts_failed_retried_and_slowed_requests_and_names_tenants() -> None:
    rows.cell("c1", rows.node("n-a"))
    Cell.objects.filter(pk="c1").update(deployment_id="sim-70b")
    place = "deployment:sim-70b@us-east-1"
    for at_s, requests, errors, slow in ((-30, 900, 9, 9), (0, 100, 2, 3), (15, 100, 1, 1), (90, 900, 9, 9)):
        window(place, at_s, requests, errors, slow)
    window("cell:c1", 0, 104, 6)
    window("cell:c1", 15, 101, 2)
    row = incident(cell="c1", region="us-east-1", deployment="sim-70b", closed_at=NOW + timedelta(seconds=29))
    hour = NOW.replace(minute=0, second=0, microsecond=0)
    for tenant, errors, refused in (("acme", 2, 3), ("calm", 0, 0)):
        UsageHour.objects.create(
            tenant=tenant, key="k", deployment="sim-70b", hour=hour, requests=50, errors=errors, refused=refused
        )
    tenants = tenants_hit(["sim-70b"], row.opened_at, NOW)
    assert tenants == (TenantImpact("acme", 5, 53),)
    found = impact_of(row, NOW, now=NOW + timedelta(seconds=100), tenants=tenants)
    assert found == Impact(("sim-70b in us-east-1",), 15, 200, 3, 5, 4, tenants)
    assert impact_of(row, NOW, now=NOW + timedelta(days=30)) == Impact(("sim-70b in us-east-1",))
    assert impact_of(incident(kind="budget"), NOW, now=NOW) == Impact()


def test_the_usual_duration_is_that_of_incidents_that_healed_alone() -> None:
    closed: list[tuple[int, dict[str, Any]]] = [
        (4, {}), (5, {}), (90, {}), (1, {"closed_by": "ada"}), (1, {"shadow": True}), (1, {"kind": "node-slow"}),
    ]  # fmt: skip
    for number, (lasted_s, columns) in enumerate(closed):
        usual = {"subject": str(number), "state": "closed", "closed_by": "switchyard"}
        incident(**{**usual, "closed_at": NOW + timedelta(seconds=lasted_s), **columns})
    assert healing_of(incident()).text == "usually heals in 5.0 s (median of 3)"
    assert healing_of(incident(kind="node-slow")).text == ""


def test_the_report_is_a_file_and_an_answer_without_markup_from_names() -> None:
    row = incident()
    response = signed_in().get(f"/incidents/{row.pk}/report.md")
    assert response.headers["Content-Disposition"] == f'attachment; filename="incident-{row.pk}.md"'
    assert "&lt;b&gt;gone" in response.text
    shown = bearer().get(f"/api/v1/incidents/{row.pk}/report").json()
    assert (shown["markdown"].splitlines()[0], shown["phases"][0]["phase"]) == (response.text.splitlines()[0], "cause")
    assert bearer().get("/api/v1/incidents/999999/report").status_code == 404


def test_runbooks_are_shown_and_no_other_file() -> None:
    client = signed_in()
    assert "Node lost" in client.get("/runbooks/node-lost/").text
    assert {client.get(f"/runbooks/{name}/").status_code for name in ("README", "..", "%2e%2e", "node-lost.md")} == {
        404
    }


def test_actions_of_the_page_change_the_incident_and_keep_what_was_typed() -> None:
    row, client = incident(), signed_in()
    User.objects.create_user("ada")
    for action, form in (("acknowledge", {"why": "on it"}), ("assign", {"owner": "ada"}), ("note", {"text": "a\nb"})):
        assert f"incident {row.pk}" in client.get(f"/incidents/{row.pk}/ask/{action}/").text
        assert client.post(f"/incidents/{row.pk}/ask/{action}/", form).status_code == 302
    row.refresh_from_db()
    assert (row.acknowledged_by, row.owner, row.notes.get().text) == ("operator", "ada", "a\nb")
    again = client.post(f"/incidents/{row.pk}/ask/acknowledge/", {})
    assert (again.status_code, "was acknowledged by" in again.text) == (409, True)
    refused = client.post(f"/incidents/{row.pk}/ask/assign/", {"owner": "<nobody>", "why": "on leave"})
    assert refused.status_code == 409
    assert all(text in refused.text for text in ("&lt;nobody&gt;", "on leave"))
    long = client.post(f"/incidents/{row.pk}/ask/note/", {"text": "a" * (NOTE_MAX + 5)})
    assert (long.status_code, "a" * NOTE_MAX in long.text) == (409, True)


def test_a_viewer_changes_nothing_and_sees_why() -> None:
    row, client = incident(), Client()
    client.force_login(make_user("vera"))
    assert "It needs the operator role." in client.get(f"/incidents/{row.pk}/").text
    for action in ("acknowledge", "assign", "note", "dismiss"):
        assert client.post(f"/incidents/{row.pk}/ask/{action}/", {"text": "x"}).status_code == 403
    assert not Event.objects.exists()
