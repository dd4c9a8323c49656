"""Turns records of a topic into near-real-time requests, a group per statement, and leases outcomes for the results
topic. Calls no broker. A record is done once its request or the reason of its refusal is in the database; read again,
it finds that request. Each outcome is published at least once."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from django.db import connection

from traffic.async_requests.models import AsyncRequest, RequestQueue
from traffic.async_requests.planner import AsyncSettings, InvalidMessage, is_temporary
from traffic.async_requests.planning.kafka import Record, TopicAddress, origin_of, parse_record, sent_at
from traffic.async_requests.services.body_groups import answer_load
from traffic.async_requests.services.intake import AcceptedId, AsyncSubmission, async_requests_accept
from traffic.async_requests.services.queues import request_message_refuse
from traffic.tenants.planner import ApplicationRefused
from traffic.tenants.selectors import UnknownApplication, application_with

PUBLISHED_AT_ONCE = 500


@dataclass(slots=True)
class TakenRecords:
    """`next_offsets`: what to commit, by partition. `held`: the first record of a partition that must be read again,
    because the limits leave no room or the key is not valid. `refused`: records that are no requests, with the
    reason."""

    next_offsets: dict[int, int] = field(default_factory=dict)
    held: dict[int, int] = field(default_factory=dict)
    refused: list[tuple[Record, str]] = field(default_factory=list)


def kafka_records_accept(
    queue: RequestQueue, records: Sequence[Record], *, now: datetime, settings: AsyncSettings
) -> TakenRecords:
    """Accepts the requests of records in the order of their partitions. Each statement is complete: after a kill
    between two, the records are read again."""
    results = _results(queue, records, now, settings)
    taken = TakenRecords()
    for record, result in zip(records, results, strict=True):
        if record.partition in taken.held:
            continue
        if isinstance(result, ApplicationRefused) and (result.status == 401 or is_temporary(result.status)):
            taken.held[record.partition] = record.offset
            continue
        taken.next_offsets[record.partition] = record.offset + 1
        if not isinstance(result, AcceptedId):
            request_message_refuse(queue, record.place, str(result), now=now)
            taken.refused.append((record, str(result)))
    return taken


def _results(
    queue: RequestQueue, records: Sequence[Record], now: datetime, settings: AsyncSettings
) -> list[AcceptedId | ApplicationRefused | InvalidMessage]:
    try:
        application = application_with(queue.key, now)
    except UnknownApplication as unknown:
        return [unknown for _ in records]
    submissions = [_submission(queue, record, now, settings) for record in records]
    whole = [each for each in submissions if isinstance(each, AsyncSubmission)]
    accepted = iter(async_requests_accept(application=application, submissions=whole, now=now, settings=settings))
    return [next(accepted) if isinstance(each, AsyncSubmission) else each for each in submissions]


def _submission(
    queue: RequestQueue, record: Record, now: datetime, settings: AsyncSettings
) -> AsyncSubmission | InvalidMessage:
    try:
        asked = parse_record(TopicAddress(queue.brokers, queue.name), record, settings.max_body_bytes)
    except InvalidMessage as refusal:
        return refusal
    return AsyncSubmission(
        path=asked.path,
        body=record.value or b"",
        limit_ms=asked.limit_ms,
        callback_url=asked.callback_url,
        sink=asked.sink,
        idempotency_key=asked.idempotency_key,
        sent_at=sent_at(record, now),
        results_to=queue.pk if queue.results_topic else None,
        origin=origin_of(record) if queue.results_topic else {},
    )


_CLAIM = """
UPDATE traffic_asyncrequest SET leased_until = %(until)s WHERE id IN (
    SELECT id FROM traffic_asyncrequest
    WHERE results_to_id = %(queue)s AND ended_at IS NOT NULL AND published_at IS NULL
        AND (leased_until IS NULL OR leased_until <= %(now)s)
    ORDER BY ended_at LIMIT %(count)s FOR UPDATE SKIP LOCKED
) RETURNING id
"""


def outcomes_claim(queue_id: int, *, now: datetime, settings: AsyncSettings) -> list[AsyncRequest]:
    """Leases outcomes that the queue's results topic does not have, the oldest first. Raises StoreAway."""
    until = now + timedelta(seconds=settings.lease_s)
    with connection.cursor() as cursor:
        cursor.execute(_CLAIM, {"queue": queue_id, "now": now, "until": until, "count": PUBLISHED_AT_ONCE})
        ids = [id for (id,) in cursor.fetchall()]
    rows = AsyncRequest.objects.filter(id__in=ids).order_by("ended_at", "id") if ids else ()
    return [answer_load(row) for row in rows]


def outcomes_published(ids: Sequence[str], *, now: datetime) -> None:
    """Records that the brokers have these outcomes."""
    AsyncRequest.objects.filter(id__in=ids, ended_at__isnull=False).update(published_at=now, leased_until=None)
