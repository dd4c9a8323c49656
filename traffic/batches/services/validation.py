"""Validates the input of a batch shard by shard. Each shard is read, checked, ordered, and written to a work file,
which replaces the input from then on; the shard and its ranges are one transaction. If a process dies, the next one
continues after the last shard. The batch begins when all of its lines are valid."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from time import monotonic
from typing import BinaryIO

from django.conf import settings as django_settings
from django.db import transaction
from django.db.models import Max, QuerySet, Sum
from django.utils.crypto import salted_hmac

from kernel import live
from traffic.async_requests.services.intake import serving_region_check
from traffic.batches.models import Batch, BatchRange, BatchShard, StoredFile, new_file_id
from traffic.batches.planning.batch import BatchSettings, BatchState, LineError
from traffic.batches.planning.shards import (
    ID_RECORD,
    ShardIndex,
    ShardPlace,
    plan_comparison,
    repeated_id_error,
    repeated_lines,
)
from traffic.batches.services.batch import BATCHES, batch_move
from traffic.batches.services.ranges import ids_name, work_name, work_of
from traffic.batches.services.tenant_objects import PinnedInput, UnusableObject, input_open
from traffic.files.planner import FilePurpose
from traffic.files.services.files import file_settings, stored_name
from traffic.files.services.store import FileStore, FileWriter, NoSuchFile, file_store
from traffic.keys.models import ApplicationKey
from traffic.tenants.planner import ApplicationRefused
from traffic.tenants.selectors import Application, UnknownApplication, application_with

RANGE_ROWS = 1000


@dataclass(frozen=True, slots=True)
class LineRange:
    """Consecutive lines of a work file, of one model, by bytes."""

    model: str
    start: int
    end: int
    lines: int


def batch_validate(*, batch: Batch, now: datetime, settings: BatchSettings) -> bool:
    """Validates the next shards of a batch. After the last one it starts the batch, or fails it with its errors.
    Returns False if the batch was cancelled or the lease was lost. Raises StoreAway if the store is unavailable;
    another process retries after the lease."""
    store, began_s = file_store(), monotonic()
    ours = Batch.objects.filter(id=batch.id, fence=batch.fence, state=BatchState.VALIDATING.value)
    if batch.validations > settings.max_validations:
        message = f"The input could not be validated in {settings.max_validations} attempts."
        return _fail_batch(ours, batch, [LineError("validation_failed", message)], "", now)
    last = batch.shards.last()
    try:
        while last is None or not _is_complete(batch, last, settings):
            last = _validate_shard(store, ours, batch, last, settings)
            if last is None:
                return False
            if monotonic() - began_s > settings.turn_s:
                return ours.update(leased_until=None) > 0
        return _conclude(store, ours, batch, last, now, settings)
    except NoSuchFile:
        errors = [LineError("file_not_found", "The input file was deleted.")]
    except UnusableObject as unusable:
        errors = [unusable.error("input_uri")]
    return _fail_batch(ours, batch, errors, "", now)


def _is_complete(batch: Batch, last: BatchShard, settings: BatchSettings) -> bool:
    errors = batch.shards.aggregate(n=Sum("errors_in_all"))["n"]
    is_over = any(error["code"] == "too_many_tasks" for error in last.errors)
    return last.end >= batch.input_bytes or errors >= settings.max_error_lines or is_over


def _validate_shard(
    store: FileStore, ours: "QuerySet[Batch]", batch: Batch, last: BatchShard | None, settings: BatchSettings
) -> BatchShard | None:
    """Adds the next shard. Returns None if the lease was lost."""
    place, number = shard_place(batch, last), last.number + 1 if last is not None else 0
    pinned = _open_input(store, batch, place.start)
    with pinned.file as file:
        index = shard_index(file, batch.endpoint, settings, salt=_salt(batch), place=place)
    work, ranges, slice_ends = work_of(number, batch.fence), list[LineRange](), list[int]()
    if not index.errors and not place.errors and len(index):
        ranges = work_write(store, index, work_name(batch.id, work), settings)
        if number or index.end < pinned.bytes:
            records, slice_ends = index.id_records()
            _write_file(store, ids_name(batch.id, work), [records])
    with transaction.atomic():
        if ours.select_for_update().first() is None:
            return None
        shard: BatchShard = batch.shards.create(
            number=number,
            fence=batch.fence,
            end=index.end,
            numbered=index.numbered,
            lines=len(index),
            inputs=index.inputs,
            lines_by_model=index.models,
            first_lines=index.first_lines,
            id_slice_ends=slice_ends,
            errors=[error.shown() for error in index.errors],
            errors_in_all=index.errors_in_all,
        )
        _create_ranges(batch, work, ranges)
        batch.input_bytes, batch.input_etag, batch.validations = pinned.bytes, pinned.etag, 0
        ours.update(
            input_bytes=pinned.bytes,
            input_etag=pinned.etag,
            validations=0,
            validated_lines=place.lines + len(index),
            validated_bytes=index.end,
        )
    live.push("batches")
    return shard


def _create_ranges(batch: Batch, work: str, ranges: Iterable[LineRange]) -> None:
    first = (batch.ranges.aggregate(last=Max("number"))["last"] or 0) + 1 if batch.ranges.exists() else 0
    rows = (
        BatchRange(
            batch=batch, number=number, model=part.model, work=work, start=part.start, end=part.end, lines=part.lines
        )
        for number, part in enumerate(ranges, first)
    )
    BatchRange.objects.bulk_create(rows, batch_size=RANGE_ROWS)


def shard_place(batch: Batch, last: BatchShard | None) -> ShardPlace:
    """Returns where the shard after `last` begins."""
    if last is None:
        return ShardPlace()
    totals = batch.shards.aggregate(lines=Sum("lines"), errors=Sum("errors_in_all"))
    models = _lines_by_model(batch.shards.values_list("lines_by_model", flat=True))
    return ShardPlace(last.end, last.numbered, totals["lines"], last.inputs, models, totals["errors"])


def _lines_by_model(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return dict(total)


def _salt(batch: Batch) -> bytes:
    """Equal for all shards of a batch, and secret."""
    return salted_hmac("traffic.batches.ids", batch.id, algorithm="sha256").digest()[:16]


def _open_input(store: FileStore, batch: Batch, start: int) -> PinnedInput:
    if batch.input_uri:
        return input_open(batch, start, django_settings.BATCH_INPUT_BYTES)
    size = StoredFile.objects.filter(id=batch.input_file_id).values_list("bytes", flat=True).first()
    if size is None:
        raise NoSuchFile(batch.input_file_id)
    return PinnedInput(store.open(stored_name(batch.input_file_id), start), "", size)


def shard_index(
    file: BinaryIO, endpoint: str, settings: BatchSettings, *, salt: bytes, place: ShardPlace | None = None
) -> ShardIndex:
    """Reads lines up to the size of a shard, from where the file is."""
    index = ShardIndex(endpoint=endpoint, salt=salt, settings=settings, place=place)
    for end, text in bounded_lines(file, settings.max_line_bytes, index.end):
        index.add(text, end)
        if index.is_full:
            break
    return index


def bounded_lines(file: BinaryIO, most: int, start: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yields the end of each line in the file, and its text without the line end, cut one byte after `most`."""
    end = start
    while text := file.readline(most + 2):
        end += len(text)
        line = text.rstrip(b"\r\n")
        while text and not text.endswith(b"\n") and (text := file.readline(most)):
            end += len(text)
        yield end, line


