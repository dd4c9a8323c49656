"""Validates the input of a batch, line by line, and writes its work file: the same lines in the order in which they are
sent, cut into ranges. From then on the batch needs its input file no more."""

import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import BinaryIO

from django.db import transaction
from django.db.models import QuerySet

from traffic.models import ApplicationKey, Batch, BatchRange
from traffic.planning.application_refusal import ApplicationRefused
from traffic.planning.batch import BatchSettings, BatchState, LineError
from traffic.planning.batch_lines import LineIndex
from traffic.selectors.application import Application, UnknownApplication, application_with
from traffic.services.async_request import place_check
from traffic.services.batch import batch_move
from traffic.services.batch_lease import work_name
from traffic.services.batch_object import PinnedInput, UnusableObject, input_fetch
from traffic.services.file_store import FileStore, NoSuchFile, file_store
from traffic.services.stored_file import file_settings, stored_name

RANGE_ROWS = 1000


@dataclass(frozen=True, slots=True)
class LineRange:
    """Consecutive lines of a work file, by bytes."""

    start: int
    end: int
    lines: int


def batch_validate(*, batch: Batch, now: datetime, settings: BatchSettings) -> bool:
    """Have a batch begin, or fail with what is wrong. Returns whether it was ours to judge: it may have been cancelled,
    or its lease may have ended.

    Raises:
        StoreAway: the store cannot be used; another process tries again once the lease has ended.
    """
    store = file_store()
    ours = Batch.objects.filter(id=batch.id, fence=batch.fence)
    if batch.validations > settings.max_validations:
        message = f"The input could not be validated in {settings.max_validations} attempts."
        return _failed(ours, [LineError("validation_failed", message)], "", now)
    etag = ""
    try:
        pinned = _input(store, batch)
        with pinned.file as file:
            errors, model, ranges = _validated(store, file, batch, now, settings)
        etag = pinned.etag
    except NoSuchFile:
        errors, model, ranges = [LineError("file_not_found", "The input file was deleted.")], "", []
    except UnusableObject as unusable:
        errors, model, ranges = [unusable.error("input_uri")], "", []
    if errors:
        return _failed(ours, errors, model, now)
    with transaction.atomic():
        lines = sum(part.lines for part in ranges)
        begins = {"start": BatchState.VALIDATING, "to": BatchState.IN_PROGRESS, "now": now}
        known = {"model": model, "lines": lines, "input_etag": etag, "work_fence": batch.fence}
        if not batch_move(ours, **begins, **known):  # type: ignore[arg-type]
            return False
        rows = (BatchRange(batch=batch, number=number, start=part.start, end=part.end, lines=part.lines)
                for number, part in enumerate(ranges))  # fmt: skip
        BatchRange.objects.bulk_create(rows, batch_size=RANGE_ROWS)
    return True


def _failed(ours: "QuerySet[Batch]", errors: list[LineError], model: str, now: datetime) -> bool:
    shown = [error.shown() for error in errors]
    moved = batch_move(
        ours, start=BatchState.VALIDATING, to=BatchState.FAILED, now=now, errors=shown, model=model[:200]
    )  # fmt: skip
    return moved > 0


def _input(store: FileStore, batch: Batch) -> PinnedInput:
    if batch.input_uri:
        return input_fetch(batch, file_settings().max_bytes)
    return PinnedInput(store.local(stored_name(batch.input_file_id)), "")


def _validated(
    store: FileStore, file: BinaryIO, batch: Batch, now: datetime, settings: BatchSettings
) -> tuple[list[LineError], str, list[LineRange]]:
    index = file_index(file, batch.endpoint, settings)
    if index.errors:
        return index.errors, index.model, []
    try:
        place_check(_application(batch, now), batch.region_id, index.model)
    except ApplicationRefused as refusal:
        return [LineError(refusal.code or "invalid_value", str(refusal), None, "body.model")], index.model, []
    return [], index.model, work_write(store, file, index, work_name(batch.id, batch.fence), settings)


def file_index(file: BinaryIO, endpoint: str, settings: BatchSettings) -> LineIndex:
    """What is known of a file's lines, and what is wrong with them."""
    index = LineIndex(endpoint=endpoint, salt=secrets.token_bytes(16), settings=settings)
    for start, text in bounded_lines(file, settings.max_line_bytes):
        index.add(text, start)
    index.finish()
    return index


def bounded_lines(file: BinaryIO, most: int) -> Iterator[tuple[int, bytes]]:
    """Each line's first byte and its text without the line's end; of one longer than `most` so much and a byte more."""
    start = 0
    while text := file.readline(most + 2):
        yield start, text.rstrip(b"\r\n")
        start += len(text)
        while text and not text.endswith(b"\n") and (text := file.readline(most)):
            start += len(text)


def work_write(
    store: FileStore, file: BinaryIO, index: LineIndex, name: str, settings: BatchSettings
) -> list[LineRange]:
    """Write the lines in the order in which they are sent."""
    writer, ranges = store.write(name), list[LineRange]()
    try:
        start = lines = 0
        for line in index.order():
            first, length = index.place(line)
            file.seek(first)
            writer.write(file.read(length) + b"\n")
            lines += 1
            if lines == settings.range_lines or writer.bytes - start >= settings.range_bytes:
                ranges.append(LineRange(start, writer.bytes, lines))
                start, lines = writer.bytes, 0
        if lines:
            ranges.append(LineRange(start, writer.bytes, lines))
        writer.commit()
    finally:
        writer.abort()
    return ranges


def _application(batch: Batch, now: datetime) -> Application:
    """
    Raises:
        ApplicationRefused: the key that began the batch opens nothing any more.
    """
    if not batch.key:
        return Application(tenant=batch.tenant)
    key = ApplicationKey.objects.filter(prefix=batch.key).first()
    try:
        if key is None:
            raise UnknownApplication("invalid_api_key", "the API key was revoked")
        return application_with(key, now)
    except UnknownApplication as unknown:
        raise ApplicationRefused(401, unknown.code, str(unknown)) from unknown
