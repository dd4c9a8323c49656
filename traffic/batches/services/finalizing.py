"""Merges the outcomes of a batch into its output and error files. Files, counts and state are written in one
transaction; every line has one outcome, even if it was sent twice."""

from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from django.db import transaction

from traffic.batches.models import Batch, BatchRange, BatchShard, StoredFile, new_file_id
from traffic.batches.planning.batch import BatchState, LineError, Tally
from traffic.batches.planning.lines import CANCELLED, EXPIRED, LOST, error_key, sent_body, unsent_outcome
from traffic.batches.services.batch import BATCHES, batch_move
from traffic.batches.services.ranges import range_outcomes, work_name
from traffic.batches.services.tenant_objects import UnusableObject, results_copy
from traffic.files.planner import FilePurpose
from traffic.files.services.files import file_settings, stored_name
from traffic.files.services.store import FileStore, FileWriter, StoreAway, file_store

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
        # If it was cancelled before all lines were valid, none has an outcome.
        begun = BatchRange.objects.filter(batch=batch, batch__in_progress_at__isnull=False)
        ranges = begun.order_by("number")
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
        BatchShard.objects.filter(batch=batch).delete()
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
        lines = self.store.read(work_name(self.batch.id, part.work), part.start, part.end).split(b"\n")[:-1]
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
