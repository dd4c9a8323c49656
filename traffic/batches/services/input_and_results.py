"""Validates inputs, writes work files, and merges outcomes into output and error files. Validation orders the lines and
cuts them into ranges of a work file, which replaces the input from then on. The end writes files, counts and state in
one transaction; every line has one outcome, even if it was sent twice.

Inputs and results may be objects in a tenant's bucket: grants are checked each time, an input is read whole in one
version before it is used, and a result never replaces an object."""

import io
import secrets
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import BinaryIO, cast

from django.db import transaction
from django.db.models import QuerySet

from fleet.clouds.aws.calls import CallFailed, Refused
from fleet.clouds.aws.objects import ObjectChanged, ObjectReader, ObjectWriter, OtherObject
from traffic.async_requests.services.intake import serving_region_check
from traffic.batches.models import Batch, BatchRange, StoredFile, new_file_id
from traffic.batches.planning.batch import BatchSettings, BatchState, LineError, Tally
from traffic.batches.planning.lines import CANCELLED, EXPIRED, LOST, LineIndex, error_key, sent_body, unsent_outcome
from traffic.batches.services.batch import BATCHES, batch_move
from traffic.batches.services.ranges import range_outcomes, work_name
from traffic.files.planner import FilePurpose
from traffic.files.services.files import file_settings, stored_name
from traffic.files.services.store import (
    GONE,
    READ_BYTES,
    FileStore,
    FileWriter,
    NoSuchFile,
    StoreAway,
    file_store,
    pieces,
    spooled,
    store_error_text,
)
from traffic.keys.models import ApplicationKey
from traffic.tenants.models import GrantUse, TenantGrant
from traffic.tenants.planner import ApplicationRefused, ObjectUri, parse_object_uri
from traffic.tenants.selectors import Application, UnknownApplication, application_with, place_grant_for, place_refusal

JSONL = "application/jsonl"


class UnusableObject(Exception):
    """An input that cannot be read, or results that cannot be written, permanently."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code

    def error(self, param: str) -> LineError:
        return LineError(self.code, str(self), None, f"switchyard.{param}")


@dataclass(frozen=True, slots=True)
class PinnedInput:
    """The content of an input on local disk, and its version in S3."""

    file: BinaryIO
    etag: str


def input_fetch(batch: Batch, most: int) -> PinnedInput:
    """Downloads a batch's object of limited size. Raises UnusableObject if it is missing, too long, not granted, or was
    replaced meanwhile. Raises StoreAway if S3 does not respond, or the disk is full."""
    place, grant = _granted_place(batch, batch.input_uri, GrantUse.READ)
    with _explain_errors(place), ObjectReader(grant.region, place.bucket, place.key) as reader:
        if reader.size > most:
            raise UnusableObject("file_too_large", f"{place} has {reader.size} bytes; an input may have {most}")
        copy = spooled(cast("BinaryIO", io.BufferedReader(reader, READ_BYTES)))
        return PinnedInput(copy, reader.etag.strip('"')[:128])


def results_copy(batch: Batch, store: FileStore, name: str, filename: str) -> None:
    """Copies a file of the store to the batch's output address. An existing object with the same content is accepted:
    it is from an attempt that was interrupted. Raises UnusableObject if it cannot be written, or another object has
    that name. Raises StoreAway if S3 does not respond."""
    place, grant = _granted_place(batch, batch.output_uri, GrantUse.WRITE)
    target = place.below(filename)
    with store.open(name) as file, _explain_errors(target):
        writer = ObjectWriter(grant.region, target.bucket, target.key, kind=JSONL)
        try:
            for piece in pieces(file):
                writer.write(piece)
            writer.commit()
        finally:
            writer.abort()


def _granted_place(batch: Batch, uri: str, use: GrantUse) -> tuple[ObjectUri, TenantGrant]:
    place = parse_object_uri(uri)
    grant = place_grant_for(batch.tenant, place, use)
    if grant is None:
        raise UnusableObject("place_not_allowed", place_refusal(batch.tenant, place, use))
    return place, grant


@contextmanager
def _explain_errors(place: ObjectUri) -> Iterator[None]:
    try:
        yield
    except Refused as refused:
        if refused.is_for_now:
            raise StoreAway(f"{place}: {store_error_text(refused)}") from refused
        code = "object_not_found" if refused.code in GONE else "object_not_accessible"
        problem = "there is no such object" if refused.code in GONE else store_error_text(refused)
        raise UnusableObject(code, f"{place}: {problem}") from refused
    except ObjectChanged as changed:
        raise UnusableObject(
            "object_changed", f"{changed}; do not change it until the batch is in progress"
        ) from changed
    except OtherObject as other:
        raise UnusableObject("object_exists", str(other)) from other
    except CallFailed as failed:
        raise StoreAway(f"{place}: {store_error_text(failed)}") from failed


RANGE_ROWS = 1000


@dataclass(frozen=True, slots=True)
class LineRange:
    """Consecutive lines of a work file, by bytes."""

    start: int
    end: int
    lines: int


def batch_validate(*, batch: Batch, now: datetime, settings: BatchSettings) -> bool:
    """Starts a batch, or fails it with its errors. Returns False if the batch was cancelled or the lease was lost.
    Raises StoreAway if the store is unavailable; another process retries after the lease."""
    store = file_store()
    ours = Batch.objects.filter(id=batch.id, fence=batch.fence)
    if batch.validations > settings.max_validations:
        message = f"The input could not be validated in {settings.max_validations} attempts."
        return _fail_batch(ours, [LineError("validation_failed", message)], "", now)
    etag = ""
    try:
        pinned = _pinned_input(store, batch)
        with pinned.file as file:
            errors, model, ranges = _start_batch(store, file, batch, now, settings)
        etag = pinned.etag
    except NoSuchFile:
        errors, model, ranges = [LineError("file_not_found", "The input file was deleted.")], "", []
    except UnusableObject as unusable:
        errors, model, ranges = [unusable.error("input_uri")], "", []
    if errors:
        return _fail_batch(ours, errors, model, now)
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


def _fail_batch(ours: "QuerySet[Batch]", errors: list[LineError], model: str, now: datetime) -> bool:
    shown = [error.shown() for error in errors]
    moved = batch_move(
        ours, start=BatchState.VALIDATING, to=BatchState.FAILED, now=now, errors=shown, model=model[:200]
    )  # fmt: skip
    return moved > 0


def _pinned_input(store: FileStore, batch: Batch) -> PinnedInput:
    if batch.input_uri:
        return input_fetch(batch, file_settings().max_bytes)
    return PinnedInput(store.local(stored_name(batch.input_file_id)), "")


def _start_batch(
    store: FileStore, file: BinaryIO, batch: Batch, now: datetime, settings: BatchSettings
) -> tuple[list[LineError], str, list[LineRange]]:
    index = file_index(file, batch.endpoint, settings)
    if index.errors:
        return index.errors, index.model, []
    try:
        serving_region_check(_batch_application(batch, now), batch.region_id, index.model)
    except ApplicationRefused as refusal:
        return [LineError(refusal.code or "invalid_value", str(refusal), None, "body.model")], index.model, []
    return [], index.model, work_write(store, file, index, work_name(batch.id, batch.fence), settings)


def file_index(file: BinaryIO, endpoint: str, settings: BatchSettings) -> LineIndex:
    index = LineIndex(endpoint=endpoint, salt=secrets.token_bytes(16), settings=settings)
    for start, text in bounded_lines(file, settings.max_line_bytes):
        index.add(text, start)
    index.finish()
    return index


def bounded_lines(file: BinaryIO, most: int) -> Iterator[tuple[int, bytes]]:
    """Yields each line's first byte and its text without the line end, cut one byte after `most`."""
    start = 0
    while text := file.readline(most + 2):
        yield start, text.rstrip(b"\r\n")
        start += len(text)
        while text and not text.endswith(b"\n") and (text := file.readline(most)):
            start += len(text)


