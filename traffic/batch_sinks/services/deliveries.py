"""Delivers the results of ended batches, and of groups of near-real-time requests, to sinks: `BatchDeliverer` leases
deliveries and writes their lines in chunks.

The position after each chunk is stored by compare-and-set on the lease. A chunk may be written twice and never lost:
keys of Valkey and names of objects follow from the lines, so a repetition changes nothing."""

import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any, BinaryIO

from django.db import transaction
from django.db.models import F, Q, QuerySet

from fleet.clouds.aws.objects import ObjectWriter
from kernel import clock, live
from kernel.events import event_record
from kernel.lease_loop import LeaseLoop, in_thread
from kernel.tones import Tone
from traffic.batch_sinks.models import BatchDelivery
from traffic.batch_sinks.planner import (
    DeadLetter,
    DeliveryState,
    Entry,
    SinkKind,
    SinkSettings,
    SinkValue,
    entry_of,
    part_name,
    retry_wait_s,
)
from traffic.batch_sinks.services.request_groups import (
    request_group_write,
    request_groups_form,
    requests_wait_for_sinks,
)
from traffic.batch_sinks.services.sinks import sink_place
from traffic.batch_sinks.services.valkey import SinkAway, SinkRefused, ValkeyWriter
from traffic.batches.planning.batch import ENDED, BatchState
from traffic.batches.services.tenant_objects import JSONL, UnusableObject, explain_errors
from traffic.files.services.files import stored_name
from traffic.files.services.store import FileStore, NoSuchFile, StoreAway, file_store
from traffic.tenants.models import GrantUse
from traffic.tenants.selectors import place_grant_for, place_refusal

WITH_RESULTS = [state.value for state in ENDED if state is not BatchState.FAILED]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DeliveryLease:
    id: int
    fence: int


class LeaseLost(Exception):
    """Another process delivers the rest, or the delivery was deleted."""


class BatchDeliverer(LeaseLoop[DeliveryLease]):
    """Each delivery runs in a thread, which extends its own lease."""

    name = "traffic.batch_deliveries"

    def __init__(self, settings: SinkSettings | None = None, now: Callable[[], datetime] = clock.now) -> None:
        self._settings = settings or SinkSettings()
        super().__init__(self._settings, now)

    def is_open(self, now: datetime) -> bool:
        pending = BatchDelivery.objects.filter(state=DeliveryState.PENDING.value, due_at__lte=now)
        return pending.exists() or requests_wait_for_sinks()

    def claim(self, now: datetime) -> list[DeliveryLease]:
        deliveries_skip(now=now)
        request_groups_form(now=now, settings=self._settings)
        free = self._settings.at_once - len(self.running)
        return deliveries_claim(count=free, now=now, settings=self._settings) if free > 0 else []

    def renew(self, leases: Collection[DeliveryLease], now: datetime) -> Collection[DeliveryLease]:
        return leases

    def release(self, leased: DeliveryLease, now: datetime) -> None:
        _leased(leased).update(due_at=now)

    async def work(self, leased: DeliveryLease) -> None:
        await in_thread(partial(delivery_work, leased, settings=self._settings, clock_now=self._now), is_long=True)


def _leased(leased: DeliveryLease) -> "QuerySet[BatchDelivery]":
    return BatchDelivery.objects.filter(pk=leased.id, fence=leased.fence, state=DeliveryState.PENDING.value)


def deliveries_skip(*, now: datetime) -> int:
    """Ends deliveries of batches that failed and have no results. Returns their number."""
    rows = BatchDelivery.objects.filter(
        state=DeliveryState.PENDING.value, batch__state=BatchState.FAILED.value, due_at__lte=now
    )
    return rows.update(state=DeliveryState.SKIPPED.value, reason="the batch failed", ended_at=now)


