"""Merges the outcomes of a batch into its output and error files. Files, counts and state are written in one
transaction; every line has one outcome, even if it was sent twice. A long batch is merged in parts, after each of which
the progress is stored, so a killed process costs one part."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from time import monotonic

from django.db import transaction
from django.db.models import QuerySet

from traffic.batches.models import Batch, BatchRange, BatchShard, StoredFile, new_file_id
from traffic.batches.planning.batch import BatchSettings, BatchState, LineError, Merged, merged_from
from traffic.batches.planning.lines import CANCELLED, EXPIRED, LOST, Outcome, error_key, sent_body, unsent_outcome
from traffic.batches.services.batch import BATCHES, batch_move
from traffic.batches.services.ranges import range_outcomes, work_name
from traffic.batches.services.tenant_objects import UnusableObject, results_copy
from traffic.files.planner import FilePurpose
from traffic.files.services.files import file_settings, stored_name
from traffic.files.services.store import FileStore, FileWriter, StoreAway, file_store, pieces

SUMMARIES = 3
"""Errors listed when every line failed, most frequent first."""
COPIES_TRIED = timedelta(hours=1)
"""After this time results stay only in the installation's store."""
UNSENT = {BatchState.CANCELLED: CANCELLED, BatchState.EXPIRED: EXPIRED, BatchState.COMPLETED: LOST}


def request_id(batch_id: str, number: int, position: int) -> str:
    return f"batch_req_{batch_id.removeprefix('batch_')}_{number}_{position}"


def batch_finish(*, batch: Batch, now: datetime, settings: BatchSettings) -> bool:
    """Ends a leased batch. Returns False if the lease was lost, or returned between two parts so that another batch has
    its turn. Raises StoreAway if the store is unavailable; another process retries after the lease."""
    state, store, merged = _end_of(batch), file_store(), merged_from(batch.merged)
    # If it was cancelled before all lines were valid, none has an outcome.
    ranges = BatchRange.objects.filter(batch=batch, batch__in_progress_at__isnull=False).order_by("number")
    is_long = ranges.count() > settings.part_ranges
    if is_long and not _merge_parts(store, batch, ranges, merged, UNSENT[state], settings):
        return False
    ids: dict[str, str] = {}
    results = _Writers(store, lambda kind: stored_name(ids.setdefault(kind, new_file_id())))
    try:
        if is_long:
            results.join(merged.parts)
        else:
            _merge(store, batch, ranges.iterator(chunk_size=500), merged, UNSENT[state], results)
        results.commit()
        files = [_stored_file(batch, kind, ids[kind], writer) for kind, (_, writer) in results.writers.items()]
        trouble = _copy_out(store, batch, files, now)
        with transaction.atomic():
            is_ours = _record_outcome(batch, state, merged, files, trouble, now)
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


def _merge_parts(
    store: FileStore,
    batch: Batch,
    ranges: "QuerySet[BatchRange]",
    merged: Merged,
    unsent_code: str,
    settings: BatchSettings,
) -> bool:
    """Merges the remaining ranges, and stores the progress after each part. Returns False as `batch_finish`."""
    began_s, ours = monotonic(), Batch.objects.filter(id=batch.id, fence=batch.fence)
    while some := list(ranges.filter(number__gte=merged.following)[: settings.part_ranges]):
        place = f"{BATCHES}/{batch.id}/part-{batch.fence:04d}-{merged.following:06d}"
        part = _Writers(store, lambda kind, place=place: f"{place}-{kind}")  # type: ignore[misc]
        try:
            _merge(store, batch, some, merged, unsent_code, part)
            part.commit()
        except BaseException:
            part.abort()
            raise
        for kind, (name, _) in part.writers.items():
            merged.parts.setdefault(kind, []).append(name)
        merged.following = some[-1].number + 1
        if not ours.update(merged=merged.as_json()):
            return False
        if monotonic() - began_s > settings.turn_s and ranges.filter(number__gte=merged.following).exists():
            ours.update(leased_until=None)
            return False
    return True


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
    merged: Merged,
    files: list[StoredFile],
    trouble: list[LineError],
    now: datetime,
) -> bool:
    kept_s = batch.output_kept_s or file_settings().kept_s
    for file in files:
        file.created_at, file.expires_at = now, now + timedelta(seconds=kept_s)
    StoredFile.objects.bulk_create(files)
    by_kind = {file.filename.rpartition("_")[2]: file.id for file in files}
    tally = merged.tally
    moved = batch_move(
        Batch.objects.filter(id=batch.id, fence=batch.fence),
        start=BatchState(batch.state),
        to=state,
        now=now,
        output_file_id=by_kind.get("output.jsonl", ""),
        error_file_id=by_kind.get("error.jsonl", ""),
        errors=[error.shown() for error in (*trouble, *_summary(merged))],
        completed=tally.completed,
        failed=tally.failed,
        input_tokens=tally.input_tokens,
        cached_tokens=tally.cached_tokens,
        output_tokens=tally.output_tokens,
        reasoning_tokens=tally.reasoning_tokens,
        merged={},
    )
    if moved:
        BatchRange.objects.filter(batch=batch).delete()
        BatchShard.objects.filter(batch=batch).delete()
    return moved > 0


