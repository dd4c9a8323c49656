"""Reads one topic of requests and publishes outcomes, in each sender process. Offsets are committed after the
transaction that stored the requests, so a killed reader repeats records and loses none. While the limits leave no room,
partitions are paused and their members stay in the group. Imports Kafka's client, so import it only for a declared
topic."""

import asyncio
import json
import logging
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from time import monotonic
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRecord, TopicPartition
from aiokafka.errors import CommitFailedError, IllegalStateError, KafkaError, MessageSizeTooLargeError
from django.db import DatabaseError

from kernel.lease_loop import in_thread
from traffic.async_requests.models import AsyncRequest, RequestQueue
from traffic.async_requests.planner import AsyncSettings, pause_s
from traffic.async_requests.planning.kafka import RECORDS_AT_ONCE, Record, origin_key
from traffic.async_requests.selectors import async_request_json
from traffic.async_requests.services.kafka_clients import POLL_MS, NoBroker, kafka_clients
from traffic.async_requests.services.kafka_records import (
    PUBLISHED_AT_ONCE,
    TakenRecords,
    kafka_records_accept,
    outcomes_claim,
    outcomes_published,
)
from traffic.async_requests.services.queues import (
    ReceiveLimit,
    pause_until,
    request_queue_may_receive,
    request_queue_note_unread,
    request_queue_note_waiting,
    request_queue_record,
    request_queue_row,
)
from traffic.files.services.store_protocol import StoreAway

FULL_POLL_MS = 250
"""The same while there is no room."""
FACTS_EVERY_S = 10.0
IDLE_S = 0.2
"""Pause before the next look for outcomes, once there was none."""
REASON_HEADER = "x-switchyard-reason"

log = logging.getLogger(__name__)


class KafkaReader:
    """Consumer and producer of one declared topic."""

    def __init__(self, queue_id: int, settings: AsyncSettings, now: Callable[[], datetime]) -> None:
        self._queue_id = queue_id
        self._settings = settings
        self._now = now

    async def run(self, stopping: asyncio.Event) -> None:
        """Serves the topic until `stopping` is set or it is withdrawn."""
        failures = 0
        while not stopping.is_set():
            began_s = monotonic()
            try:
                queue = await in_thread(partial(request_queue_row, self._queue_id))
                if queue is None or await self._serve(queue, stopping):
                    return
            except (DatabaseError, KafkaError, OSError, StoreAway) as error:
                failures = failures + 1 if monotonic() - began_s < FACTS_EVERY_S else 1
                wait_s = pause_s(failures)
                is_text = isinstance(error, KafkaError | NoBroker)
                text = str(error) if is_text else f"{type(error).__name__}: {error}"
                log.warning("cannot read topic %s, retrying in %g s: %s", self._queue_id, wait_s, text)
                await self._note_failure(text)
                await pause_until(wait_s, stopping)

    async def _serve(self, queue: RequestQueue, stopping: asyncio.Event) -> bool:
        """Returns whether the topic was withdrawn. Raises KafkaError, OSError, DatabaseError or StoreAway."""
        async with kafka_clients(queue) as (consumer, producer):
            publishing = asyncio.create_task(self._publish(queue, producer, stopping))
            try:
                return await self._consume(queue, consumer, producer, publishing, stopping)
            finally:
                publishing.cancel()
                await asyncio.gather(publishing, return_exceptions=True)

    async def _consume(
        self,
        queue: RequestQueue,
        consumer: AIOKafkaConsumer,
        producer: AIOKafkaProducer,
        publishing: "asyncio.Task[None]",
        stopping: asyncio.Event,
    ) -> bool:
        facts_at = float("-inf")
        while not stopping.is_set():
            if publishing.done():
                publishing.result()
            current = await in_thread(partial(request_queue_row, queue.pk))
            if current is None:
                return True
            may = await self.read_once(current, consumer, producer)
            if monotonic() - facts_at >= FACTS_EVERY_S:
                facts_at = monotonic()
                await in_thread(partial(request_queue_note_waiting, queue.pk, await _lag(consumer)))
            await in_thread(partial(request_queue_record, current, may.state, may.reason, now=self._now()))
        return False

    async def read_once(
        self, queue: RequestQueue, consumer: AIOKafkaConsumer, producer: AIOKafkaProducer
    ) -> ReceiveLimit:
        """Takes as many records as there is room for, and commits them. Returns that room."""
        ask = partial(request_queue_may_receive, queue, settings=self._settings, most=RECORDS_AT_ONCE)
        may = await in_thread(partial(ask, now=self._now()))
        if not may.count:
            consumer.pause(*consumer.assignment())
            # Without a call in time, the group would regard this member as dead.
            await consumer.getmany(timeout_ms=FULL_POLL_MS)
            return may
        consumer.resume(*consumer.paused())
        received = await consumer.getmany(timeout_ms=POLL_MS, max_records=may.count)
        records = [_record(each) for several in received.values() for each in several]
        if records:
            take = partial(kafka_records_accept, queue, records, settings=self._settings)
            taken = await in_thread(partial(take, now=self._now()))
            await self._finish(queue, consumer, producer, taken)
        return may

    async def _finish(
        self, queue: RequestQueue, consumer: AIOKafkaConsumer, producer: AIOKafkaProducer, taken: TakenRecords
    ) -> None:
        if queue.dead_letter_topic:
            await _send_all(producer, [_dead_letter(queue, *each) for each in taken.refused])
        try:
            for partition, offset in taken.held.items():
                consumer.seek(TopicPartition(queue.name, partition), offset)
            if taken.next_offsets:
                offsets = taken.next_offsets.items()
                await consumer.commit({TopicPartition(queue.name, each): offset for each, offset in offsets})
        except (CommitFailedError, IllegalStateError) as error:
            log.info("%s: the group has moved partitions; their records are read again: %s", queue, error)

    async def _publish(self, queue: RequestQueue, producer: AIOKafkaProducer, stopping: asyncio.Event) -> None:
        while queue.results_topic:
            claim = partial(outcomes_claim, queue.pk, settings=self._settings)
            outcomes = await in_thread(partial(claim, now=self._now()))
            if outcomes:
                await _send_all(producer, [_outcome(queue, each, self._settings) for each in outcomes])
                ids = [each.id for each in outcomes]
                await in_thread(partial(outcomes_published, ids, now=self._now()))
            if len(outcomes) < PUBLISHED_AT_ONCE:
                await pause_until(IDLE_S, stopping)

    async def _note_failure(self, text: str) -> None:
        try:
            await in_thread(partial(request_queue_note_unread, self._queue_id, text, self._now()))
        except DatabaseError as also:
            log.warning("cannot record that topic %s is unread: %s", self._queue_id, also)


