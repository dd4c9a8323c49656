"""Binds request queues to keys, and turns their messages into near-real-time requests, with the limits and errors that
the key's application has at the endpoint. `planner` and `planning.kafka` parse messages; `queue_readers` calls this."""

import asyncio
import json
import logging
import ssl
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from cryptography.fernet import InvalidToken
from django.db import transaction
from django.db.models import Q

from fleet.clouds.aws.identity import install_ensure
from fleet.clouds.aws.notices import Message
from fleet.clouds.models import CloudRegion
from fleet.faults.services.incidents import incident_open, incidents_close
from kernel import live
from kernel.events import event_record
from kernel.refusals import Conflict, InvalidInput
from kernel.secrets import secret_box
from kernel.tones import Tone
from traffic.async_requests.models import RefusedMessage, RequestQueue
from traffic.async_requests.planner import (
    MOST_QUEUES,
    RECEIVED_AT_ONCE,
    AsyncSettings,
    InvalidMessage,
    QueueState,
    is_temporary,
    is_unread,
    parse_attributes,
    queue_address,
    reason_text,
    room,
)
from traffic.async_requests.planning.kafka import (
    InvalidSetting,
    KafkaSecurity,
    QueueKind,
    SaslMechanism,
    TopicSettings,
    check_topic,
    topic_address,
)
from traffic.async_requests.selectors import accepted_since, deployments_of_model, open_requests, serving_region
from traffic.async_requests.services.intake import AsyncSubmission, async_request_accept
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
def request_queue_declare(
    *, url: str, key: str, actor: str, now: datetime, topic: TopicSettings | None = None
) -> RequestQueue:
    """Binds a queue to a key, named by its prefix. `topic` is for Kafka. Raises InvalidInput if it is neither a request
    queue of this installation nor a topic, or the key is not valid. Raises Conflict if the queue is bound already, or
    there are too many."""
    is_kafka = url.startswith("kafka://")
    if topic is not None and not is_kafka:
        raise InvalidInput(
            field="url", rule="queue", message="only a topic, kafka://HOST:PORT/TOPIC, has these settings"
        )
    columns = _topic_columns(url, topic or TopicSettings(), now) if is_kafka else _sqs_columns(url, now)
    bound = ApplicationKey.objects.filter(prefix=key.removeprefix("sw_")).first()
    try:
        if bound is None:
            raise UnknownApplication("invalid_api_key", f"there is no key with the prefix {key[:40]!r}")
        application_with(bound, now)
    except UnknownApplication as unknown:
        raise InvalidInput(field="key", rule="key", message=str(unknown)) from unknown
    if RequestQueue.objects.count() >= MOST_QUEUES:
        raise Conflict(f"there are {MOST_QUEUES} request queues already; withdraw one")
    columns |= {"key": bound, "actor": actor[:64], "created_at": now}
    row, created = RequestQueue.objects.get_or_create(url=url, defaults=columns)
    if not created:
        raise Conflict(f"{row} is declared already, with the key sw_{row.key.prefix}; withdraw it first")
    message = f"bound {row} to {bound.tenant or 'no tenant'} (sw_{bound.prefix}), by {actor}"
    _queue_event("declared", message, Tone.WARN, row, actor, now)
    return row


def _sqs_columns(url: str, now: datetime) -> dict[str, Any]:
    try:
        address = queue_address(url, install_ensure(now).pk)
    except ValueError as error:
        raise InvalidInput(field="url", rule="queue", message=str(error)) from error
    return {"aws_region": address.region, "account": address.account, "name": address.name}


def _topic_columns(url: str, stated: TopicSettings, now: datetime) -> dict[str, Any]:
    try:
        address = topic_address(url)
        check_topic(address, stated)
        _check_ca(stated.ca_pem)
    except InvalidSetting as error:
        raise InvalidInput(field=error.field, rule="topic", message=str(error)) from error
    security = KafkaSecurity(stated.security or KafkaSecurity.PLAINTEXT)
    return {
        "kind": QueueKind.KAFKA.value,
        "name": address.topic,
        "group": stated.group or f"{install_ensure(now).pk}-requests-{address.topic}"[:128],
        "results_topic": stated.results_topic,
        "dead_letter_topic": stated.dead_letter_topic,
        "security": security.value,
        "mechanism": (stated.mechanism or SaslMechanism.SCRAM_SHA_512.value) if security.has_user else "",
        "username": stated.username,
        "sealed_password": _seal_password(stated.password, address.brokers, stated.username),
        "ca_pem": stated.ca_pem,
    }


