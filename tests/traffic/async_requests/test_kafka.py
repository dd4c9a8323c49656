"""Requests from topics of a broker, and their outcomes on a results topic. The broker is Tansu, which speaks Kafka's
protocol."""

import asyncio
import json
import uuid
from collections.abc import Awaitable, Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import connections
from django.utils import timezone

from tests.traffic.async_requests.brokers import Broker, header_of, running_broker
from tests.traffic.rows import ANSWER, BODY, serving_fleet
from traffic.async_requests.models import AsyncRequest, RequestQueue
from traffic.async_requests.planner import AsyncSettings, AsyncState
from traffic.async_requests.planning.kafka import TopicSettings
from traffic.async_requests.services import kafka_reader
from traffic.async_requests.services.queues import request_queue_declare
from traffic.async_requests.services.requests import async_request_end
from traffic.keys.services import key_create

pytestmark = [pytest.mark.processes, pytest.mark.django_db(transaction=True), pytest.mark.asyncio]
LIMIT_S = 60.0


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with running_broker() as running:
        yield running


async def in_database(work: Callable[[], Any]) -> Any:
    return await sync_to_async(work, thread_sensitive=True)()


async def declared(broker: Broker, *, partitions: int = 1, **settings: str) -> RequestQueue:
    """A topic with its own name, bound to a key of acme."""
    name = f"orders-{uuid.uuid4().hex[:8]}"
    await broker.create(name, f"{name}-results", f"{name}-dead", partitions=partitions)

    def declare() -> RequestQueue:
        serving_fleet()
        now = timezone.now()
        key = key_create(name="orders", tenant="acme", actor="ann", now=now).key
        stated = TopicSettings(results_topic=f"{name}-results", dead_letter_topic=f"{name}-dead", **settings)
        return request_queue_declare(
            url=f"kafka://{broker.address}/{name}", key=key.prefix, actor="ann", now=now, topic=stated
        )

    row: RequestQueue = await in_database(declare)
    return row


async def reading_until(
    queue: RequestQueue,
    condition: Callable[[], Awaitable[bool]],
    settings: AsyncSettings | None = None,
    ahead: timedelta = timedelta(),
) -> None:
    """`ahead`: of the real time."""
    stopping = asyncio.Event()
    reader = kafka_reader.KafkaReader(queue.pk, settings or AsyncSettings(), lambda: timezone.now() + ahead)
    running = asyncio.create_task(reader.run(stopping))
    try:
        async with asyncio.timeout(LIMIT_S):
            while not await condition():
                assert not running.done(), running.result()
                await asyncio.sleep(0.02)
    finally:
        stopping.set()
        await running


def count_is(count: int, **wanted: Any) -> Callable[[], Awaitable[bool]]:
    async def is_so() -> bool:
        found: int = await in_database(AsyncRequest.objects.filter(**wanted).count)
        return found == count

    return is_so


async def test_a_record_is_a_request_once_and_its_outcome_a_record_with_its_key(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await declared(broker)
    await broker.send(queue.name, BODY, key=b"user-7", X_Switchyard_Deadline_Ms="60000")
    await broker.send(queue.name, BODY, Idempotency_Key="mine")
    await broker.send(queue.name, b"no JSON", None, BODY, key=b"k", Endpoint="/v1/other")

    async def dies(*_: object) -> None:
        raise OSError("the reader died before its commit")

    with monkeypatch.context() as dying:
        dying.setattr(kafka_reader.KafkaReader, "_finish", dies)
        await reading_until(queue, count_is(2))
    assert await broker.committed(queue.group, queue.name) in {None, -1}

    def end_all() -> None:
        for request in AsyncRequest.objects.all():
            rows = AsyncRequest.objects.filter(id=request.id)
            async_request_end(rows, state=AsyncState.DONE, now=timezone.now(), status=200, answer=ANSWER)

    await in_database(end_all)
    await reading_until(queue, count_is(2, published_at__isnull=False))
    assert await broker.committed(queue.group, queue.name) == 5

    first, second = await broker.records(queue.results_topic, 2)
    assert (first.key, second.key) == (b"user-7", b"mine")
    shown = json.loads(first.value)
    assert shown["source"] == {"topic": queue.name, "partition": 0, "offset": 0}
    assert (shown["status"], shown["response"]["body"]) == ("done", json.loads(ANSWER))
    dead = await broker.records(queue.dead_letter_topic, 3)
    assert [record.value for record in dead] == [b"no JSON", None, BODY]
    assert "/v1/other" in header_of(dead[2], kafka_reader.REASON_HEADER)

    def check() -> None:
        assert AsyncRequest.objects.count() == 2
        request = AsyncRequest.objects.get(id=shown["id"])
        assert (request.tenant, request.key) == ("acme", queue.key.prefix)
        assert request.idempotency_key.endswith(f"/{queue.name}/0/0")
        places = queue.refused.order_by("id").values_list("message", flat=True)
        assert list(places) == ["0/2", "0/3", "0/4"]
        assert RequestQueue.objects.get().state == "reading"
        connections.close_all()

    await in_database(check)


async def test_records_wait_in_the_topic_while_the_limits_leave_no_room(broker: Broker) -> None:
    queue = await declared(broker)
    await broker.send(queue.name, *[BODY] * 5)
    narrow = AsyncSettings(max_open_per_tenant=2)

    async def is_full() -> bool:
        state: str = await in_database(lambda: RequestQueue.objects.get().state)
        return state == "full"

    await reading_until(queue, is_full, narrow)
    assert await broker.committed(queue.group, queue.name) == 2
    assert await count_is(2)()
    await in_database(lambda: AsyncRequest.objects.update(state="cancelled", ended_at=timezone.now()))
    await reading_until(queue, count_is(4), narrow)
    await reading_until(queue, count_is(5))
    await in_database(connections.close_all)
