"""Groups ended near-real-time requests for their sinks. A group is a delivery with its own files in the store, and is
delivered as a batch is.

A request joins one group, in the transaction that creates the group. Its files follow from its requests, so a killed
process writes them again under another name and delivers the same lines."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from django.db import connection, transaction
from django.db.models import Count, F, Min, QuerySet

from traffic.async_requests.models import AsyncRequest
from traffic.async_requests.planner import ERROR_CODES, AsyncState, AttemptResponse
from traffic.async_requests.services.body_groups import FOLDER, HOUR, answer_load
from traffic.batch_sinks.models import BatchDelivery
from traffic.batch_sinks.planner import SinkKind, SinkSettings, request_line
from traffic.files.services.store import FileStore, FileWriter

READ_AT_ONCE = 500


@dataclass(frozen=True, slots=True)
class GroupFiles:
    """Names in the store; empty if the group has no such lines."""

    output: str = ""
    errors: str = ""


def requests_wait_for_sinks() -> bool:
    """Whether an ended request has no group, from an index."""
    return _ungrouped().exists()


def request_groups_form(*, now: datetime, settings: SinkSettings) -> int:
    """Groups ended requests whose sink has waited or collected enough. Returns the number of groups."""
    waiting = _ungrouped().order_by().values("sink", kind=F("sink__kind"))
    formed = 0
    for row in waiting.annotate(oldest=Min("ended_at"), requests=Count("id")):
        wait_s = settings.group_s if row["kind"] == SinkKind.VALKEY.value else settings.object_group_s
        is_due = row["oldest"] <= now - timedelta(seconds=wait_s)
        if is_due or row["requests"] >= settings.group_most:
            formed += _form(row["sink"], now, settings)
    return formed


def _ungrouped() -> "QuerySet[AsyncRequest]":
    return AsyncRequest.objects.filter(sink__isnull=False, delivery=None, ended_at__isnull=False)


_JOIN = """
UPDATE traffic_asyncrequest request SET delivery_id = %s FROM (
    SELECT id FROM traffic_asyncrequest WHERE sink_id = %s AND delivery_id IS NULL AND ended_at IS NOT NULL
    ORDER BY ended_at LIMIT %s FOR UPDATE SKIP LOCKED
) chosen WHERE request.id = chosen.id
"""


@transaction.atomic
def _form(sink: str, now: datetime, settings: SinkSettings) -> bool:
    row = BatchDelivery.objects.create(sink_id=sink, grouped_at=now, due_at=now)
    with connection.cursor() as cursor:
        cursor.execute(_JOIN, [row.pk, sink, settings.group_most])
        if not cursor.rowcount:
            transaction.set_rollback(True)
        return bool(cursor.rowcount)


def request_group_write(row: BatchDelivery, store: FileStore) -> GroupFiles:
    """Writes the lines of a group's requests, failed ones only if its sink takes them."""
    hour = (row.grouped_at or row.due_at).astimezone(UTC).strftime(HOUR)
    names = {is_output: f"{FOLDER}/{hour}/sink-{row.pk}-{row.fence}-{is_output:d}" for is_output in (True, False)}
    writers: dict[bool, FileWriter] = {}
    try:
        for request in _requests(row):
            is_output = request.state == AsyncState.DONE.value
            if not is_output and not row.sink.errors:
                continue
            if is_output not in writers:
                writers[is_output] = store.write(names[is_output])
            writers[is_output].write(_line(answer_load(request)))
        for writer in writers.values():
            writer.commit()
    finally:
        for writer in writers.values():
            writer.abort()
    return GroupFiles(names[True] if True in writers else "", names[False] if False in writers else "")


def _requests(row: BatchDelivery) -> Iterator[AsyncRequest]:
    ids = list(AsyncRequest.objects.filter(delivery=row).order_by("id").values_list("id", flat=True))
    for first in range(0, len(ids), READ_AT_ONCE):
        yield from AsyncRequest.objects.filter(id__in=ids[first : first + READ_AT_ONCE]).order_by("id")


def _line(request: AsyncRequest) -> bytes:
    received = AttemptResponse(request.status, bytes(request.answer or b""), reason=request.reason)
    code = ERROR_CODES.get(AsyncState(request.state), "")
    return request_line(request.id, request.idempotency_key or request.id, received, code)


def request_groups_trim(*, now: datetime, settings: SinkSettings) -> int:
    """Deletes groups after their retention, once their requests were deleted. Returns their number."""
    ended = BatchDelivery.objects.filter(batch=None, ended_at__lt=now - timedelta(seconds=settings.groups_kept_s))
    deleted, _ = ended.exclude(requests__isnull=False).delete()
    return deleted