def work_write(
    store: FileStore, file: BinaryIO, index: LineIndex, name: str, settings: BatchSettings
) -> list[LineRange]:
    """Writes the lines in sending order."""
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


def _batch_application(batch: Batch, now: datetime) -> Application:
    if not batch.key:
        return Application(tenant=batch.tenant)
    key = ApplicationKey.objects.filter(prefix=batch.key).first()
    if key is None:
        raise UnknownApplication("invalid_api_key", "the API key was revoked")
    return application_with(key, now)


SUMMARIES = 3
"""Errors listed when every line failed, most frequent first."""
COPIES_TRIED = timedelta(hours=1)
"""After this time results stay only in the installation's store."""
UNSENT = {BatchState.CANCELLED: CANCELLED, BatchState.EXPIRED: EXPIRED, BatchState.COMPLETED: LOST}
MOST_KINDS = 1000
"""Distinct errors that are counted."""


def request_id(batch_id: str, number: int, position: int) -> str:
    return f"batch_req_{batch_id.removeprefix('batch_')}_{number}_{position}"


def batch_finish(*, batch: Batch, now: datetime) -> bool:
    """Ends a leased batch. Returns False if the lease was lost. Raises StoreAway if the store is unavailable; another
    process retries after the lease."""
    state = _end_of(batch)
    store = file_store()
    results = _Results(store, batch)
    try:
        ranges = BatchRange.objects.filter(batch=batch).order_by("number")
        for part in ranges.iterator(chunk_size=500):
            results.gather(part, UNSENT[state])
        files = results.commit()
        trouble = _copy_out(store, batch, files, now)
        with transaction.atomic():
            is_ours = _record_outcome(batch, state, results, files, trouble, now)
            if not is_ours:
                transaction.set_rollback(True)
    except BaseException:
        results.abort()
        raise
    if is_ours:
        store.delete_folder(f"{BATCHES}/{batch.id}")
    else:
        for file in files:
            store.delete(stored_name(file.id))
    return is_ours