def deliveries_claim(*, count: int, now: datetime, settings: SinkSettings) -> list[DeliveryLease]:
    """Leases deliveries of ended batches that are due, longest waiting first."""
    has_results = Q(batch=None) | Q(batch__state__in=WITH_RESULTS)
    due = BatchDelivery.objects.filter(has_results, state=DeliveryState.PENDING.value, due_at__lte=now)
    due = due.order_by("due_at", "id")
    with transaction.atomic():
        rows = list(due.select_for_update(skip_locked=True, of=("self",))[:count])
        until = now + timedelta(seconds=settings.lease_s)
        BatchDelivery.objects.filter(pk__in=[row.pk for row in rows]).update(fence=F("fence") + 1, due_at=until)
    return [DeliveryLease(row.pk, row.fence + 1) for row in rows]


def delivery_work(leased: DeliveryLease, *, settings: SinkSettings, clock_now: Callable[[], datetime]) -> None:
    """Delivers what is left of a delivery, or stores why it could not and when it is tried again."""
    row = BatchDelivery.objects.select_related("batch", "sink").filter(pk=leased.id, fence=leased.fence).first()
    if row is None:
        return
    try:
        delivery = _Delivery(row, leased, settings, clock_now)
        delivery.run()
        delivery.end(DeliveryState.DELIVERED, "")
    except LeaseLost:
        return
    except NoSuchFile:
        _end(leased, row, DeliveryState.FAILED, "the results were deleted or have expired", clock_now())
    except (SinkRefused, UnusableObject) as refused:
        _end(leased, row, DeliveryState.FAILED, str(refused), clock_now())
    except (SinkAway, StoreAway) as away:
        _retry_later(leased, row, str(away), settings, clock_now())


class _Delivery:
    """A delivery under a lease. Files are read once, in order."""

    def __init__(
        self, row: BatchDelivery, leased: DeliveryLease, settings: SinkSettings, clock_now: Callable[[], datetime]
    ) -> None:
        self._row, self._leased, self._settings, self._now = row, leased, settings, clock_now
        self._store: FileStore = file_store()

    def run(self) -> None:
        row = self._row
        is_valkey = row.sink.kind == SinkKind.VALKEY.value
        writer = ValkeyWriter(row.sink, self._settings) if is_valkey else None
        try:
            for in_errors, name in self._files():
                if in_errors != row.in_errors:
                    self._store_progress(in_errors=in_errors, position=0, part=0)
                if not name:
                    continue
                with self._store.open(name, row.position) as file:
                    if writer is not None:
                        self._to_valkey(writer, file)
                    else:
                        self._to_s3(file)
        finally:
            if writer is not None:
                writer.close()

    def _files(self) -> Iterator[tuple[bool, str]]:
        """The files that are not delivered yet, and whether they have errors. A name is empty if there is none."""
        row, batch = self._row, self._row.batch
        if batch is not None:
            output, errors = (id and stored_name(id) for id in (batch.output_file_id, batch.error_file_id))
        else:
            output, errors = self._group_files()
        if not row.in_errors:
            yield False, output
        if row.sink.errors:
            yield True, errors

    def _group_files(self) -> tuple[str, str]:
        """Names the files of a group, which its first lease writes."""
        row = self._row
        if not row.output_name and not row.error_name:
            written = request_group_write(row, self._store)
            self._store_progress(output_name=written.output, error_name=written.errors)
        return row.output_name, row.error_name

    def _to_valkey(self, writer: ValkeyWriter, file: BinaryIO) -> None:
        sink = self._row.sink
        names = {"batch": self._row.batch_id or "async", "tenant": sink.tenant}
        for lines, size in _chunks(file, self._settings.chunk_lines, self._settings.chunk_bytes):
            entries: list[Entry] = []
            dead: list[dict[str, Any]] = []
            for line in lines:
                try:
                    entries.append(entry_of(line, sink.key_template, SinkValue(sink.value), names))
                except DeadLetter as letter:
                    dead.append({"custom_id": line[:80].decode("utf-8", "replace"), "reason": str(letter)})
            dead += [{"custom_id": entry.custom_id[:200], "reason": why} for entry, why in writer.write(entries)]
            self._store_chunk(size, len(lines) - len(dead), dead)

    def _to_s3(self, file: BinaryIO) -> None:
        sink, batch = self._row.sink, self._row.batch
        place = sink_place(sink, self._row.place, batch.created_at if batch else self._row.grouped_at or self._now())
        grant = place_grant_for(sink.tenant, place, GrantUse.WRITE)
        if grant is None:
            raise SinkRefused(place_refusal(sink.tenant, place, GrantUse.WRITE))
        part_bytes = sink.part_mib * 1024 * 1024
        chunks = _chunks(file, self._settings.chunk_lines, self._settings.chunk_bytes)
        chunk = next(chunks, None)
        while chunk is not None:
            target = place.below(part_name(in_errors=self._row.in_errors, number=self._row.part))
            size = lines = 0
            with explain_errors(target):
                writer = ObjectWriter(grant.region, target.bucket, target.key, kind=JSONL)
                try:
                    while chunk is not None and (not size or size + chunk[1] <= part_bytes):
                        writer.write(b"".join(chunk[0]))
                        size, lines = size + chunk[1], lines + len(chunk[0])
                        self._renew()
                        chunk = next(chunks, None)
                    writer.commit()
                finally:
                    writer.abort()
            self._store_chunk(size, lines, [], part=self._row.part + 1)

    def _store_chunk(self, size: int, lines: int, dead: list[dict[str, Any]], **columns: Any) -> None:
        row = self._row
        shown = [*row.dead_letters, *dead][: self._settings.dead_shown]
        columns |= {"dead": row.dead + len(dead), "dead_letters": shown} if dead else {}
        self._store_progress(position=row.position + size, lines=row.lines + lines, **columns)
        if row.dead > self._settings.dead_most:
            reason = row.dead_letters[-1]["reason"]
            raise SinkRefused(f"{row.dead} lines cannot be delivered, the last because: {reason}")

    def _store_progress(self, **columns: Any) -> None:
        until = self._now() + timedelta(seconds=self._settings.lease_s)
        if not _leased(self._leased).update(attempts=0, reason="", due_at=until, **columns):
            raise LeaseLost
        for column, value in {**columns, "attempts": 0}.items():
            setattr(self._row, column, value)

    def _renew(self) -> None:
        if not _leased(self._leased).update(due_at=self._now() + timedelta(seconds=self._settings.lease_s)):
            raise LeaseLost

    def end(self, state: DeliveryState, reason: str) -> None:
        _end(self._leased, self._row, state, reason, self._now())


