"""Reads the queues whose messages become near-real-time requests, in each process that sends them. Any number may run,
and any may be killed at any moment: a message is deleted once its request is in the database, and one that comes again
finds that request. It decides nothing: what a message is, `traffic.planning.request_queue` says.

Nothing of AWS is imported before a queue is declared.
"""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import partial
from time import monotonic
from typing import TypeVar

from django.db import DatabaseError

from fleet.providers.aws.calls import CallFailed, Refused, TooLong
from fleet.providers.aws.queue import Message, messages_delete, messages_receive, object_read, queue_facts
from kernel import clock
from kernel.lease_loop import in_thread
from traffic.models import RequestQueue
from traffic.planning.async_request import AsyncSettings
from traffic.planning.request_queue import (
    HANDLE_S,
    MOST_QUEUES,
    VISIBILITY_S,
    NoRequest,
    QueueAddress,
    QueueState,
    pause_s,
    pointed_at,
)
from traffic.services.request_queue import (
    MayReceive,
    request_message_refuse,
    request_message_take,
    request_queue_may_receive,
    request_queue_note,
)

LOOK_EVERY_S = 5.0
"""How soon a queue that was declared is read, and how often one without room is looked at."""
WAIT_S = 2
"""Of a receive: a process that is told to stop has five seconds."""
FACTS_EVERY_S = 60.0
ABSENT = frozenset({"NoSuchKey", "NoSuchBucket", "404"})
T = TypeVar("T")

log = logging.getLogger(__name__)