def _end_of(batch: Batch) -> BatchState:
    if batch.state == BatchState.CANCELLING.value:
        return BatchState.CANCELLED
    return BatchState.EXPIRED if batch.expired else BatchState.COMPLETED


def _copy_out(store: FileStore, batch: Batch, files: list[StoredFile], now: datetime) -> list[LineError]:
    """Also writes the results to the tenant's address. A permanent failure is recorded in the batch; the results then
    stay in the installation's store. Raises StoreAway if S3 does not respond; that is retried for `COPIES_TRIED`."""
    if not batch.output_uri:
        return []
    try:
        for file in files:
            results_copy(batch, store, stored_name(file.id), file.filename)
    except UnusableObject as unusable:
        return [unusable.error("output_uri")]
    except StoreAway as away:
        since = batch.finalizing_at or batch.cancelling_at or now
        if now - since < COPIES_TRIED:
            raise
        return [LineError("object_not_accessible", str(away), None, "switchyard.output_uri")]
    return []


def _record_outcome(
    batch: Batch,
    state: BatchState,
    results: "_Results",
    files: list[StoredFile],
    trouble: list[LineError],
    now: datetime,
) -> bool:
    kept_s = batch.output_kept_s or file_settings().kept_s
    for file in files:
        file.created_at, file.expires_at = now, now + timedelta(seconds=kept_s)
    StoredFile.objects.bulk_create(files)
    by_kind = {file.filename.rpartition("_")[2]: file.id for file in files}
    tally = results.tally
    moved = batch_move(
        Batch.objects.filter(id=batch.id, fence=batch.fence),
        start=BatchState(batch.state),
        to=state,
        now=now,
        output_file_id=by_kind.get("output.jsonl", ""),
        error_file_id=by_kind.get("error.jsonl", ""),
        errors=[error.shown() for error in (*trouble, *results.summary())],
        completed=tally.completed,
        failed=tally.failed,
        input_tokens=tally.input_tokens,
        cached_tokens=tally.cached_tokens,
        output_tokens=tally.output_tokens,
        reasoning_tokens=tally.reasoning_tokens,
    )
    if moved:
        BatchRange.objects.filter(batch=batch).delete()
    return moved > 0


@dataclass
class _Results:
    store: FileStore
    batch: Batch
    tally: Tally = field(default_factory=Tally)
    errors: Counter[tuple[str, str]] = field(default_factory=Counter)
    writers: dict[str, tuple[str, FileWriter]] = field(default_factory=dict)

    def gather(self, part: BatchRange, unsent_code: str) -> None:
        """Yields every line of a range; those without an outcome as never sent."""
        seen: set[int] = set()
        for outcome in range_outcomes(self.store, self.batch.id, part.number, part.fence):
            seen.add(outcome.position)
            self._add_line(outcome.text, outcome.tally, is_output=outcome.is_output)
        if len(seen) == part.lines:
            return
        lines = self.store.read(work_name(self.batch.id, self.batch.work_fence), part.start, part.end).split(b"\n")[:-1]
        for position, line in enumerate(lines):
            if position not in seen:
                custom_id, _ = sent_body(line)
                id = request_id(self.batch.id, part.number, position)
                outcome = unsent_outcome(position, id, custom_id, unsent_code)
                self._add_line(outcome.text, outcome.tally, is_output=False)

    def commit(self) -> list[StoredFile]:
        files = []
        for kind, (file_id, writer) in self.writers.items():
            writer.commit()
            files.append(
                StoredFile(
                    id=file_id,
                    tenant=self.batch.tenant,
                    key=self.batch.key,
                    filename=f"{self.batch.id}_{kind}.jsonl",
                    purpose=FilePurpose.BATCH_OUTPUT.value,
                    bytes=writer.bytes,
                    sha256=writer.sha256,
                )
            )
        return files

    def abort(self) -> None:
        for file_id, writer in self.writers.values():
            writer.abort()
            self.store.delete(stored_name(file_id))

    def summary(self) -> list[LineError]:
        """Returns error counts if there is no output; otherwise the error file has them."""
        if self.tally.completed or not self.tally.failed:
            return []
        frequent = self.errors.most_common(SUMMARIES)
        return [
            LineError(code, f"{count} of {self.tally.failed} lines: {message}") for (code, message), count in frequent
        ]

    def _add_line(self, text: bytes, tally: Tally, *, is_output: bool) -> None:
        self._result_writer("output" if is_output else "error").write(text + b"\n")
        self.tally = self.tally.plus(tally)
        if not is_output:
            key = error_key(text)
            if key in self.errors or len(self.errors) < MOST_KINDS:
                self.errors[key] += 1

    def _result_writer(self, kind: str) -> FileWriter:
        if kind not in self.writers:
            file_id = new_file_id()
            self.writers[kind] = (file_id, self.store.write(stored_name(file_id)))
        return self.writers[kind][1]
