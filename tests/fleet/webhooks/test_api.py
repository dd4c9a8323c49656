"""Webhooks over HTTP."""

from typing import Any

import pytest
from django.test import Client

from audit.models import AuditRecord
from fleet.webhooks.models import Webhook, WebhookDelivery
from kernel.access import Role
from kernel.models import Event
from tests.controlplane.access.callers import make_user
from tests.controlplane.api.client import bearer

pytestmark = pytest.mark.django_db

URL = "https://pager.example.com/hook"


def post(body: dict[str, Any]) -> Any:
    return bearer().post("/api/v1/webhooks", body, format="json")


def test_the_secret_is_shown_once() -> None:
    created = post({"name": "pager", "url": URL, "events": ["incident.opened"]})
    assert created.status_code == 200
    assert created.json()["secret"] == Webhook.objects.get().secret
    shown = bearer().get("/api/v1/webhooks/pager").json()
    assert "secret" not in shown
    assert (shown["url"], shown["events"], shown["enabled"]) == (
        "https://pager.example.com/…",
        ["incident.opened"],
        True,
    )
    assert created.json()["secret"] not in str(list(Event.objects.values()))


def test_a_name_is_taken_once() -> None:
    assert post({"name": "pager", "url": URL}).status_code == 200
    assert post({"name": "pager", "url": URL}).status_code == 409


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("url", "http://pager.example.com/"),
        ("url", "ftp://x"),
        ("url", "https://me:pw@x/"),
        ("events", ["incident.exploded"]),
        ("secret", "short"),
        ("colour", "red"),
    ],
)
def test_what_makes_no_sense_is_refused_by_field(field: str, value: Any) -> None:
    answer = post({"name": "pager", "url": URL, field: value})
    assert answer.status_code == 400
    assert answer.json()["errors"][0]["field"].startswith(field)


def test_a_webhook_is_changed_and_removed() -> None:
    post({"name": "pager", "url": URL})
    answer = bearer().patch("/api/v1/webhooks/pager", {"enabled": False}, format="json")
    assert (answer.status_code, answer.json()["enabled"]) == (200, False)
    assert bearer().delete("/api/v1/webhooks/pager").status_code == 200
    assert bearer().get("/api/v1/webhooks/pager").status_code == 404
    assert set(Event.objects.values_list("kind", flat=True)) == {
        "webhook.created",
        "webhook.changed",
        "webhook.deleted",
    }


def test_a_rotated_secret_is_shown_once_and_signs_messages_that_wait() -> None:
    old = post({"name": "pager", "url": URL}).json()["secret"]
    bearer().post("/api/v1/webhooks/pager/test")
    new = bearer().post("/api/v1/webhooks/pager/rotate").json()["secret"]
    assert len(new) == 64
    assert new != old
    assert WebhookDelivery.objects.get().secret == new
    assert "secret" not in bearer().get("/api/v1/webhooks/pager").json()
    assert Event.objects.filter(kind="webhook.changed", message__contains="changed (secret) by").count() == 1
    recorded = str(list(Event.objects.values())) + str(list(AuditRecord.objects.values()))
    assert new not in recorded
    assert old not in recorded
    assert bearer().post("/api/v1/webhooks/other/rotate").status_code == 404


def test_a_test_message_is_a_delivery_that_can_be_looked_at() -> None:
    post({"name": "pager", "url": URL, "events": ["rollout.changed"]})
    answer = bearer().post("/api/v1/webhooks/pager/test")
    assert (answer.status_code, answer.json()["state"]) == (200, "pending")
    (shown,) = bearer().get("/api/v1/webhook-deliveries", {"webhook": "pager"}).json()["results"]
    assert (shown["id"], shown["event"]) == (WebhookDelivery.objects.get().pk, "test")
    bearer().patch("/api/v1/webhooks/pager", {"enabled": False}, format="json")
    assert bearer().post("/api/v1/webhooks/pager/test").status_code == 409


@pytest.mark.slow
@pytest.mark.parametrize("form", ["json", "slack"])
def test_nobody_is_shown_more_of_an_address_than_its_host(form: str, caplog: pytest.LogCaptureFixture) -> None:
    url = "https://pager.example.com/hush-hush/T0?key=hush-hush"
    created = post({"name": "pager", "url": url, "format": form})
    changed = bearer().patch("/api/v1/webhooks/pager", {"url": url + "2"}, format="json")
    tested = bearer().post("/api/v1/webhooks/pager/test")
    refused = post({"name": "other", "url": f"{url}\x00"})
    shown = [created, changed, tested, refused, bearer().delete("/api/v1/webhooks/pager")]
    assert created.json()["url"] == changed.json()["url"] == "https://pager.example.com/…"
    post({"name": "pager", "url": url, "format": form})
    for role in (Role.VIEWER, Role.OPERATOR, Role.ADMIN):
        client = Client()
        client.force_login(make_user(f"a-{role}", role))
        paths = ("webhooks", "webhooks/pager", "webhook-deliveries", "events")
        shown += [
            client.get(path) for path in (*(f"/api/v1/{name}" for name in paths), "/settings/webhooks/", "/events/")
        ]
    shown += [bearer().get("/api/v1/audit")]
    assert not [answer for answer in shown if "hush" in answer.content.decode()]
    assert "hush" not in f"{list(Event.objects.values())}{list(AuditRecord.objects.values())}{caplog.text}"


def test_the_log_names_the_host_of_a_callback() -> None:
    assert WebhookDelivery(own_url="https://app.example/hush", event="x").receiver == "https://app.example/…"
