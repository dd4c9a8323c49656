"""Webhooks over HTTP."""

from typing import Any

import pytest

from audit.models import AuditRecord
from fleet.models import Webhook, WebhookDelivery
from kernel.models import Event
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
    assert (shown["url"], shown["events"], shown["enabled"]) == (URL, ["incident.opened"], True)
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


def test_a_test_message_is_a_delivery_that_can_be_looked_at() -> None:
    post({"name": "pager", "url": URL, "events": ["rollout.changed"]})
    answer = bearer().post("/api/v1/webhooks/pager/test")
    assert (answer.status_code, answer.json()["state"]) == (200, "pending")
    (shown,) = bearer().get("/api/v1/webhook-deliveries", {"webhook": "pager"}).json()["results"]
    assert (shown["id"], shown["event"]) == (WebhookDelivery.objects.get().pk, "test")
    bearer().patch("/api/v1/webhooks/pager", {"enabled": False}, format="json")
    assert bearer().post("/api/v1/webhooks/pager/test").status_code == 409


def test_a_chats_address_is_a_secret_in_itself() -> None:
    url = "https://hooks.slack.com/services/T0/B0/hush"
    created = post({"name": "chat", "url": url, "format": "slack"})
    assert created.json()["url"] == "https://hooks.slack.com/…"
    assert bearer().get("/api/v1/webhooks/chat").json()["format"] == "slack"
    assert "hush" not in str(list(Event.objects.values()))
    assert "hush" not in str(list(AuditRecord.objects.values()))