def _chunks(file: BinaryIO, most_lines: int, most_bytes: int) -> Iterator[tuple[list[bytes], int]]:
    """Yields whole lines and their bytes in the file, the same wherever reading begins at the end of a chunk."""
    lines: list[bytes] = []
    size = 0
    for line in file:
        lines.append(line)
        size += len(line)
        if len(lines) >= most_lines or size >= most_bytes:
            yield lines, size
            lines, size = [], 0
    if lines:
        yield lines, size


def _end(leased: DeliveryLease, row: BatchDelivery, state: DeliveryState, reason: str, now: datetime) -> None:
    with transaction.atomic():
        if not _leased(leased).update(state=state.value, reason=reason[:500], ended_at=now):
            return
        live.push("batches")
        if state is not DeliveryState.FAILED:
            return
        detail = {"batch": row.batch_id, "sink": row.sink_id, "tenant": row.sink.tenant}
        whose = f"batch {row.batch_id}" if row.batch_id else f"near-real-time {row.what}"
        message = f"the results of {whose} were not delivered to sink {row.sink_id}: {reason[:300]}"
        event_record(kind="batch_delivery.failed", message=message, tone=Tone.WARN, now=now, detail=detail)


def _retry_later(leased: DeliveryLease, row: BatchDelivery, reason: str, settings: SinkSettings, now: datetime) -> None:
    attempts = row.attempts + 1
    wait_s = retry_wait_s(attempts, settings)
    if wait_s is None:
        _end(leased, row, DeliveryState.FAILED, f"{attempts} attempts in a row: {reason}", now)
        return
    log.warning("delivery of %s waits %g s: %s", row, wait_s, reason)
    _leased(leased).update(attempts=attempts, reason=reason[:500], due_at=now + timedelta(seconds=wait_s))
    live.push("batches")