def work_write(store: FileStore, index: ShardIndex, name: str, settings: BatchSettings) -> list[LineRange]:
    """Writes the lines in sending order and returns their ranges; each has one model."""
    writer, ranges = store.write(name), list[LineRange]()
    try:
        model, start, lines = "", 0, 0
        for of_line, text in index.texts_in_order():
            is_full = lines == settings.range_lines or writer.bytes - start >= settings.range_bytes
            if lines and (is_full or of_line != model):
                ranges.append(LineRange(model, start, writer.bytes, lines))
                start, lines = writer.bytes, 0
            model = of_line
            writer.write(text + b"\n")
            lines += 1
        ranges.append(LineRange(model, start, writer.bytes, lines))
        writer.commit()
    finally:
        writer.abort()
    return ranges


def _write_file(store: FileStore, name: str, pieces: Iterable[bytes]) -> FileWriter:
    writer = store.write(name)
    try:
        for piece in pieces:
            writer.write(piece)
        writer.commit()
    finally:
        writer.abort()
    return writer


def _conclude(
    store: FileStore,
    ours: "QuerySet[Batch]",
    batch: Batch,
    last: BatchShard,
    now: datetime,
    settings: BatchSettings,
) -> bool:
    """Starts a batch whose lines are all valid, or fails it."""
    shards = list(batch.shards.all())
    models = _lines_by_model(shard.lines_by_model for shard in shards)
    errors = [LineError(**error) for shard in shards for error in shard.errors]
    if not errors and not models:
        errors = [LineError("empty_file", "The input file has no lines.")]
    if not errors and last.number:
        errors = _repeated_ids(store, batch, shards, settings)
    if not errors:
        errors = _refused_models(batch, shards, now)
    if errors:
        file_id = _errors_store(store, batch, errors, now) if len(errors) > settings.max_line_errors else ""
        return _fail_batch(ours, batch, errors[: settings.max_line_errors], file_id, now, models)
    begins = {"start": BatchState.VALIDATING, "to": BatchState.IN_PROGRESS, "now": now}
    return bool(batch_move(ours, **begins, lines_by_model=models, lines=sum(models.values())))  # type: ignore[arg-type]