def _record(each: "ConsumerRecord[bytes, bytes]") -> Record:
    return Record(each.partition, each.offset, each.key, each.value, each.headers, each.timestamp)


async def _lag(consumer: AIOKafkaConsumer) -> int:
    """Returns how many records this process has not read, of the partitions that it has."""
    ends = await consumer.end_offsets(list(consumer.assignment()))
    return sum([max(0, end - await consumer.position(partition)) for partition, end in ends.items()])


async def _send_all(producer: AIOKafkaProducer, sendings: Sequence[dict[str, Any]]) -> None:
    """Sends records and waits for the brokers. A record that is too long for them is sent without its value."""
    futures = [await _send(producer, each) for each in sendings]
    results = await asyncio.gather(*futures, return_exceptions=True)
    for sending, result in zip(sendings, results, strict=True):
        if isinstance(result, MessageSizeTooLargeError):
            await producer.send_and_wait(**_without_value(sending))
        elif isinstance(result, BaseException):
            raise result


async def _send(producer: AIOKafkaProducer, sending: dict[str, Any]) -> "asyncio.Future[Any]":
    sent: asyncio.Future[Any]
    try:
        sent = await producer.send(**sending)
    except MessageSizeTooLargeError:
        sent = await producer.send(**_without_value(sending))
    return sent


def _without_value(sending: dict[str, Any]) -> dict[str, Any]:
    note = ("x-switchyard-omitted", b"the value is longer than the brokers take")
    return {**sending, "value": None, "headers": [*sending["headers"], note]}


def _dead_letter(queue: RequestQueue, record: Record, reason: str) -> dict[str, Any]:
    headers = [*record.headers, (REASON_HEADER, reason.encode()), ("x-switchyard-place", record.place.encode())]
    return {"topic": queue.dead_letter_topic, "key": record.key, "value": record.value, "headers": headers}


def _outcome(queue: RequestQueue, request: AsyncRequest, settings: AsyncSettings) -> dict[str, Any]:
    place = {name: request.origin.get(name) for name in ("partition", "offset")}
    shown = async_request_json(request, settings) | {"source": {"topic": queue.name, **place}}
    return {
        "topic": queue.results_topic,
        "key": origin_key(request.origin, request.idempotency_key),
        "value": json.dumps(shown, separators=(",", ":")).encode(),
        "headers": [("idempotency-key", request.idempotency_key.encode()), ("status", request.state.encode())],
    }
