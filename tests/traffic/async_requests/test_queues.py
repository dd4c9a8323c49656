"""Declared queues, and messages that are treated like requests of their key's application."""

from datetime import timedelta
from typing import Any

import pytest

from fleet.clouds.aws.identity import install_ensure
from fleet.clouds.aws.notices import Message
from fleet.faults.models import Incident
from kernel.models import Event
from kernel.refusals import Conflict, InvalidInput
from tests.fleet.rows import NOW
from tests.traffic.rows import BODY, serving_fleet
from traffic.async_requests.models import AsyncRequest, RequestQueue
from traffic.async_requests.planner import QueueState
from traffic.async_requests.services.queues import (
    REFUSED_KEPT,
    refused_messages_trim,
    request_message_accept,
    request_queue_declare,
    request_queue_may_receive,
    request_queue_record,
    request_queue_withdraw,
)
from traffic.keys.services import key_create, key_revoke, key_rotate

pytestmark = [pytest.mark.django_db, pytest.mark.slow]


def declared(**limits: Any) -> RequestQueue:
    key = key_create(name="orders", tenant="acme", actor="ann", now=NOW, **limits).key
    url = f"https://sqs.us-east-1.amazonaws.com/123456789012/{install_ensure(NOW).pk}-requests-orders"
    return request_queue_declare(url=url, key=key.prefix, actor="ann", now=NOW)


def take(queue: RequestQueue, body: bytes = BODY, id: str = "m-1", **attributes: str) -> bool:
    said = {name.replace("_", "-"): value for name, value in attributes.items()}
    message = Message(id, "handle", body.decode(), said, NOW - timedelta(seconds=5))
    return request_message_accept(queue, message, body, now=NOW)


def test_a_message_is_a_request_of_the_queues_key_once() -> None:
    serving_fleet()
    queue = declared()
    assert take(queue)
    assert take(queue)  # as after a crash before it was deleted
    request = AsyncRequest.objects.get()
    assert (request.tenant, request.key, request.idempotency_key) == ("acme", queue.key.prefix, "m-1")
    assert request.deadline_at == NOW + timedelta(seconds=900)


def test_a_deadline_counts_from_when_the_message_was_sent() -> None:
    serving_fleet()
    assert take(declared(), X_Switchyard_Deadline_Ms="10000")
    assert AsyncRequest.objects.get().deadline_at == NOW + timedelta(seconds=5)


@pytest.mark.parametrize(
    ("body", "attributes", "why"),
    [
        (b"no JSON", {}, "not valid JSON"),
        (b'{"model":"sim-70b","model":"other"}', {}, "not valid JSON"),
        (b'{"model":"gone"}', {}, "does not exist"),
        (b'{"model":"gone-\\u0000\\ud800"}', {}, "NUL or half of a surrogate"),
        (BODY, {"Authorization": "Bearer sw_a_b"}, "cannot name a key"),
        (BODY, {"X_Switchyard_Callback_Url": "https://169.254.169.254/"}, "X-Switchyard-Callback-Url"),
        (BODY, {"X_Switchyard_Deadline_Ms": "soon"}, "X-Switchyard-Deadline-Ms"),
    ],
)
def test_what_is_no_request_is_left_with_its_reason_noted_once(
    body: bytes, attributes: dict[str, str], why: str
) -> None:
    serving_fleet()
    queue = declared()
    assert not take(queue, body, **attributes)
    assert not take(queue, body, **attributes)
    assert why in queue.refused.get().reason
    assert not AsyncRequest.objects.exists()
    assert refused_messages_trim(now=NOW + REFUSED_KEPT) == 0
    assert refused_messages_trim(now=NOW + REFUSED_KEPT + timedelta(seconds=1)) == 1


def test_a_key_binds_messages_as_it_binds_requests() -> None:
    serving_fleet()
    queue = declared(deployments=["sim-70b"])
    queue.key.deployments = ["another"]
    assert not take(queue)
    assert "does not include the model" in queue.refused.get().reason


def test_a_queue_without_room_or_key_is_not_received_from() -> None:
    queue = declared(requests_per_min=3)
    assert request_queue_may_receive(queue, now=NOW).reason == "no region serves yet"
    serving_fleet()
    assert request_queue_may_receive(queue, now=NOW).count == 3
    for number in range(3):
        assert take(queue, id=f"m-{number}")
    assert request_queue_may_receive(queue, now=NOW).state is QueueState.FULL
    key_revoke(prefix=queue.key.prefix, actor="ann", now=NOW)
    queue = RequestQueue.objects.get()
    assert request_queue_may_receive(queue, now=NOW).state is QueueState.STOPPED
    assert not take(queue, id="m-9")


def test_a_rotated_key_takes_its_queues_along() -> None:
    queue = declared()
    new = key_rotate(prefix=queue.key.prefix, actor="ann", now=NOW).key
    assert RequestQueue.objects.get().key_id == new.pk


def test_only_queues_of_this_install_with_a_key_that_opens_are_declared() -> None:
    queue = declared()
    with pytest.raises(Conflict, match="declared already"):
        request_queue_declare(url=queue.url, key=queue.key.prefix, actor="ann", now=NOW)
    notices = queue.url.replace("requests-orders", "notices")
    with pytest.raises(InvalidInput, match="not a request queue"):
        request_queue_declare(url=notices, key=queue.key.prefix, actor="ann", now=NOW)
    with pytest.raises(InvalidInput, match="no key"):
        request_queue_declare(url=f"{queue.url}-2", key="unknown", actor="ann", now=NOW)
    request_queue_withdraw(queue_id=queue.pk, actor="ann", now=NOW)
    kinds = Event.objects.filter(kind__startswith="request_queue").order_by("id").values_list("kind", flat=True)
    assert list(kinds) == ["request_queue.declared", "request_queue.withdrawn"]


def test_an_unread_queue_is_an_incident_until_it_is_read() -> None:
    queue = declared()
    for seconds, state, opened in (
        (0, QueueState.READING, 0), (60, QueueState.UNREAD, 0), (61, QueueState.UNREAD, 1), (62, QueueState.READING, 0),
        (63, QueueState.STOPPED, 1), (64, QueueState.FULL, 0),
    ):  # fmt: skip
        reason = "" if state is QueueState.READING else "AccessDenied: no"
        request_queue_record(queue, state, reason, now=NOW + timedelta(seconds=seconds))
        assert Incident.objects.filter(kind="request-queue-unread", state="open").count() == opened
