"""Leases batches for validating and finalizing, and ranges of lines for sending. Each step is one statement or
transaction: if a process dies between two, another continues after the lease. Each lease on a range has a number
(`fence`) and its own journal, so a process that lost its lease cannot overwrite anything; the first outcome of a line
counts."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db import transaction
from django.db.models import Exists, F, OuterRef, Q

from traffic.batches.models import Batch, BatchRange
from traffic.batches.planning.batch import MERGING, BatchSettings, BatchState
from traffic.batches.planning.lines import Outcome, journal_outcomes
from traffic.batches.selectors import served_as
from traffic.batches.services.batch import BATCHES
from traffic.files.services.store import FileStore


@dataclass(frozen=True, slots=True)
class LeasedRange:
    id: int
    batch: str
    tenant: str
    key: str
    work: str
    region: str
    endpoint: str
    model: str
    serving_class: str
    number: int
    fence: int
    start: int
    end: int
    lines: int
    expires_at: datetime

    @property
    def target(self) -> str:
        """The model and region that may be overloaded."""
        return f"{self.region} {self.model}"


def batch_chore_claim(*, now: datetime, settings: BatchSettings) -> Batch | None:
    """Leases the batch whose last turn is longest ago to be validated or finalized, or returns None. A batch is
    finalized only when no range is leased; cancelled senders release theirs within a lease."""
    sending = BatchRange.objects.filter(batch=OuterRef("pk"), leased_until__gt=now)
    free = Q(leased_until=None) | Q(leased_until__lte=now)
    merging = Q(state__in=[state.value for state in MERGING]) & ~Exists(sending)
    due = Batch.objects.filter(free, merging | Q(state=BatchState.VALIDATING.value))
    with transaction.atomic():
        batch = (
            due.select_for_update(skip_locked=True, of=("self",))
            .order_by(F("turn_at").asc(nulls_first=True), "created_at")
            .first()
        )
        if batch is not None:
            batch.fence += 1
            batch.turn_at = now
            batch.leased_until = now + timedelta(seconds=settings.lease_s)
            batch.validations += batch.state == BatchState.VALIDATING.value
            batch.save(update_fields=["fence", "turn_at", "leased_until", "validations"])
    return batch


def batch_validation_uncount(*, batch: Batch) -> None:
    """Does not count the attempt under this lease, because a dependency was unavailable."""
    rows = Batch.objects.filter(id=batch.id, fence=batch.fence, validations__gt=0)
    rows.update(validations=F("validations") - 1)


def batch_chore_renew(*, batch: Batch, now: datetime, settings: BatchSettings) -> bool:
    """Renews the lease. Returns False if it was lost."""
    until = now + timedelta(seconds=settings.lease_s)
    rows = Batch.objects.filter(id=batch.id, fence=batch.fence, leased_until__isnull=False)
    return rows.update(leased_until=until) > 0


def batch_chore_release(*, batch: Batch) -> bool:
    batch_validation_uncount(batch=batch)
    return Batch.objects.filter(id=batch.id, fence=batch.fence).update(leased_until=None) > 0


def range_claim(*, batch_id: str, model: str, now: datetime, settings: BatchSettings) -> LeasedRange | None:
    """Leases the next lines of a model of a batch, or returns None."""
    free = Q(leased_until=None) | Q(leased_until__lte=now)
    rows = BatchRange.objects.filter(
        free, batch=batch_id, model=model, batch__state=BatchState.IN_PROGRESS.value, done=False
    )
    with transaction.atomic():
        locked = rows.select_for_update(skip_locked=True, of=("self",)).select_related("batch")
        part = locked.order_by("number").first()
        if part is None:
            return None
        part.fence += 1
        part.leased_until = now + timedelta(seconds=settings.lease_s)
        part.save(update_fields=["fence", "leased_until"])
    batch = part.batch
    return LeasedRange(
        id=part.pk,
        batch=batch.id,
        tenant=batch.tenant,
        key=batch.key,
        work=work_name(batch.id, part.work),
        region=batch.region_id,
        endpoint=batch.endpoint,
        model=part.model,
        serving_class=served_as(batch).value,
        number=part.number,
        fence=part.fence,
        start=part.start,
        end=part.end,
        lines=part.lines,
        expires_at=batch.expires_at,
    )


def ranges_renew(
    *, counts: Iterable[tuple[LeasedRange, int, int]], now: datetime, settings: BatchSettings
) -> set[LeasedRange]:
    """Renews these leases and records completed and failed lines. Returns those that still hold; the batches of the
    others were cancelled or expired, or their leases were lost."""
    until = now + timedelta(seconds=settings.lease_s)
    running = Batch.objects.filter(id=OuterRef("batch"), state=BatchState.IN_PROGRESS.value)
    kept = set()
    for leased, completed, failed in counts:
        ours = BatchRange.objects.filter(Exists(running), pk=leased.id, fence=leased.fence, done=False)
        if ours.update(leased_until=until, completed=completed, failed=failed):
            kept.add(leased)
    return kept


def range_finish(*, leased: LeasedRange, completed: int, failed: int) -> bool:
    """Marks the range as done: a journal has an outcome for each line. Returns False if the lease was lost."""
    ours = BatchRange.objects.filter(pk=leased.id, fence=leased.fence, done=False)
    return ours.update(done=True, leased_until=None, completed=completed, failed=failed) > 0


def range_release(*, leased: LeasedRange, counts: tuple[int, int] | None) -> bool:
    """Releases unfinished work for other processes. `counts` are the completed and failed lines, if known."""
    ours = BatchRange.objects.filter(pk=leased.id, fence=leased.fence, done=False)
    known = dict(zip(("completed", "failed"), counts, strict=True)) if counts else {}
    return ours.update(leased_until=None, **known) > 0


def work_of(shard: int, fence: int) -> str:
    """Returns the part of a work file's name that a range states: each lease writes its own files."""
    return f"{shard:05d}-{fence:04d}"


def work_name(batch_id: str, work: str) -> str:
    return f"{BATCHES}/{batch_id}/work-{work}"


def ids_name(batch_id: str, work: str) -> str:
    return f"{BATCHES}/{batch_id}/ids-{work}"


def journal_name(batch_id: str, number: int, fence: int) -> str:
    return f"{BATCHES}/{batch_id}/{number:06d}.{fence:04d}"


def range_outcomes(store: FileStore, batch_id: str, number: int, fences: int) -> Iterator[Outcome]:
    """Returns one outcome per line from all journals of a range."""
    seen: set[int] = set()
    for fence in range(1, fences + 1):
        for outcome in journal_outcomes(store.journal(journal_name(batch_id, number, fence))):
            if outcome.position not in seen:
                seen.add(outcome.position)
                yield outcome
