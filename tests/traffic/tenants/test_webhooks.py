"""Webhooks of tenants, received by a real server and verified by OpenAI's client."""

import threading
from collections.abc import Iterator
from datetime import timedelta
from ipaddress import ip_network
from typing import Any

import openai
import pytest
from django.utils import timezone

from fleet.webhooks.models import WebhookDelivery
from fleet.webhooks.planner import WebhookSettings
from kernel.models import Event
from kernel.refusals import Conflict, InvalidInput
from tests.fleet.rows import NOW
from tests.fleet.webhooks.receiver import Receiver, deliveries_send, receiver
from tests.traffic.rows import begun, jsonl, line, serving_fleet
from traffic.batches.models import Batch
from traffic.batches.planning.batch import BatchState
from traffic.batches.services.batch import batch_move
from traffic.tenants.models import GrantUse, TenantGrant, TenantWebhook
from traffic.tenants.planner import BatchEvent
from traffic.tenants.services import (
    MOST_OF_A_TENANT,
    NewSecret,
    tenant_grant_create,
    tenant_grant_withdraw,
    tenant_webhook_create,
    tenant_webhook_remove,
    tenant_webhook_rotate,
    tenant_webhooks_notify,
)

pytestmark = [pytest.mark.django_db, pytest.mark.slow]
HERE = WebhookSettings(allowed=(ip_network("127.0.0.0/8"),))


@pytest.fixture
def server(settings: Any, tmp_path: Any) -> Iterator[Receiver]:
    settings.WEBHOOK_NETWORKS = ["127.0.0.0/8"]
    settings.FILES = str(tmp_path / "files")
    with receiver() as server:
        tenant_grant_create(
            tenant="acme", use=GrantUse.CALLBACK, target=f"127.0.0.1:{server.port}", actor="ada", now=NOW
        )
        yield server


def told(server: Receiver, **columns: Any) -> NewSecret:
    asked: dict[str, Any] = {"tenant": "acme", "url": server.url, "actor": "ada", "now": NOW}
    return tenant_webhook_create(**asked | columns)


def notify(event: BatchEvent = BatchEvent.COMPLETED, tenant: str = "acme") -> int:
    return tenant_webhooks_notify(tenant=tenant, event=event, batch_id="batch_1", now=timezone.now())


def unwrapped(server: Receiver, secret: str, number: int = -1) -> Any:
    _, headers, body = server.heard[number]
    client = openai.OpenAI(api_key="unused")
    return client.webhooks.unwrap(body, headers, secret=secret)


@pytest.mark.parametrize(
    ("before", "end"),
    [("finalizing", "completed"), ("finalizing", "expired"), ("validating", "failed"), ("cancelling", "cancelled")],
)
def test_openais_client_verifies_messages_about_an_end(server: Receiver, before: str, end: str) -> None:
    serving_fleet()
    new = told(server)
    batch = begun(jsonl(line(1)), "acme")
    begun(jsonl(line(1)), "globex")
    Batch.objects.filter(id=batch.id).update(state=before)
    now = timezone.now()
    rows = Batch.objects.filter(id=batch.id)
    assert batch_move(rows, start=BatchState(before), to=BatchState(end), now=now) == 1
    assert batch_move(rows, start=BatchState(before), to=BatchState(end), now=now) == 0
    assert deliveries_send(now=now, settings=HERE) == 1
    event = unwrapped(server, new.text)
    assert type(event).__name__ == f"Batch{end.capitalize()}WebhookEvent"
    assert (event.type, event.data.id, event.object) == (f"batch.{end}", batch.id, "event")
    assert abs(event.created_at - now.timestamp()) <= 1
    assert event.id == server.heard[0][1]["webhook-id"]


def test_what_was_changed_on_the_way_or_is_signed_by_another_is_not_taken(server: Receiver) -> None:
    new, other = told(server), tenant_webhook_create(tenant="acme", url=f"{server.url}2", actor="ada", now=NOW)
    notify()
    deliveries_send(now=timezone.now(), settings=HERE)
    ((_, headers, body),) = [each for each in server.heard if each[0] == "/hook"]
    client = openai.OpenAI(api_key="unused")
    client.webhooks.verify_signature(body, headers, secret=new.text)
    for wrong in (
        (body.replace(b"batch_1", b"batch_2"), headers, new.text),
        (body, headers | {"webhook-id": "evt_0"}, new.text),
        (body, headers, other.text),
        (body, headers | {"webhook-timestamp": str(int(headers["webhook-timestamp"]) - 400)}, new.text),
    ):
        with pytest.raises(openai.InvalidWebhookSignatureError):
            client.webhooks.verify_signature(wrong[0], wrong[1], secret=wrong[2])


