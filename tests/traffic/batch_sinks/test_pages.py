"""Sinks by wizard, document and API: for admins only, and their passwords are shown nowhere."""

from typing import Any

import pytest
from django.test import Client

from audit.models import AuditRecord
from kernel.access import Role
from tests.controlplane.access.callers import make_user
from tests.controlplane.api.client import bearer
from tests.fleet.rows import NOW
from traffic.batch_sinks.models import BatchSink
from traffic.batch_sinks.services.sinks import sink_password
from traffic.keys.models import ApplicationKey

pytestmark = [pytest.mark.django_db, pytest.mark.slow]
SECRET = "a very secret password"
TYPED = {
    "name": "answers", "tenant": "acme", "kind": "valkey", "url": "valkeys://answers.example:6379/0",
    "key_template": "answers:{custom_id}", "value": "body", "ttl_s": "600", "username": "writer", "part_mib": "256",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _key() -> None:
    ApplicationKey.objects.create(
        prefix="0a1b2c3d", digest="d", name="search", tenant="acme", created_by="ada", created_at=NOW
    )


def signed_in(role: Role = Role.ADMIN) -> Client:
    client = Client()
    client.force_login(make_user(f"a-{role}", role))
    return client


def test_the_wizard_creates_and_changes_a_sink_without_showing_its_password() -> None:
    client = signed_in()
    shown = client.post("/batches/sinks/new/", {**TYPED, "password": SECRET, "go": "review"})
    assert SECRET not in shown.text
    response = client.post("/batches/sinks/new/", {**TYPED, "password": SECRET, "go": "apply"})
    assert response.headers["Location"] == "/batches/sinks/#sink-answers", response.text
    row = BatchSink.objects.get()
    assert (sink_password(row), SECRET in row.sealed_password, row.ttl_s) == (SECRET, False, 600)
    form = client.get("/batches/sinks/answers/change/").text
    assert SECRET not in form
    client.post("/batches/sinks/answers/change/", {**TYPED, "ttl_s": "0", "go": "apply"})
    row.refresh_from_db()
    assert (row.ttl_s, sink_password(row)) == (0, SECRET)
    assert not any(SECRET in str(record.__dict__) for record in AuditRecord.objects.all())
    client.post("/batches/sinks/answers/delete/", {"confirm": "answers"})
    assert not BatchSink.objects.exists()


def test_operators_neither_create_change_nor_delete_sinks() -> None:
    signed_in().post("/batches/sinks/new/", {**TYPED, "go": "apply"})
    operator = signed_in(Role.OPERATOR)
    assert "answers" in operator.get("/batches/sinks/").text
    for url, form in (
        ("/batches/sinks/new/", {**TYPED, "name": "other", "go": "apply"}),
        ("/batches/sinks/answers/change/", {**TYPED, "ttl_s": "1", "go": "apply"}),
        ("/batches/sinks/answers/delete/", {"confirm": "answers"}),
    ):
        assert operator.post(url, form).status_code == 403, url
    assert BatchSink.objects.get().ttl_s == 600


def test_a_document_creates_a_sink_once_and_hides_its_password() -> None:
    spec: dict[str, Any] = {key: value for key, value in TYPED.items() if key != "name"}
    spec |= {"ttl_s": 600, "part_mib": 256}
    document = {"apiVersion": "switchyard/v1", "kind": "BatchSink", "metadata": {"name": "answers"}, "spec": spec}
    with_secret = {**document, "spec": {**spec, "password": SECRET}}
    preview = bearer().post("/api/v1/apply/preview", {"documents": [with_secret]}, format="json")
    assert (preview.status_code, SECRET in preview.text) == (200, False)
    applied = bearer().post("/api/v1/apply", {"documents": [with_secret]}, format="json")
    assert (applied.status_code, SECRET in applied.text) == (200, False)
    assert bearer().post("/api/v1/apply", {"documents": [document]}, format="json").json()["steps"] == []
    row = bearer().get("/api/v1/batch-sinks/answers").json()
    assert (row["has_password"], "password" in row, SECRET in str(row)) == (True, False, False)
    assert sink_password(BatchSink.objects.get()) == SECRET
