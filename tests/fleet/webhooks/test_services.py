"""Messages reach a real server, signed; failed ones are retried, and refused ones are never sent."""

import asyncio
import json
import threading
from collections.abc import Iterator
from datetime import datetime, timedelta
from functools import partial
from http.server import BaseHTTPRequestHandler

import pytest
from asgiref.sync import async_to_sync

from accounts.services.approval import ApprovalRequest, approval_reject, approval_request
from fleet.faults.services.incidents import incident_open, incidents_close
from fleet.webhooks.models import Webhook, WebhookDelivery
from fleet.webhooks.planner import WebhookSettings, signature
from fleet.webhooks.services import WebhookSender, deliveries_trim, delivery_create_to
from kernel.lease_loop import in_thread
from kernel.outbound import parse_networks
from tests.fleet.rows import NOW
from tests.fleet.webhooks.receiver import Receiver, answering, deliveries_send, receiver

pytestmark = pytest.mark.django_db

HERE = WebhookSettings(allowed=parse_networks(["127.0.0.1"]), attempts=3, limit_s=5.0)
SECRET = "0123456789abcdef"


@pytest.fixture
def server() -> Iterator[Receiver]:
    with receiver() as running:
        yield running


@pytest.fixture(autouse=True)
def hook(server: Receiver) -> Webhook:
    return Webhook.objects.create(name="pager", url=server.url, secret=SECRET, created_at=NOW)


def open_incident(subject: str = "n-a") -> None:
    incident_open(kind="node-slow", subject=subject, summary="slow", evidence={"score": 0.5}, now=NOW, node=subject)


def send(at: datetime = NOW, settings: WebhookSettings = HERE) -> WebhookDelivery:
    deliveries_send(now=at, settings=settings)
    return WebhookDelivery.objects.latest("id")


def test_an_incident_is_told_when_it_opens_and_when_it_closes(server: Receiver) -> None:
    open_incident()
    incidents_close(resolution="healed", now=NOW, node="n-a")
    assert deliveries_send(now=NOW, settings=HERE) == 2
    delivered = [json.loads(body) for _, _, body in server.heard]
    assert {(one["event"], one["data"]["state"]) for one in delivered} == {
        ("incident.opened", "open"),
        ("incident.closed", "closed"),
    }
    assert {one["data"]["evidence"]["score"] for one in delivered} == {0.5}
    assert deliveries_send(now=NOW + timedelta(hours=1), settings=HERE) == 0


def test_a_request_for_approval_is_announced_once_and_without_secrets() -> None:
    request = ApprovalRequest("make ann an admin", {}, "ada", NOW, "on call", secrets={"password": "hash"})
    row = approval_request("change-accounts", request)
    sent = WebhookDelivery.objects.get()
    assert (sent.event, sent.body["id"], sent.body["summary"]) == ("decision.needed", row.pk, "make ann an admin")
    assert (sent.body["actor"], sent.body["reason"]) == ("ada", "on call")
    assert "hash" not in str(sent.body)
    approval_reject(approval_id=row.pk, actor="ada", now=NOW)
    assert WebhookDelivery.objects.count() == 1


def test_a_message_is_signed_with_its_time(server: Receiver) -> None:
    open_incident()
    assert send().state == "delivered"
    path, headers, body = server.heard[0]
    timestamp = int(headers["X-Switchyard-Timestamp"])
    assert (path, timestamp) == ("/hook", int(NOW.timestamp()))
    assert headers["X-Switchyard-Signature"] == signature(SECRET, timestamp, body)
    assert headers["Host"] == f"127.0.0.1:{server.port}"


def test_what_fails_is_tried_again_later_and_given_up_in_the_end(server: Receiver) -> None:
    server.answer = answering(500, b"database away")
    open_incident()
    first = send()
    assert (first.state, first.status, first.reason) == ("pending", 500, "answered 500: database away")
    assert first.due_at == NOW + timedelta(seconds=10)
    assert deliveries_send(now=NOW + timedelta(seconds=9), settings=HERE) == 0
    assert send(NOW + timedelta(seconds=10)).due_at == NOW + timedelta(seconds=30)
    last = send(NOW + timedelta(seconds=30))
    assert (last.state, last.attempts, last.ended_at) == ("failed", 3, NOW + timedelta(seconds=30))


def test_a_repeated_message_is_the_same(server: Receiver) -> None:
    server.answer = answering(500)
    open_incident()
    send()
    server.answer = answering(200)
    send(NOW + timedelta(seconds=10))
    assert server.heard[0][2] == server.heard[1][2]


def test_redirects_are_not_followed(server: Receiver) -> None:
    server.answer = answering(302, Location="http://127.0.0.1:1/")
    open_incident()
    assert send().reason == "answered 302; redirects are not followed"
    assert len(server.heard) == 1