def test_an_attempt_that_failed_is_repeated_as_the_same_message(server: Receiver) -> None:
    new, busy = told(server), threading.Event()

    def answer(handler: Any) -> None:
        handler.send_response(204 if busy.is_set() else 503)
        handler.end_headers()
        busy.set()

    server.answer = answer
    notify()
    now = timezone.now()
    deliveries_send(now=now, settings=HERE)
    deliveries_send(now=now + timedelta(seconds=11), settings=HERE)
    first, second = unwrapped(server, new.text, 0), unwrapped(server, new.text, 1)
    assert first == second
    assert WebhookDelivery.objects.get().state == "delivered"


def test_for_a_day_after_a_change_both_secrets_verify_and_then_the_new_one_alone(server: Receiver) -> None:
    old = told(server)
    new = tenant_webhook_rotate(webhook_id=old.webhook.pk, actor="bob", now=timezone.now())
    notify()
    deliveries_send(now=timezone.now(), settings=HERE)
    assert unwrapped(server, old.text) == unwrapped(server, new.text)
    TenantWebhook.objects.update(former_until=timezone.now())
    notify()
    deliveries_send(now=timezone.now(), settings=HERE)
    unwrapped(server, new.text)
    with pytest.raises(openai.InvalidWebhookSignatureError):
        unwrapped(server, old.text)


def test_a_secret_that_leaked_counts_no_longer_at_once_also_for_what_waits(server: Receiver) -> None:
    old = told(server)
    notify()
    new = tenant_webhook_rotate(webhook_id=old.webhook.pk, actor="bob", now=timezone.now(), at_once=True)
    deliveries_send(now=timezone.now(), settings=HERE)
    unwrapped(server, new.text)
    with pytest.raises(openai.InvalidWebhookSignatureError):
        unwrapped(server, old.text)
    kinds = list(Event.objects.filter(kind__startswith="tenant_webhook").order_by("id").values_list("kind", flat=True))
    assert kinds == ["tenant_webhook.added", "tenant_webhook.rotated"]
    assert all(old.text not in str((event.message, event.detail)) for event in Event.objects.all())


def test_only_chosen_events_of_the_same_tenant_are_sent(server: Receiver) -> None:
    told(server, events=[BatchEvent.FAILED])
    assert [notify(event) for event in BatchEvent] == [0, 1, 0, 0, 0]
    assert notify(BatchEvent.FAILED, "globex") == 0


@pytest.mark.parametrize("url", ["https://app.example.com/x", "ftp://x", "https://10.0.0.1/", "http://127.0.0.1:1/"])
def test_an_address_is_at_a_host_of_the_tenants_or_refused(server: Receiver, url: str) -> None:
    with pytest.raises(InvalidInput):
        told(server, url=url)
    with pytest.raises(InvalidInput, match="have no grant for"):
        told(server, tenant="globex")


def test_a_url_has_one_webhook_and_a_tenant_a_maximum(server: Receiver) -> None:
    told(server)
    with pytest.raises(Conflict, match="exists already"):
        told(server)
    for number in range(MOST_OF_A_TENANT - 1):
        told(server, url=f"{server.url}/{number}")
    with pytest.raises(Conflict, match="remove one first"):
        told(server, url=f"{server.url}/more")


def test_nothing_waits_for_what_was_removed_or_whose_host_was(server: Receiver) -> None:
    first, second = told(server), told(server, url=f"{server.url}2")
    notify()
    tenant_webhook_remove(webhook_id=first.webhook.pk, actor="ada", now=NOW)
    tenant_grant_withdraw(grant_id=TenantGrant.objects.get().pk, actor="ada", now=NOW)
    assert set(WebhookDelivery.objects.values_list("state", flat=True)) == {"failed"}
    assert notify() == 0
    assert TenantWebhook.objects.get() == second.webhook
    assert (deliveries_send(now=timezone.now(), settings=HERE), server.heard) == (0, [])
