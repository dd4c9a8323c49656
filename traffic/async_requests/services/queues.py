"""Binds SQS queues to keys, reads them in each sender process, and turns messages into near-real-time requests, with
the limits and errors that the key's application has at the endpoint. `async_requests.planner` parses messages. Any
number of processes may read, and may be killed at any time: a message is deleted after its request is in the database,
and a repeated one finds that request. No AWS module is imported before a queue is declared."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from time import monotonic
from typing import Any, TypeVar

from django.db import DatabaseError, transaction
from django.db.models import Q

from fleet.clouds.aws.calls import CallFailed, Refused, TooLong
from fleet.clouds.aws.identity import install_ensure
from fleet.clouds.aws.notices import Message, messages_delete, messages_receive, object_read, queue_facts
from fleet.clouds.models import CloudRegion
from fleet.faults.services.incidents import incident_open, incidents_close
from kernel import clock, live
from kernel.events import event_record
from kernel.lease_loop import in_thread
from kernel.refusals import Conflict, InvalidInput
from kernel.tones import Tone
from traffic.async_requests.models import RefusedMessage, RequestQueue
from traffic.async_requests.planner import (
    HANDLE_S,
    MOST_QUEUES,
    VISIBILITY_S,
    AsyncSettings,
    InvalidMessage,
    QueueAddress,
    QueueState,
    body_object_key,
    is_temporary,
    is_unread,
    parse_attributes,
    pause_s,
    queue_address,
    reason_text,
    room,
)
from traffic.async_requests.selectors import accepted_since, deployments_of_model, open_requests, serving_region
from traffic.async_requests.services.requests import AsyncSubmission, async_request_accept
from traffic.keys.models import ApplicationKey
from traffic.tenants.planner import ApplicationRefused
from traffic.tenants.selectors import Application, UnknownApplication, application_with

UNREAD = "request-queue-unread"
"""Kind of the incident about a queue that is not read."""
GOING = frozenset({QueueState.READING, QueueState.FULL})
NOTED_EVERY = timedelta(seconds=15)
"""Interval at which an unchanged queue updates its row."""
REFUSED_KEPT = timedelta(days=14)
"""Maximum retention of SQS."""
REFUSED_MOST = 1000
"""Per queue, so that invalid messages cannot fill the database."""
SETTINGS = AsyncSettings()

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReceiveLimit:
    """How many messages of a queue may be received now, and why none."""

    count: int
    state: QueueState
    reason: str = ""


@transaction.atomic
def request_queue_declare(*, url: str, key: str, actor: str, now: datetime) -> RequestQueue:
    """Binds a queue to a key, named by its prefix. Raises InvalidInput if it is not a request queue of this
    installation, or the key is not valid. Raises Conflict if the queue is bound already, or there are too many."""
    try:
        address = queue_address(url, install_ensure(now).pk)
    except ValueError as error:
        raise InvalidInput(field="url", rule="queue", message=str(error)) from error
    bound = ApplicationKey.objects.filter(prefix=key.removeprefix("sw_")).first()
    try:
        if bound is None:
            raise UnknownApplication("invalid_api_key", f"there is no key with the prefix {key[:40]!r}")
        application_with(bound, now)
    except UnknownApplication as unknown:
        raise InvalidInput(field="key", rule="key", message=str(unknown)) from unknown
    if RequestQueue.objects.count() >= MOST_QUEUES:
        raise Conflict(f"there are {MOST_QUEUES} request queues already; withdraw one")
    columns: dict[str, Any] = {"aws_region": address.region, "account": address.account, "name": address.name}
    columns |= {"key": bound, "actor": actor[:64], "created_at": now}
    row, created = RequestQueue.objects.get_or_create(url=url, defaults=columns)
    if not created:
        raise Conflict(f"{row} is declared already, with the key sw_{row.key.prefix}; withdraw it first")
    message = f"bound {row} to {bound.tenant or 'no tenant'} (sw_{bound.prefix}), by {actor}"
    _queue_event("declared", message, Tone.WARN, row, actor, now)
    return row


@transaction.atomic
def request_queue_withdraw(*, queue_id: int, actor: str, now: datetime) -> None:
    """Stops reading a queue. Its messages stay there; accepted requests are completed."""
    row = RequestQueue.objects.select_for_update().get(pk=queue_id)
    incidents_close(kind=UNREAD, subject=row.name, resolution=f"{actor} withdrew the queue", now=now)
    _queue_event("withdrawn", f"withdrew {row}, by {actor}", Tone.IDLE, row, actor, now)
    row.delete()


def request_queue_may_receive(
    queue: RequestQueue, *, now: datetime, settings: AsyncSettings = SETTINGS
) -> ReceiveLimit:
    """Returns how many messages of a queue would be accepted now. Receiving more would bring valid messages nearer to
    the dead-letter queue."""
    try:
        application = application_with(queue.key, now)
    except UnknownApplication as unknown:
        return ReceiveLimit(0, QueueState.STOPPED, f"the key sw_{queue.key.prefix} is not valid: {unknown}")
    if application.over_quota:
        return ReceiveLimit(0, QueueState.FULL, f"the budget of {application.tenant} for this month is used up")
    region = serving_region(_region_of(queue))
    if region is None or deployments_of_model(region, "") is None:
        return ReceiveLimit(0, QueueState.FULL, "no region serves yet")
    count = room(
        waiting=open_requests(application.tenant),
        most_waiting=settings.max_open_per_tenant,
        last_minute=accepted_since(application, now, 60.0) if application.requests_per_min else 0,
        per_minute=application.requests_per_min,
    )
    if count:
        return ReceiveLimit(count, QueueState.READING)
    return ReceiveLimit(
        0, QueueState.FULL, "the tenant's limit of waiting requests or the key's requests per minute is reached"
    )


def request_message_accept(
    queue: RequestQueue, message: Message, body: bytes, *, now: datetime, settings: AsyncSettings = SETTINGS
) -> bool:
    """Accepts a message's request. Returns whether the message may be deleted, because its request is in the database.
    Call it outside of transactions, because the deletion follows."""
    try:
        application = application_with(queue.key, now)
        _accept_message(queue, application, message, body, now, settings)
    except UnknownApplication:
        return False
    except InvalidMessage as refusal:
        return request_message_refuse(queue, message, str(refusal), now=now)
    except ApplicationRefused as refusal:
        return False if is_temporary(refusal.status) else request_message_refuse(queue, message, str(refusal), now=now)
    return True


def _accept_message(queue: RequestQueue, application: Application, message: Message, body: bytes, now: datetime,
            settings: AsyncSettings) -> None:  # fmt: skip
    asked = parse_attributes(message.id, message.attributes)
    submission = AsyncSubmission(
        path=asked.path,
        body=body,
        region=_region_of(queue),
        limit_ms=asked.limit_ms,
        callback_url=asked.callback_url,
        idempotency_key=asked.idempotency_key,
        sent_at=message.sent_at,
    )
    async_request_accept(application=application, submission=submission, now=now, settings=settings)
    queue.refused.filter(message=message.id).delete()


def request_message_refuse(queue: RequestQueue, message: Message, reason: str, *, now: datetime) -> bool:
    """Records once why a message is left for the dead-letter queue. Returns False: it must not be deleted."""
    if queue.refused.count() < REFUSED_MOST:
        noted = {"reason": reason_text(reason), "at": now}
        _, created = RefusedMessage.objects.get_or_create(queue=queue, message=message.id[:100], defaults=noted)
        if created:
            log.warning("message %s of %s is left for the dead-letter queue: %s", message.id, queue, noted["reason"])
            live.push("keys")
    return False


def request_queue_record(queue: RequestQueue, state: QueueState, reason: str, *, now: datetime) -> None:
    """Records the state of a queue, and opens or closes its incident. A successful read of any sender within the last
    minute outweighs failures of the others."""
    was = RequestQueue.objects.filter(pk=queue.pk)
    columns: dict[str, Any] = {"state": state.value, "reason": reason_text(reason)}
    changed = Q(read_at=None) | Q(read_at__lt=now - NOTED_EVERY) | ~Q(state=state.value) | ~Q(reason=columns["reason"])
    if state is QueueState.UNREAD:
        read_at = was.values_list("read_at", flat=True).first()
        if not is_unread(read_at, queue.created_at, now):
            return
    if state in GOING:
        columns["read_at"] = now
    with transaction.atomic():
        if not was.filter(changed).update(**columns):
            return
        live.push("keys")
        if state in GOING:
            incidents_close(kind=UNREAD, subject=queue.name, resolution="it is read again", now=now)
        else:
            summary = f"Messages of {queue} are not taken: {columns['reason']}"
            incident_open(kind=UNREAD, subject=queue.name, summary=summary, evidence={"url": queue.url}, now=now)


def refused_messages_trim(*, now: datetime) -> int:
    """Deletes refused messages that have expired in SQS. Returns their number."""
    return RefusedMessage.objects.filter(at__lt=now - REFUSED_KEPT).delete()[0]


def _region_of(queue: RequestQueue) -> str:
    return CloudRegion.objects.filter(aws_region=queue.aws_region).values_list("region_id", flat=True).first() or ""


def _queue_event(what: str, message: str, tone: Tone, row: RequestQueue, actor: str, now: datetime) -> None:
    detail = {"url": row.url, "key": row.key.prefix, "tenant": row.key.tenant}
    event_record(kind=f"request_queue.{what}", message=message, tone=tone, now=now, actor=actor[:64], detail=detail)
    live.push("keys")


LOOK_EVERY_S = 5.0
"""Interval for finding declared queues, and for checking a queue without room."""
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
                for queue_id in await in_thread(_queue_ids):
                    self._start_reader(queue_id, stopping)
            except DatabaseError as error:
                log.warning("cannot read the request queues: %s", error)
            await _pause_until(LOOK_EVERY_S, stopping)
        await asyncio.gather(*self._readers.values(), return_exceptions=True)
        self._threads.shutdown(wait=False)

    def _start_reader(self, queue_id: int, stopping: asyncio.Event) -> None:
        if queue_id not in self._readers:
            reader = asyncio.get_running_loop().create_task(self._read_queue(queue_id, stopping))
            self._readers[queue_id] = reader
            reader.add_done_callback(partial(self._reader_ended, queue_id))

    def _reader_ended(self, queue_id: int, reader: "asyncio.Task[None]") -> None:
        del self._readers[queue_id]
        if not reader.cancelled() and (error := reader.exception()) is not None:
            log.error("the reader of queue %s stopped; restarting it", queue_id, exc_info=error)

    async def _read_queue(self, queue_id: int, stopping: asyncio.Event) -> None:
        failures, facts_at = 0, float("-inf")
        while not stopping.is_set():
            wait_s = 0.0
            try:
                queue = await in_thread(partial(_queue_row, queue_id))
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
            await _pause_until(wait_s, stopping)

    async def record_length(self, queue: RequestQueue) -> None:
        """Records the queue's length. Raises CallFailed if AWS does not return it, or the queue has no dead-letter
        queue, so an invalid message would never leave it."""
        facts = await self._in_thread(partial(queue_facts, queue.aws_region, queue.url))
        if not facts.has_dead_letters:
            advice = "deploy it from deploy/aws/requests.yaml"
            raise Refused("NoRedrivePolicy", f"an invalid message would never leave it: {advice}")
        count = partial(_note_waiting, queue.pk, facts.waiting)
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
            refuse = partial(request_message_refuse, queue, message, str(refusal))
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
        note = partial(_note_unread, queue_id, str(error), self._now())
        try:
            await in_thread(note)
        except DatabaseError as also:
            log.warning("cannot record that queue %s is unread: %s", queue_id, also)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _queue_ids() -> list[int]:
    return list(RequestQueue.objects.order_by("pk").values_list("pk", flat=True)[:MOST_QUEUES])


def _queue_row(queue_id: int) -> RequestQueue | None:
    return RequestQueue.objects.select_related("key").filter(pk=queue_id).first()


def _note_waiting(queue_id: int, waiting: int) -> None:
    RequestQueue.objects.filter(pk=queue_id).update(waiting=waiting)


def _note_unread(queue_id: int, reason: str, now: datetime) -> None:
    queue = _queue_row(queue_id)
    if queue is not None:
        request_queue_record(queue, QueueState.UNREAD, reason, now=now)


async def _pause_until(seconds: float, stopping: asyncio.Event) -> None:
    try:
        async with asyncio.timeout(seconds):
            await stopping.wait()
    except TimeoutError:
        return