def _stored_file(batch: Batch, kind: str, file_id: str, writer: FileWriter) -> StoredFile:
    return StoredFile(
        id=file_id,
        tenant=batch.tenant,
        key=batch.key,
        filename=f"{batch.id}_{kind}.jsonl",
        purpose=FilePurpose.BATCH_OUTPUT.value,
        bytes=writer.bytes,
        sha256=writer.sha256,
    )


def _merge(
    store: FileStore,
    batch: Batch,
    ranges: Iterable[BatchRange],
    merged: Merged,
    unsent_code: str,
    results: "_Writers",
) -> None:
    """Writes every line of these ranges and counts it; lines without an outcome as never sent."""
    for part in ranges:
        for outcome in _outcomes(store, batch, part, unsent_code):
            results.write("output" if outcome.is_output else "error", outcome.text + b"\n")
            merged.tally = merged.tally.plus(outcome.tally)
            if not outcome.is_output:
                merged.count_error(error_key(outcome.text))


def _outcomes(store: FileStore, batch: Batch, part: BatchRange, unsent_code: str) -> Iterator[Outcome]:
    seen: set[int] = set()
    for outcome in range_outcomes(store, batch.id, part.number, part.fence):
        seen.add(outcome.position)
        yield outcome
    if len(seen) == part.lines:
        return
    lines = store.read(work_name(batch.id, part.work), part.start, part.end).split(b"\n")[:-1]
    for position, line in enumerate(lines):
        if position not in seen:
            custom_id, _ = sent_body(line)
            yield unsent_outcome(position, request_id(batch.id, part.number, position), custom_id, unsent_code)


def _summary(merged: Merged) -> list[LineError]:
    """Returns error counts if there is no output; otherwise the error file has them."""
    tally = merged.tally
    if tally.completed or not tally.failed:
        return []
    frequent = merged.errors.most_common(SUMMARIES)
    return [LineError(code, f"{count} of {tally.failed} lines: {message}") for (code, message), count in frequent]


@dataclass
class _Writers:
    """Files by kind of result, each started with its first line."""

    store: FileStore
    name_of: Callable[[str], str]
    writers: dict[str, tuple[str, FileWriter]] = field(default_factory=dict)

    def write(self, kind: str, piece: bytes) -> None:
        if kind not in self.writers:
            name = self.name_of(kind)
            self.writers[kind] = (name, self.store.write(name))
        self.writers[kind][1].write(piece)

    def join(self, parts: Mapping[str, Iterable[str]]) -> None:
        for kind, names in parts.items():
            for name in names:
                with self.store.open(name) as file:
                    for piece in pieces(file):
                        self.write(kind, piece)

    def commit(self) -> None:
        for _, writer in self.writers.values():
            writer.commit()

    def abort(self) -> None:
        for name, writer in self.writers.values():
            writer.abort()
            self.store.delete(name)