class QueueEdge:
    """The readers of one process, one a queue."""

    def __init__(self, settings: AsyncSettings | None = None, now: Callable[[], datetime] = clock.now) -> None:
        self._settings = settings or AsyncSettings()
        self._now = now
        self._readers: dict[int, asyncio.Task[None]] = {}
        # Calls to AWS wait for seconds, and those of the sender must not wait behind them.
        self._threads = ThreadPoolExecutor(MOST_QUEUES, thread_name_prefix="queue")

    async def run(self, stopping: asyncio.Event) -> None:
        """Read until `stopping` is set; what was received by then is still taken."""
        while not stopping.is_set():
            try:
                for queue_id in await in_thread(_declared):
                    self._begin(queue_id, stopping)
            except DatabaseError as error:
                log.warning("queues of requests are not known: %s", error)
            await _pause(LOOK_EVERY_S, stopping)
        await asyncio.gather(*self._readers.values(), return_exceptions=True)
        self._threads.shutdown(wait=False)

    def _begin(self, queue_id: int, stopping: asyncio.Event) -> None:
        if queue_id not in self._readers:
            reader = asyncio.get_running_loop().create_task(self._read(queue_id, stopping))
            self._readers[queue_id] = reader
            reader.add_done_callback(partial(self._ended, queue_id))

    def _ended(self, queue_id: int, reader: "asyncio.Task[None]") -> None:
        del self._readers[queue_id]
        if not reader.cancelled() and (error := reader.exception()) is not None:
            log.error("queue %s was not read on; it is begun anew", queue_id, exc_info=error)

    async def _read(self, queue_id: int, stopping: asyncio.Event) -> None:
        """Read one queue until it is declared no more."""
        failures, facts_at = 0, float("-inf")
        while not stopping.is_set():
            wait_s = 0.0
            try:
                queue = await in_thread(partial(_queue, queue_id))
                if queue is None:
                    return
                if monotonic() - facts_at >= FACTS_EVERY_S:
                    await self.look(queue)
                    facts_at = monotonic()
                may = await self.read_once(queue)
                wait_s = 0.0 if may.count else LOOK_EVERY_S
                failures = 0
            except (DatabaseError, CallFailed) as error:
                failures += 1
                wait_s = pause_s(failures)
                log.warning("queue %s was not read, again in %g s: %s", queue_id, wait_s, error)
                await self._note_failure(queue_id, error)
            await _pause(wait_s, stopping)

    async def look(self, queue: RequestQueue) -> None:
        """Note how much waits in a queue.

        Raises:
            CallFailed: it does not say, or it has no dead letters: then one bad message would come for ever.
        """
        facts = await self._call(partial(queue_facts, queue.aws_region, queue.url))
        if not facts.has_dead_letters:
            advice = "deploy it from deploy/aws/requests.yaml"
            raise Refused("NoRedrivePolicy", f"a message that is no request would come for ever: {advice}")
        count = partial(_note_waiting, queue.pk, facts.waiting)
        await in_thread(count)

    async def read_once(self, queue: RequestQueue) -> MayReceive:
        """Receive messages for which there is room, and take them. Returns what there was room for.

        Raises:
            CallFailed, DatabaseError: not all were taken; the others come again.
        """
        may = await in_thread(
            partial(request_queue_may_receive, queue, now=self._now(), settings=self._settings)
        )  # fmt: skip
        if may.count:
            receive = partial(messages_receive, queue.aws_region, queue.url)
            received = await self._call(
                partial(receive, most=may.count, wait_s=WAIT_S, visibility_s=VISIBILITY_S)
            )  # fmt: skip
            await self._take(queue, received)
        await in_thread(partial(request_queue_note, queue, may.state, may.reason, now=self._now()))
        return may

    async def _take(self, queue: RequestQueue, received: tuple[Message, ...]) -> None:
        """Whatever breaks off in between, those that were taken are deleted."""
        ends_at, done = monotonic() + HANDLE_S, list[Message]()
        try:
            for message in received:
                if monotonic() >= ends_at:
                    log.warning("%s: %d messages were not begun in time", queue, len(received) - len(done))
                    break
                if await self._is_done_with(queue, message):
                    done.append(message)
        finally:
            await self._call(partial(messages_delete, queue.aws_region, queue.url, done))

    async def _is_done_with(self, queue: RequestQueue, message: Message) -> bool:
        try:
            body = await self._call(partial(self._body, queue.address(), message))
        except NoRequest as refusal:
            refuse = partial(request_message_refuse, queue, message, str(refusal))
            return await in_thread(partial(refuse, now=self._now()))
        except CallFailed as error:
            log.warning("the body of message %s of %s was not read: %s", message.id, queue, error)
            return False
        take = partial(request_message_take, queue, message, body, settings=self._settings)
        return await in_thread(partial(take, now=self._now()))

    def _body(self, queue: QueueAddress, message: Message) -> bytes:
        key = pointed_at(message.body, queue)
        if key is None:
            return message.body.encode("utf-8", "replace")
        most = self._settings.max_body_bytes
        read = partial(object_read, queue.region, queue.name, key)
        try:
            return read(owner=queue.account, most=most, limit_s=HANDLE_S)
        except TooLong as error:
            raise NoRequest(f"the object {key[:200]!r} is longer than {most} bytes") from error
        except Refused as error:
            if error.code in ABSENT:
                raise NoRequest(f"there is no object {key[:200]!r} in {queue.name}") from error
            raise

    async def _note_failure(self, queue_id: int, error: Exception) -> None:
        note = partial(_note_unread, queue_id, str(error), self._now())
        try:
            await in_thread(note)
        except DatabaseError as also:
            log.warning("that queue %s was not read could not be noted: %s", queue_id, also)

    async def _call(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _declared() -> list[int]:
    return list(RequestQueue.objects.order_by("pk").values_list("pk", flat=True)[:MOST_QUEUES])


def _queue(queue_id: int) -> RequestQueue | None:
    return RequestQueue.objects.select_related("key").filter(pk=queue_id).first()


def _note_waiting(queue_id: int, waiting: int) -> None:
    RequestQueue.objects.filter(pk=queue_id).update(waiting=waiting)


def _note_unread(queue_id: int, reason: str, now: datetime) -> None:
    queue = _queue(queue_id)
    if queue is not None:
        request_queue_note(queue, QueueState.UNREAD, reason, now=now)


async def _pause(seconds: float, stopping: asyncio.Event) -> None:
    try:
        async with asyncio.timeout(seconds):
            await stopping.wait()
    except TimeoutError:
        return
