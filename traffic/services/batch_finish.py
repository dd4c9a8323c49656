"""Gathers the outcomes of a batch's ranges into its output and error files, and ends it: files, counts and state in one
transaction, so that nobody sees one without the others. Every line comes once, whatever was sent twice."""

from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from django.db import transaction

from traffic.models import Batch, BatchRange, StoredFile
from traffic.models.batch import new_file_id
from traffic.planning.batch import BatchState, LineError, Tally
from traffic.planning.batch_lines import sent_body
from traffic.planning.batch_outcome import CANCELLED, EXPIRED, LOST, error_key, unsent_outcome
from traffic.planning.stored_file import FilePurpose
from traffic.services.batch import BATCHES, batch_move
from traffic.services.batch_lease import range_outcomes, work_name
from traffic.services.batch_object import UnusableObject, results_copy
from traffic.services.file_store import FileStore, FileWriter, StoreAway, file_store
from traffic.services.stored_file import file_settings, stored_name

SUMMARIES = 3
"""Of errors, the most frequent first, where every line failed."""
COPIES_TRIED = timedelta(hours=1)
"""How long a batch waits for the place of its results; then they are here alone."""
UNSENT = {BatchState.CANCELLED: CANCELLED, BatchState.EXPIRED: EXPIRED, BatchState.COMPLETED: LOST}
MOST_KINDS = 1000
"""Of errors that are told apart."""


def request_id(batch_id: str, number: int, position: int) -> str:
    """The id of a line in the results, and of its requests."""
    return f"batch_req_{batch_id.removeprefix('batch_')}_{number}_{position}"


def batch_finish(*, batch: Batch, now: datetime) -> bool:
    """End a leased batch. Returns whether it was ours to end.

    Raises:
        StoreAway: the store cannot be used; another process tries again once the lease has ended.
    """
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
            is_ours = _note(batch, state, results, files, trouble, now)
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
    """Write the results where the tenant wants them, too. What cannot be written there is said, and is read from here.

    Raises:
        StoreAway: S3 does not answer now; it is tried again for so long.
    """
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


def _note(
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
    """The two files, begun with their first line; a kind without lines has none."""

    store: FileStore
    batch: Batch
    tally: Tally = field(default_factory=Tally)
    errors: Counter[tuple[str, str]] = field(default_factory=Counter)
    writers: dict[str, tuple[str, FileWriter]] = field(default_factory=dict)

    def gather(self, part: BatchRange, unsent_code: str) -> None:
        """Every line of a range, those without an outcome as never sent."""
        seen: set[int] = set()
        for outcome in range_outcomes(self.store, self.batch.id, part.number, part.fence):
            seen.add(outcome.position)
            self._add(outcome.text, outcome.tally, is_output=outcome.is_output)
        if len(seen) == part.lines:
            return
        lines = self.store.read(work_name(self.batch.id, self.batch.work_fence), part.start, part.end).split(b"\n")[:-1]
        for position, line in enumerate(lines):
            if position not in seen:
                custom_id, _ = sent_body(line)
                id = request_id(self.batch.id, part.number, position)
                outcome = unsent_outcome(position, id, custom_id, unsent_code)
                self._add(outcome.text, outcome.tally, is_output=False)

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
        """Why there is no output at all; where there is some, the error file says it line by line."""
        if self.tally.completed or not self.tally.failed:
            return []
        frequent = self.errors.most_common(SUMMARIES)
        return [
            LineError(code, f"{count} of {self.tally.failed} lines: {message}") for (code, message), count in frequent
        ]

    def _add(self, text: bytes, tally: Tally, *, is_output: bool) -> None:
        self._writer("output" if is_output else "error").write(text + b"\n")
        self.tally = self.tally.plus(tally)
        if not is_output:
            key = error_key(text)
            if key in self.errors or len(self.errors) < MOST_KINDS:
                self.errors[key] += 1

    def _writer(self, kind: str) -> FileWriter:
        if kind not in self.writers:
            file_id = new_file_id()
            self.writers[kind] = (file_id, self.store.write(stored_name(file_id)))
        return self.writers[kind][1]