def test_without_being_allowed_an_address_of_this_machine_is_never_called(server: Receiver) -> None:
    open_incident()
    refused = send(settings=WebhookSettings())
    assert refused.reason == "refused: 127.0.0.1 is 127.0.0.1, which is not a public address and not allowed"
    assert server.heard == []


@pytest.mark.parametrize("url", ["https://169.254.169.254/latest", "https://localhost/", "https://[::1]/"])
def test_nor_are_metadata_services_and_loopback_names(url: str, hook: Webhook) -> None:
    Webhook.objects.update(url=url)
    open_incident()
    assert send(settings=WebhookSettings()).reason.startswith("refused: ")


def test_an_answer_that_never_ends_is_not_read_to_its_end(server: Receiver) -> None:
    left = threading.Event()

    def endless(handler: BaseHTTPRequestHandler) -> None:
        try:
            handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
            while True:
                handler.wfile.write(b"X-More: " + b"x" * 1000 + b"\r\n")
        except OSError:
            left.set()

    server.answer = endless
    open_incident()
    assert send().state == "delivered"
    assert left.wait(60)


def test_a_server_that_says_nothing_is_given_up_in_time(server: Receiver) -> None:
    done = threading.Event()
    server.answer = lambda handler: (done.wait(60), None)[1]
    open_incident()
    hurried = WebhookSettings(allowed=HERE.allowed, limit_s=0.2)
    assert send(settings=hurried).reason == "no complete response within 0.2 s"
    done.set()


def test_nobody_listening_is_a_reason(hook: Webhook) -> None:
    Webhook.objects.update(url="http://127.0.0.1:1/")
    open_incident()
    assert "onnect" in send().reason


def test_a_disabled_webhook_and_one_that_asked_for_other_events_are_told_nothing(hook: Webhook) -> None:
    Webhook.objects.update(events=["rollout.changed"])
    open_incident("n-a")
    Webhook.objects.update(events=[], enabled=False)
    open_incident("n-b")
    assert not WebhookDelivery.objects.exists()


def test_a_delivery_that_a_worker_died_with_is_tried_again_after_its_claim(server: Receiver) -> None:
    open_incident()
    WebhookDelivery.objects.update(attempts=1, due_at=NOW + timedelta(seconds=HERE.claim_s))
    assert deliveries_send(now=NOW, settings=HERE) == 0
    assert send(NOW + timedelta(seconds=HERE.claim_s)).state == "delivered"


def test_what_ended_long_ago_is_forgotten() -> None:
    open_incident()
    send()
    assert deliveries_trim(now=NOW + timedelta(days=31)) == 1


def test_a_chat_gets_a_sentence_with_a_link(server: Receiver) -> None:
    Webhook.objects.update(format="slack")
    open_incident()
    assert send().state == "delivered"
    message = json.loads(server.heard[0][2])
    assert message["text"] == "Incident: node-slow n-a"
    assert "/incidents/" in message["attachments"][0]["title_link"]


@pytest.mark.django_db(transaction=True)
def test_a_receiver_that_says_nothing_delays_no_other(server: Receiver) -> None:
    patient = WebhookSettings(allowed=HERE.allowed, limit_s=120.0, per_receiver=2)
    go_on, waited_for = threading.Event(), threading.Event()

    def silent(handler: BaseHTTPRequestHandler) -> None:
        if not go_on.wait(60):
            waited_for.set()

    server.answer = silent
    with receiver() as other:
        Webhook.objects.create(name="chat", url=other.url, secret=SECRET, created_at=NOW)

        async def send() -> list[int]:
            sender, heard = WebhookSender(patient, lambda: NOW), []
            for number in range(3):
                await in_thread(partial(open_incident, f"n-{number}"))
                delivery_to = partial(delivery_create_to, url=other.url, secret=SECRET, event="batch.done", body={})
                await in_thread(partial(delivery_to, now=NOW))
                await sender.step()
                while len(sender.running) > min(number + 1, patient.per_receiver):
                    await asyncio.wait(sender.running.values(), return_when=asyncio.FIRST_COMPLETED)
                heard.append(len(other.heard))
            go_on.set()
            await sender.idle()
            await sender.stop()
            return heard

        assert asyncio.run(send()) == [2, 4, 6]
    assert not waited_for.is_set()
    assert WebhookDelivery.objects.filter(state="pending", attempts=0).count() == 1, "of the silent one"


def test_attempts_that_a_stop_cut_off_are_due_immediately(server: Receiver) -> None:
    open_incident()

    async def stop() -> None:
        sender = WebhookSender(HERE, lambda: NOW)
        await sender.step()
        await sender.stop()

    server.answer = lambda handler: None
    async_to_sync(stop)()
    row = WebhookDelivery.objects.get()
    assert (row.state, row.attempts, row.due_at) == ("pending", 1, NOW)
