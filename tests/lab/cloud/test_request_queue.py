"""Requests that come by a queue of SQS at the cloud of tests: the stack of one queue, and a sender that reads it."""

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.utils import timezone

from fleet.clouds.aws.calls import CallFailed, Unanswered
from fleet.clouds.aws.identity import install_ensure
from fleet.faults.models import Incident
from lab.cloud.server import World, serve
from lab.cloud.stack import deploy
from tests.traffic.rows import BODY, serving_fleet
from traffic.async_requests.models import AsyncRequest, RequestQueue
from traffic.async_requests.services.queue_readers import QueueReaders
from traffic.async_requests.services.queues import request_queue_declare
from traffic.keys.services import key_create

pytestmark = [pytest.mark.cloud, pytest.mark.django_db]

REGION = "us-east-1"


@dataclass
class Declared:
    """A queue with its own stack, and its reader."""

    sqs: Any
    s3: Any
    stack: dict[str, str]
    row: RequestQueue

    def send(self, body: str = BODY.decode(), **attributes: str) -> str:
        said = {
            name.replace("_", "-"): {"DataType": "String", "StringValue": value} for name, value in attributes.items()
        }
        sent = self.sqs.send_message(QueueUrl=self.row.url, MessageBody=body, MessageAttributes=said)
        return str(sent["MessageId"])

    def read(self) -> None:
        async_to_sync(QueueReaders().read_once)(self.row)

    def left(self) -> int:
        names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
        said = self.sqs.get_queue_attributes(QueueUrl=self.row.url, AttributeNames=names)["Attributes"]
        return sum(int(count) for count in said.values())


@pytest.fixture
def queue(db: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Declared]:
    world = World()
    with serve(world):
        clients = cache(world.client)
        monkeypatch.setattr("fleet.clouds.aws.calls.client", lambda service, region, once: clients(service, region))
        monkeypatch.setattr("traffic.async_requests.services.queue_readers.WAIT_S", 0)
        now = timezone.now()
        stated = {"Install": install_ensure(now).pk, "Name": "orders"}
        stack = deploy(world, REGION, "switchyard-requests-orders", "requests.yaml", stated)
        serving_fleet()
        key = key_create(name="orders", tenant="acme", actor="ann", now=now).key
        row = request_queue_declare(url=stack["Queue"], key=key.prefix, actor="ann", now=now)
        yield Declared(clients("sqs", REGION), clients("s3", REGION), stack, row)
    assert world.bugs == []


def test_a_message_is_deleted_once_its_request_is_there(queue: Declared, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("traffic.async_requests.services.queue_readers.VISIBILITY_S", 0)
    sent = queue.send(X_Switchyard_Deadline_Ms="60000")
    with monkeypatch.context() as dying:
        dying.setattr("traffic.async_requests.services.queue_readers.messages_delete", _dies)
        with pytest.raises(Unanswered):
            queue.read()
    assert (AsyncRequest.objects.count(), queue.left()) == (1, 1)

    queue.read()
    request = AsyncRequest.objects.get()
    assert (request.tenant, request.key, request.idempotency_key) == ("acme", queue.row.key.prefix, sent)
    assert queue.left() == 0


def _dies(*_: object) -> None:
    raise Unanswered("", "the sender died")


def test_what_is_no_request_goes_to_the_dead_letters_with_one_reason(
    queue: Declared, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("traffic.async_requests.services.queue_readers.VISIBILITY_S", 0)
    sent = queue.send("no JSON")
    for _ in range(7):  # five receives are allowed
        queue.read()
    dead = queue.sqs.receive_message(QueueUrl=queue.stack["DeadQueue"])["Messages"]
    assert [(each["MessageId"], each["Body"]) for each in dead] == [(sent, "no JSON")]
    refused = queue.row.refused.get()
    assert refused.message == sent
    assert "not valid JSON" in refused.reason
    assert not AsyncRequest.objects.exists()


def test_a_long_body_is_read_from_the_queues_bucket_and_no_other(queue: Declared) -> None:
    bucket = queue.stack["Bucket"]
    long = json.dumps({"model": "sim-70b", "messages": [{"role": "user", "content": "x" * 2_000_000}]}).encode()
    queue.s3.delete_bucket_policy(Bucket=bucket)  # moto knows no conditions, and would deny all
    for key, body in (("fits", BODY), ("long", long)):
        queue.s3.put_object(Bucket=bucket, Key=key, Body=body)
    expected = {
        _pointer(bucket, "fits"): "",
        _pointer(bucket, "long"): "longer than",
        _pointer(bucket, "gone"): "there is no object",
        _pointer("sw-of-somebody-else", "fits"): "points to the bucket",
    }
    sent = {queue.send(body): why for body, why in expected.items()}
    for _ in expected:
        queue.read()
    assert bytes(AsyncRequest.objects.get().body) == BODY
    refused = dict(queue.row.refused.values_list("message", "reason"))
    assert set(refused) == {message for message, why in sent.items() if why}
    assert all(why in refused[message] for message, why in sent.items() if why)


def _pointer(bucket: str, key: str) -> str:
    return json.dumps(
        ["software.amazon.payloadoffloading.PayloadS3Pointer", {"s3BucketName": bucket, "s3Key": key}]
    )  # fmt: skip


def test_a_queue_says_how_much_waits_and_one_without_dead_letters_is_not_read(queue: Declared) -> None:
    queue.send()
    async_to_sync(QueueReaders().record_length)(queue.row)
    assert RequestQueue.objects.get().waiting == 1
    queue.sqs.set_queue_attributes(QueueUrl=queue.row.url, Attributes={"RedrivePolicy": ""})
    with pytest.raises(CallFailed, match="would never leave it"):
        async_to_sync(QueueReaders().record_length)(queue.row)


def run_until(condition: Callable[[], bool]) -> None:
    """Run a process's readers until something is so, and stop them."""

    async def run() -> None:
        stopping = asyncio.Event()
        running = asyncio.create_task(QueueReaders().run(stopping))
        async with asyncio.timeout(60.0):
            while not await sync_to_async(condition)():
                await asyncio.wait([running], timeout=0.02)  # the readers do their part meanwhile
        stopping.set()
        await running

    async_to_sync(run)()


def test_readers_take_what_comes_and_end_what_they_began(queue: Declared) -> None:
    queue.send()
    run_until(AsyncRequest.objects.exists)
    assert queue.left() == 0
    row = RequestQueue.objects.get()
    assert (row.state, row.reason, row.waiting) == ("reading", "", 1)


def test_a_queue_that_is_gone_is_an_incident(queue: Declared) -> None:
    RequestQueue.objects.update(created_at=timezone.now() - timedelta(minutes=2))
    queue.sqs.delete_queue(QueueUrl=queue.row.url)
    run_until(Incident.objects.filter(kind="request-queue-unread", state="open").exists)
    row = RequestQueue.objects.get()
    assert row.state == "unread"
    assert "NonExistentQueue" in row.reason
