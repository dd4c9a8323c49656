"""Declares queues whose messages become near-real-time requests, says what may be received of one, and takes messages.

A message is its queue's, and the queue is bound to a key by an admin. What a message asks for is judged as if the
key's application had sent it to the endpoint: same limits, same refusals, same hosts for callbacks.
"""

import logging
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db import transaction
from django.db.models import Q

from fleet.models import CloudRegion
from fleet.providers.aws.install import install_ensure
from fleet.providers.aws.queue import Message
from fleet.services.incident import incident_open, incidents_close
from kernel import live
from kernel.events import event_record
from kernel.refusals import Conflict, InvalidInput
from kernel.tones import Tone
from traffic.models import ApplicationKey, RefusedMessage, RequestQueue
from traffic.planning.application_refusal import ApplicationRefused
from traffic.planning.async_request import AsyncSettings
from traffic.planning.request_queue import (
    MOST_QUEUES,
    NoRequest,
    QueueState,
    asked_by,
    is_for_later,
    is_unread,
    queue_address,
    reason_text,
    room,
)
from traffic.selectors.application import Application, UnknownApplication, application_with
from traffic.selectors.async_request import accepted_since, deployments_of_model, open_requests, serving_region
from traffic.services.async_request import AsyncSubmission, async_request_accept

UNREAD = "request-queue-unread"
"""Kind of the incident of a queue that is declared and not read."""
GOING = frozenset({QueueState.READING, QueueState.FULL})
NOTED_EVERY = timedelta(seconds=15)
"""How often a queue that is read as before says so in its row."""
REFUSED_KEPT = timedelta(days=14)
"""As long as SQS keeps a message at most."""
REFUSED_MOST = 1000
"""Of one queue: who sends rubbish must not fill the database."""
SETTINGS = AsyncSettings()

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MayReceive:
    """How many messages of a queue may be received now, 0 for none, and why none."""

    count: int
    state: QueueState
    reason: str = ""


@transaction.atomic
def request_queue_declare(*, url: str, key: str, actor: str, now: datetime) -> RequestQueue:
    """Let senders take the messages of a queue as requests of a key, named by its prefix.

    Raises:
        InvalidInput: no queue of requests of this install, or no key that opens anything.
        Conflict: the queue is declared already, or there are too many.
    """
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
        raise Conflict(f"there are {MOST_QUEUES} queues of requests already; withdraw one, or bind fewer keys")
    columns: dict[str, Any] = {"aws_region": address.region, "account": address.account, "name": address.name}
    columns |= {"key": bound, "actor": actor[:64], "created_at": now}
    row, created = RequestQueue.objects.get_or_create(url=url, defaults=columns)
    if not created:
        raise Conflict(f"{row} is declared already, with the key sw_{row.key.prefix}; withdraw it first")
    message = f"messages of {row} are requests of {bound.tenant or 'no tenant'} (sw_{bound.prefix}), by {actor}"
    _event("declared", message, Tone.WARN, row, actor, now)
    return row


@transaction.atomic
def request_queue_withdraw(*, queue_id: int, actor: str, now: datetime) -> None:
    """Take no more messages of a queue. Those that wait stay there; those that were accepted are answered."""
    row = RequestQueue.objects.select_for_update().get(pk=queue_id)
    incidents_close(kind=UNREAD, subject=row.name, resolution=f"{actor} withdrew the queue", now=now)
    _event("withdrawn", f"messages of {row} are taken no more, by {actor}", Tone.IDLE, row, actor, now)
    row.delete()


def request_queue_may_receive(queue: RequestQueue, *, now: datetime, settings: AsyncSettings = SETTINGS) -> MayReceive:
    """What may be received of a queue: as many messages as would be accepted. What is received and not accepted comes
    nearer to the dead letters each time, though nothing is wrong with it."""
    try:
        application = application_with(queue.key, now)
    except UnknownApplication as unknown:
        return MayReceive(0, QueueState.STOPPED, f"the key sw_{queue.key.prefix} opens nothing: {unknown}")
    if application.over_quota:
        return MayReceive(0, QueueState.FULL, f"the budget of {application.tenant} for this month is used up")
    region = serving_region(_region_of(queue))
    if region is None or deployments_of_model(region, "") is None:
        return MayReceive(0, QueueState.FULL, "no region serves yet")
    count = room(
        waiting=open_requests(application.tenant),
        most_waiting=settings.max_open_per_tenant,
        last_minute=accepted_since(application, now, 60.0) if application.requests_per_min else 0,
        per_minute=application.requests_per_min,
    )
    if count:
        return MayReceive(count, QueueState.READING)
    return MayReceive(
        0, QueueState.FULL, "the tenant's limits leave no room: requests that wait, or a key's per minute"
    )


def request_message_take(
    queue: RequestQueue, message: Message, body: bytes, *, now: datetime, settings: AsyncSettings = SETTINGS
) -> bool:
    """Whether the message is done with: its request is in the database, now or from an earlier time that it came.

    Has to be called outside of transactions, for the message is deleted next.
    """
    try:
        application = application_with(queue.key, now)
        _accept(queue, application, message, body, now, settings)
    except UnknownApplication:
        return False
    except NoRequest as refusal:
        return request_message_refuse(queue, message, str(refusal), now=now)
    except ApplicationRefused as refusal:
        return False if is_for_later(refusal.status) else request_message_refuse(queue, message, str(refusal), now=now)
    return True


def _accept(queue: RequestQueue, application: Application, message: Message, body: bytes, now: datetime,
            settings: AsyncSettings) -> None:  # fmt: skip
    asked = asked_by(message.id, message.attributes)
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
    """Note once why a message is left for the dead letters. Returns False: it is not done with."""
    if queue.refused.count() < REFUSED_MOST:
        noted = {"reason": reason_text(reason), "at": now}
        _, created = RefusedMessage.objects.get_or_create(queue=queue, message=message.id[:100], defaults=noted)
        if created:
            log.warning("message %s of %s is left for its dead letters: %s", message.id, queue, noted["reason"])
            live.push("keys")
    return False


def request_queue_note(queue: RequestQueue, state: QueueState, reason: str, *, now: datetime) -> None:
    """Store how reading a queue goes, and open or close its incident. Any number of senders may say so: what one of
    them read within the last minute is not unread, whatever another one finds."""
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
    """Forget refused messages that no queue can have any more. Returns how many."""
    return RefusedMessage.objects.filter(at__lt=now - REFUSED_KEPT).delete()[0]


def _region_of(queue: RequestQueue) -> str:
    """The region of the fleet that is where the queue is; "": none."""
    return CloudRegion.objects.filter(aws_region=queue.aws_region).values_list("region_id", flat=True).first() or ""


def _event(what: str, message: str, tone: Tone, row: RequestQueue, actor: str, now: datetime) -> None:
    detail = {"url": row.url, "key": row.key.prefix, "tenant": row.key.tenant}
    event_record(kind=f"request_queue.{what}", message=message, tone=tone, now=now, actor=actor[:64], detail=detail)
    live.push("keys")
