"""Reads the request queues in each sender process: one task per queue, of SQS here and of Kafka by `KafkaReader`. Any
number of processes may read, and may be killed at any time. A message of SQS is deleted after its request is in the
database, and a repeated one finds that request. No AWS or Kafka module is imported before a queue is declared."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import partial
from time import monotonic
from typing import TypeVar

from django.db import DatabaseError

from fleet.clouds.aws.calls import CallFailed, Refused, TooLong
from fleet.clouds.aws.notices import Message, messages_delete, messages_receive, object_read, queue_facts
from kernel import clock
from kernel.lease_loop import in_thread
from traffic.async_requests.models import RequestQueue
from traffic.async_requests.planner import (
    HANDLE_S,
    MOST_QUEUES,
    VISIBILITY_S,
    AsyncSettings,
    InvalidMessage,
    QueueAddress,
    body_object_key,
    pause_s,
)
from traffic.async_requests.planning.kafka import QueueKind
from traffic.async_requests.services.queues import (
    ReceiveLimit,
    pause_until,
    request_message_accept,
    request_message_refuse,
    request_queue_may_receive,
    request_queue_note_unread,
    request_queue_note_waiting,
    request_queue_record,
    request_queue_row,
)

LOOK_EVERY_S = 5.0
"""Interval for finding declared queues, and for checking a queue without room."""
log = logging.getLogger(__name__)

WAIT_S = 2
"""Long poll of a receive; a stopping process has five seconds."""
FACTS_EVERY_S = 60.0
ABSENT = frozenset({"NoSuchKey", "NoSuchBucket", "404"})
T = TypeVar("T")


class QueueReaders:
    """Readers of one process, one task per queue."""

    def __init__(self, settings: AsyncSettings | None = None, now: Callable[[], datetime] = clock.now) -> None:
        self._settings = settings or AsyncSettings()
        self._now = now
        self._readers: dict[int, asyncio.Task[None]] = {}
        # AWS calls wait for seconds and must not delay the sender's calls.
        self._threads = ThreadPoolExecutor(MOST_QUEUES, thread_name_prefix="queue")

    async def run(self, stopping: asyncio.Event) -> None:
        """Reads until `stopping` is set, and processes what was received."""
        while not stopping.is_set():
            try:
                for queue_id, kind in await in_thread(_queue_ids):
                    self._start_reader(queue_id, QueueKind(kind), stopping)
            except DatabaseError as error:
                log.warning("cannot read the request queues: %s", error)
            await pause_until(LOOK_EVERY_S, stopping)
        await asyncio.gather(*self._readers.values(), return_exceptions=True)
        self._threads.shutdown(wait=False)

    def _start_reader(self, queue_id: int, kind: QueueKind, stopping: asyncio.Event) -> None:
        if queue_id not in self._readers:
            read = self._read_topic if kind is QueueKind.KAFKA else self._read_queue
            reader = asyncio.get_running_loop().create_task(read(queue_id, stopping))
            self._readers[queue_id] = reader
            reader.add_done_callback(partial(self._reader_ended, queue_id))

    def _reader_ended(self, queue_id: int, reader: "asyncio.Task[None]") -> None:
        del self._readers[queue_id]
        if not reader.cancelled() and (error := reader.exception()) is not None:
            log.error("the reader of queue %s stopped; restarting it", queue_id, exc_info=error)

    async def _read_topic(self, queue_id: int, stopping: asyncio.Event) -> None:
        from traffic.async_requests.services.kafka_reader import KafkaReader

        await KafkaReader(queue_id, self._settings, self._now).run(stopping)

    async def _read_queue(self, queue_id: int, stopping: asyncio.Event) -> None:
        failures, facts_at = 0, float("-inf")
        while not stopping.is_set():
            wait_s = 0.0
            try:
                queue = await in_thread(partial(request_queue_row, queue_id))
                if queue is None:
                    return
                if monotonic() - facts_at >= FACTS_EVERY_S:
                    await self.record_length(queue)
                    facts_at = monotonic()
                may = await self.read_once(queue)
                wait_s = 0.0 if may.count else LOOK_EVERY_S
                failures = 0
            except (DatabaseError, CallFailed) as error:
                failures += 1
                wait_s = pause_s(failures)
                log.warning("cannot read queue %s, retrying in %g s: %s", queue_id, wait_s, error)
                await self._note_failure(queue_id, error)
            await pause_until(wait_s, stopping)

    async def record_length(self, queue: RequestQueue) -> None:
        """Records the queue's length. Raises CallFailed if AWS does not return it, or the queue has no dead-letter
        queue, so an invalid message would never leave it."""
        facts = await self._in_thread(partial(queue_facts, queue.aws_region, queue.url))
        if not facts.has_dead_letters:
            advice = "deploy it from deploy/aws/requests.yaml"
            raise Refused("NoRedrivePolicy", f"an invalid message would never leave it: {advice}")
        count = partial(request_queue_note_waiting, queue.pk, facts.waiting)
        await in_thread(count)

    async def read_once(self, queue: RequestQueue) -> ReceiveLimit:
        """Receives as many messages as there is room for, and processes them. Returns that room. Raises CallFailed or
        DatabaseError if some were not processed; they are received again."""
        may = await in_thread(
            partial(request_queue_may_receive, queue, now=self._now(), settings=self._settings)
        )  # fmt: skip
        if may.count:
            receive = partial(messages_receive, queue.aws_region, queue.url)
            received = await self._in_thread(
                partial(receive, most=may.count, wait_s=WAIT_S, visibility_s=VISIBILITY_S)
            )  # fmt: skip
            await self._process_messages(queue, received)
        await in_thread(partial(request_queue_record, queue, may.state, may.reason, now=self._now()))
        return may

    async def _process_messages(self, queue: RequestQueue, received: tuple[Message, ...]) -> None:
        """Deletes processed messages even if a later one fails."""
        ends_at, done = monotonic() + HANDLE_S, list[Message]()
        try:
            for message in received:
                if monotonic() >= ends_at:
                    log.warning("%s: %d messages were not processed in time", queue, len(received) - len(done))
                    break
                if await self._is_done_with(queue, message):
                    done.append(message)
        finally:
            await self._in_thread(partial(messages_delete, queue.aws_region, queue.url, done))

    async def _is_done_with(self, queue: RequestQueue, message: Message) -> bool:
        try:
            body = await self._in_thread(partial(self._message_body, queue.address(), message))
        except InvalidMessage as refusal:
            refuse = partial(request_message_refuse, queue, message.id, str(refusal))
            return await in_thread(partial(refuse, now=self._now()))
        except CallFailed as error:
            log.warning("cannot read the body of message %s of %s: %s", message.id, queue, error)
            return False
        take = partial(request_message_accept, queue, message, body, settings=self._settings)
        return await in_thread(partial(take, now=self._now()))

    def _message_body(self, queue: QueueAddress, message: Message) -> bytes:
        key = body_object_key(message.body, queue)
        if key is None:
            return message.body.encode("utf-8", "replace")
        most = self._settings.max_body_bytes
        read = partial(object_read, queue.region, queue.name, key)
        try:
            return read(owner=queue.account, most=most, limit_s=HANDLE_S)
        except TooLong as error:
            raise InvalidMessage(f"the object {key[:200]!r} is longer than {most} bytes") from error
        except Refused as error:
            if error.code in ABSENT:
                raise InvalidMessage(f"there is no object {key[:200]!r} in {queue.name}") from error
            raise

    async def _note_failure(self, queue_id: int, error: Exception) -> None:
        note = partial(request_queue_note_unread, queue_id, str(error), self._now())
        try:
            await in_thread(note)
        except DatabaseError as also:
            log.warning("cannot record that queue %s is unread: %s", queue_id, also)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _queue_ids() -> list[tuple[int, str]]:
    return list(RequestQueue.objects.order_by("pk").values_list("pk", "kind")[:MOST_QUEUES])
