"""Schedules by wizard, document and API: the same fields, errors at their input, and unchanged when applied again."""

from html import unescape
from typing import Any

import pytest
from django.test import Client

from controlplane.cli.documents import document_of
from kernel.access import Role
from tests.controlplane.access.callers import make_user
from tests.controlplane.api.client import bearer
from tests.fleet.rows import NOW
from traffic.batch_schedules.models import BatchSchedule
from traffic.keys.models import ApplicationKey
from traffic.tenants.models import GrantUse
from traffic.tenants.services import tenant_grant_create

pytestmark = [pytest.mark.django_db, pytest.mark.slow]
TYPED = {
    "name": "nightly", "key": "0a1b2c3d", "cron": "30 2 * * *", "time_zone": "Europe/Berlin", "quiet_s": "60",
    "input": "s3://acme-data/in/{date}.jsonl", "endpoint": "/v1/chat/completions", "window": "4h", "priority": "7",
    "overlap": "skip", "missed": "all",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _key() -> None:
    ApplicationKey.objects.create(
        prefix="0a1b2c3d", digest="d", name="search", tenant="acme", created_by="ada", created_at=NOW
    )
    tenant_grant_create(tenant="acme", use=GrantUse.READ, target="s3://acme-data", actor="ada", now=NOW)


def signed_in(role: Role = Role.OPERATOR) -> Client:
    client = Client()
    client.force_login(make_user(f"a-{role}", role))
    return client


def test_the_wizard_creates_and_changes_a_schedule_and_its_page_acts() -> None:
    client = signed_in()
    response = client.post("/batches/schedules/new/", {**TYPED, "go": "apply"})
    assert response.headers["Location"] == "/batches/schedules/nightly/", response.text
    row = BatchSchedule.objects.get()
    assert (row.cron, row.window, row.priority, row.overlap, row.missed) == ("30 2 * * *", "4h", 7, "skip", "all")
    form = client.get("/batches/schedules/nightly/change/").text
    assert 'value="s3://acme-data/in/{date}.jsonl"' in form
    client.post("/batches/schedules/nightly/change/", {**TYPED, "window": "2h", "go": "apply"})
    client.post("/batches/schedules/nightly/ask/pause/")
    row.refresh_from_db()
    assert (row.window, row.paused, row.next_at) == ("2h", True, None)
    client.post("/batches/schedules/nightly/ask/delete/", {"confirm": "wrong"})
    assert BatchSchedule.objects.exists()
    client.post("/batches/schedules/nightly/ask/delete/", {"confirm": "nightly"})
    assert not BatchSchedule.objects.exists()


def test_an_error_is_at_its_input_and_nothing_typed_is_lost() -> None:
    response = signed_in().post("/batches/schedules/new/", {**TYPED, "cron": "61 2 * * *", "go": "apply"})
    text = unescape(response.text)
    assert "it must have five fields" in text
    assert 'value="61 2 * * *"' in text
    assert not BatchSchedule.objects.exists()


def test_a_viewer_sees_schedules_and_changes_none() -> None:
    signed_in().post("/batches/schedules/new/", {**TYPED, "go": "apply"})
    viewer = signed_in(Role.VIEWER)
    assert viewer.get("/batches/schedules/nightly/").status_code == 200
    assert viewer.post("/batches/schedules/nightly/ask/pause/").status_code == 403
    assert viewer.post("/batches/schedules/new/", {**TYPED, "go": "apply"}).status_code == 403
    assert not BatchSchedule.objects.get().paused


def test_a_described_schedule_is_a_document_that_changes_nothing() -> None:
    assert bearer().post("/api/v1/batch-schedules", _body(), format="json").status_code == 200
    row = bearer().get("/api/v1/batch-schedules/nightly").json()
    assert (row["tenant"], row["when"]) == ("acme", "30 2 * * * Europe/Berlin")
    document = document_of("batch-schedules", "nightly", row)
    assert _apply(document).json()["steps"] == []
    answer = _apply({**document, "spec": {**document["spec"], "paused": True}})
    assert [step["action"] for step in answer.json()["steps"]] == ["change"]
    assert BatchSchedule.objects.get().paused
    other = _apply({**document, "metadata": {"name": "other"}})
    assert (other.status_code, BatchSchedule.objects.count()) == (200, 2)


def _body() -> dict[str, Any]:
    return {**TYPED, "quiet_s": 60, "priority": 7}


def _apply(document: dict[str, Any]) -> Any:
    return bearer().post("/api/v1/apply", {"documents": [document]}, format="json")