def _repeated_ids(
    store: FileStore, batch: Batch, shards: Iterable[BatchShard], settings: BatchSettings
) -> list[LineError]:
    """Compares the IDs of all shards, some slices at a time."""
    filled = [shard for shard in shards if shard.id_slice_ends]
    names = [ids_name(batch.id, work_of(shard.number, shard.fence)) for shard in filled]
    found: list[int] = []
    for group in plan_comparison([shard.id_slice_ends for shard in filled]):
        parts = (
            store.read(name, first * ID_RECORD.size, end * ID_RECORD.size)
            for name, (first, end) in zip(names, group, strict=True)
            if end > first
        )
        found += repeated_lines(parts)
        if len(found) >= settings.max_error_lines:
            break
    return [repeated_id_error(line) for line in sorted(found)[: settings.max_error_lines]]


def _refused_models(batch: Batch, shards: Iterable[BatchShard], now: datetime) -> list[LineError]:
    """Returns an error for each model that no deployment of the region serves, or that the key does not include, with
    its first line."""
    first: dict[str, int] = {}
    for shard in shards:
        first = {**shard.first_lines, **first}
    try:
        application = _batch_application(batch, now)
    except ApplicationRefused as refusal:
        return [LineError(refusal.code or "invalid_value", str(refusal))]
    return refused_models(application, batch.region_id, first)


def refused_models(application: Application, region: str, first_lines: dict[str, int]) -> list[LineError]:
    """Returns an error for each model that the application may not use in a region. `first_lines` is by model."""
    errors = []
    for model, line in sorted(first_lines.items(), key=lambda each: each[1]):
        try:
            serving_region_check(application, region, model)
        except ApplicationRefused as refusal:
            errors.append(LineError(refusal.code or "invalid_value", str(refusal), line, "body.model"))
    return errors


def _batch_application(batch: Batch, now: datetime) -> Application:
    if not batch.key:
        return Application(tenant=batch.tenant)
    key = ApplicationKey.objects.filter(prefix=batch.key).first()
    if key is None:
        raise UnknownApplication("invalid_api_key", "the API key was revoked")
    return application_with(key, now)


def _errors_store(store: FileStore, batch: Batch, errors: Iterable[LineError], now: datetime) -> str:
    """Stores all errors of an input, of which the batch lists the first. Returns the ID of the file."""
    file_id = new_file_id()
    lines = (json.dumps({"custom_id": None, "response": None, "error": error.shown()}) for error in errors)
    written = _write_file(store, stored_name(file_id), (line.encode() + b"\n" for line in lines))
    StoredFile.objects.create(
        id=file_id,
        tenant=batch.tenant,
        key=batch.key,
        filename=f"{batch.id}_error.jsonl",
        purpose=FilePurpose.BATCH_OUTPUT.value,
        bytes=written.bytes,
        sha256=written.sha256,
        created_at=now,
        expires_at=now + timedelta(seconds=batch.output_kept_s or file_settings().kept_s),
    )
    return file_id


def _fail_batch(
    ours: "QuerySet[Batch]",
    batch: Batch,
    errors: list[LineError],
    error_file_id: str,
    now: datetime,
    models: dict[str, int] | None = None,
) -> bool:
    known = {"lines_by_model": models} if models else {}
    with transaction.atomic():
        moved = batch_move(
            ours,
            start=BatchState.VALIDATING,
            to=BatchState.FAILED,
            now=now,
            errors=[error.shown() for error in errors],
            error_file_id=error_file_id,
            **known,
        )
        if moved:
            batch.ranges.all().delete()
            batch.shards.all().delete()
    if moved:
        file_store().delete_folder(f"{BATCHES}/{batch.id}")
    return moved > 0