def _check_ca(pem: str) -> None:
    try:
        if pem:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=pem)
    except (ssl.SSLError, ValueError) as error:
        raise InvalidSetting("ca_pem", "must be certificates in PEM") from error


_PURPOSE = "traffic.request_queues"


def _seal_password(password: str, brokers: str, username: str) -> str:
    text = json.dumps([brokers, username, password])
    return secret_box(_PURPOSE).encrypt(text.encode()).decode() if password else ""


def request_queue_password(row: RequestQueue) -> str:
    """Returns the password for a topic's brokers, or "" if there is none, or it was encrypted for other brokers or
    another user, or with another SECRET_KEY."""
    try:
        brokers, username, password = json.loads(secret_box(_PURPOSE).decrypt(row.sealed_password.encode()))
    except (InvalidToken, ValueError, TypeError):
        return ""
    return str(password) if (brokers, username) == (row.brokers, row.username) else ""


@transaction.atomic
def request_queue_withdraw(*, queue_id: int, actor: str, now: datetime) -> None:
    """Stops reading a queue. Its messages stay there; accepted requests are completed."""
    row = RequestQueue.objects.select_for_update().get(pk=queue_id)
    incidents_close(kind=UNREAD, subject=row.name, resolution=f"{actor} withdrew the queue", now=now)
    _queue_event("withdrawn", f"withdrew {row}, by {actor}", Tone.IDLE, row, actor, now)
    row.delete()


def request_queue_may_receive(
    queue: RequestQueue, *, now: datetime, settings: AsyncSettings = SETTINGS, most: int = RECEIVED_AT_ONCE
) -> ReceiveLimit:
    """Returns how many messages of a queue would be accepted now, at most `most`. Receiving more would bring valid
    messages of SQS nearer to the dead-letter queue."""
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
        most=most,
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
        return request_message_refuse(queue, message.id, str(refusal), now=now)
    except ApplicationRefused as refusal:
        return (
            False if is_temporary(refusal.status) else request_message_refuse(queue, message.id, str(refusal), now=now)
        )
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
        sink=asked.sink,
        idempotency_key=asked.idempotency_key,
        sent_at=message.sent_at,
    )
    async_request_accept(application=application, submission=submission, now=now, settings=settings)
    queue.refused.filter(message=message.id).delete()


def request_message_refuse(queue: RequestQueue, message_id: str, reason: str, *, now: datetime) -> bool:
    """Records once why a message is left for the dead-letter queue. Returns False: it must not be deleted."""
    if queue.refused.count() < REFUSED_MOST:
        noted = {"reason": reason_text(reason), "at": now}
        _, created = RefusedMessage.objects.get_or_create(queue=queue, message=message_id[:100], defaults=noted)
        if created:
            log.warning("message %s of %s is no request: %s", message_id, queue, noted["reason"])
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
    if not queue.aws_region:
        return ""
    return CloudRegion.objects.filter(aws_region=queue.aws_region).values_list("region_id", flat=True).first() or ""


def _queue_event(what: str, message: str, tone: Tone, row: RequestQueue, actor: str, now: datetime) -> None:
    detail = {"url": row.url, "key": row.key.prefix, "tenant": row.key.tenant}
    event_record(kind=f"request_queue.{what}", message=message, tone=tone, now=now, actor=actor[:64], detail=detail)
    live.push("keys")


def request_queue_row(queue_id: int) -> RequestQueue | None:
    """Returns a queue with its key, or None if it was withdrawn."""
    return RequestQueue.objects.select_related("key").filter(pk=queue_id).first()


def request_queue_note_unread(queue_id: int, reason: str, now: datetime) -> None:
    """Records that a queue could not be read."""
    queue = request_queue_row(queue_id)
    if queue is not None:
        request_queue_record(queue, QueueState.UNREAD, reason, now=now)


def request_queue_note_waiting(queue_id: int, waiting: int) -> None:
    """Records a queue's length."""
    RequestQueue.objects.filter(pk=queue_id).update(waiting=waiting)


async def pause_until(seconds: float, stopping: asyncio.Event) -> None:
    """Waits for `seconds`, or until the process stops."""
    try:
        async with asyncio.timeout(seconds):
            await stopping.wait()
    except TimeoutError:
        return
