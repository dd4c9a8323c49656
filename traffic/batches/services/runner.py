"""Runs open batches: `BatchChores` validates and finalizes them, and `BatchSender` sends ranges of lines through their
region's ingress and writes the outcomes to journals. `batches.planning` decides the order of batches, the size of
windows and the meaning of answers."""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Collection
from contextlib import suppress
from datetime import datetime
from functools import partial
from heapq import heappop, heappush
from time import monotonic

from django.db import DatabaseError, InterfaceError, OperationalError

from kernel import clock
from kernel.lease_loop import DATABASE_PAUSE_S, LeaseLoop, in_thread
from kernel.metrics import BATCH_LINES
from traffic.async_requests.planner import AsyncSettings, AsyncState, AttemptResponse, evaluate_attempt
from traffic.async_requests.selectors import ingress_addresses_by_region
from traffic.batches.models import Batch
from traffic.batches.planning.batch import BatchSettings, BatchState, plan_order
from traffic.batches.planning.lines import Outcome, journal_line, outcome_of, sent_body
from traffic.batches.planning.pacing import LOOK_EVERY_S, BatchWindow, lines_at_once
from traffic.batches.selectors import batch_jobs, batch_loads, ready_cells
from traffic.batches.services.batch import (
    batch_fail_lost,
    batch_settings,
    batches_advance,
    batches_open,
    batches_pace,
    batches_sample,
)
from traffic.batches.services.finalizing import batch_finish, request_id
from traffic.batches.services.ranges import (
    LeasedRange,
    batch_chore_claim,
    batch_chore_release,
    batch_chore_renew,
    batch_validation_uncount,
    journal_name,
    range_claim,
    range_finish,
    range_outcomes,
    range_release,
    ranges_renew,
)
from traffic.batches.services.validation import batch_validate
from traffic.files.services.store import FileStore, NoSuchFile, StoreAway, file_store
from traffic.routing.planning.tables import IngressAddress
from traffic.routing.services.ingress_client import AcceptedRequest, accepted_request_send

ATTEMPT_S = 3600.0
"""Limit of one attempt of a line, including queueing."""
PACE_EVERY_S = 10.0
AHEAD = 2
"""Ranges leased per model, so that the next is loaded when one ends."""

log = logging.getLogger(__name__)


class BatchChores(LeaseLoop[Batch]):
    """Validates and finalizes one batch at a time. Threads cannot be cancelled; after a lost lease, the lease number
    prevents writes."""

    name = "traffic.batches"

    def __init__(self, settings: BatchSettings | None = None, now: Callable[[], datetime] = clock.now) -> None:
        self._settings = settings or batch_settings()
        super().__init__(self._settings, now)

    def is_open(self, now: datetime) -> bool:
        return batches_open()

    def claim(self, now: datetime) -> list[Batch]:
        batches_advance(now=now)
        batch = None if self.running else batch_chore_claim(now=now, settings=self._settings)
        return [batch] if batch is not None else []

    def renew(self, leases: Collection[Batch], now: datetime) -> Collection[Batch]:
        for batch in leases:
            batch_chore_renew(batch=batch, now=now, settings=self._settings)
        return leases

    def release(self, leased: Batch, now: datetime) -> None:
        batch_chore_release(batch=leased)

    async def work(self, leased: Batch) -> None:
        now = self._now()
        chore = batch_validate if leased.state == BatchState.VALIDATING.value else batch_finish
        try:
            await in_thread(partial(chore, batch=leased, now=now, settings=self._settings), is_long=True)
        except NoSuchFile:
            log.error("the files of batch %s are lost", leased.id)
            await in_thread(partial(batch_fail_lost, batch=leased, now=self._now()))
        except (OperationalError, InterfaceError, StoreAway) as error:
            log.warning("batch %s stays %s until a retry: %s", leased.id, leased.state, error)
            with suppress(DatabaseError):
                await in_thread(partial(batch_validation_uncount, batch=leased))


class BatchSender(LeaseLoop[LeasedRange]):
    name = "traffic.batch_ranges"

    def __init__(self, settings: BatchSettings | None = None, now: Callable[[], datetime] = clock.now) -> None:
        self._settings = settings or batch_settings()
        super().__init__(self._settings, now)
        self._verdicts = AsyncSettings(
            first_retry_s=self._settings.first_retry_s,
            longest_retry_s=self._settings.longest_retry_s,
            max_failures=self._settings.max_failures,
        )
        self._store = file_store()
        self._write_every_s = max(self._settings.sync_every_s, self._store.sync_every_s)
        self._ranges: dict[LeasedRange, RangeWork] = {}
        self._windows: dict[str, BatchWindow] = {}
        self._addresses: dict[str, list[IngressAddress]] = {}
        self._steered_at_s = 0.0
        self._paced_at_s = 0.0
        self._has_room = asyncio.Event()

    async def run(self, stopping: asyncio.Event) -> None:
        sending = asyncio.create_task(self._keep_sending())
        await super().run(stopping)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)

    def is_open(self, now: datetime) -> bool:
        return batches_open()

    def claim(self, now: datetime) -> list[LeasedRange]:
        """Leases ranges for models that have too few."""
        self._note_progress(now)
        self._addresses = ingress_addresses_by_region()
        ours = list(self.running)
        held = Counter(leased.target for leased in ours)
        free = self._settings.ranges_at_once - len(ours)
        claimed = self._claim_ranges(now, held, free) if free > 0 else []
        is_steering = monotonic() - self._steered_at_s >= LOOK_EVERY_S
        self._limit_windows({leased.target for leased in ([*ours, *claimed] if is_steering else claimed)}, now)
        if is_steering:
            self._steered_at_s = monotonic()
        return claimed

    def renew(self, leases: Collection[LeasedRange], now: datetime) -> set[LeasedRange]:
        """A range that is still loading is not renewed, so a store slower than a lease loses it."""
        counts = [(leased, *self._ranges[leased].counts) for leased in leases if leased in self._ranges]
        reading = set(leases) - {leased for leased, *_ in counts}
        return reading | ranges_renew(counts=counts, now=now, settings=self._settings)

    def release(self, leased: LeasedRange, now: datetime) -> None:
        work = self._ranges.pop(leased, None)
        range_release(leased=leased, counts=work.counts if work else None)

    async def work(self, leased: LeasedRange) -> None:
        try:
            self._ranges[leased] = work = await asyncio.to_thread(self._load_range, leased)
            self._has_room.set()
            try:
                await work.write_until_done(self._write_every_s)
            finally:
                await work.close()
            completed, failed = self._ranges.pop(leased).counts
            await in_thread(partial(range_finish, leased=leased, completed=completed, failed=failed))
        except NoSuchFile:
            log.error("the work file of batch %s is lost", leased.batch)
            await in_thread(partial(self._fail_lost_batch, leased.batch))
        except StoreAway as away:
            log.warning("a range of batch %s waits for the store: %s", leased.batch, away)
            await asyncio.sleep(DATABASE_PAUSE_S)
            await in_thread(partial(self.release, leased, self._now()))

    def _load_range(self, leased: LeasedRange) -> "RangeWork":
        text = self._store.read(leased.work, leased.start, leased.end)
        earlier = range_outcomes(self._store, leased.batch, leased.number, leased.fence - 1)
        known = {outcome.position: outcome.is_output for outcome in earlier}
        return RangeWork(leased, text.split(b"\n")[:-1], known, self._store)

    def _fail_lost_batch(self, batch_id: str) -> None:
        batch_fail_lost(batch=Batch.objects.get(id=batch_id), now=self._now())

    def _claim_ranges(self, now: datetime, held: Counter[str], free: int) -> list[LeasedRange]:
        claimed: list[LeasedRange] = []
        for job in plan_order(batch_jobs(now, self._answer_rates()), now):
            if held[job.target] >= AHEAD or len(claimed) >= free:
                continue
            claim = range_claim(batch_id=job.id, model=job.model, now=now, settings=self._settings)
            if claim is not None:
                claimed.append(claim)
                held[job.target] += 1
        return claimed

    def _note_progress(self, now: datetime) -> None:
        if monotonic() - self._paced_at_s >= PACE_EVERY_S:
            self._paced_at_s = monotonic()
            batches_sample(now=now)
            batches_pace(now=now, rates=self._answer_rates())

    def _answer_rates(self) -> dict[str, float]:
        return {target: window.rate for target, window in list(self._windows.items())}

    def _limit_windows(self, targets: set[str], now: datetime) -> None:
        for target in targets:
            region, _, model = target.partition(" ")
            self._target_window(target).most = lines_at_once(batch_loads(ready_cells(region, model), now))

    def _target_window(self, target: str) -> BatchWindow:
        return self._windows.setdefault(target, BatchWindow())

    async def _keep_sending(self) -> None:
        """Sends as soon as there is room instead of in the next pass."""
        while True:
            with suppress(TimeoutError):  # lines that wait for another attempt become due
                async with asyncio.timeout(self._settings.sync_every_s if self._ranges else None):
                    await self._has_room.wait()
            self._has_room.clear()
            self._send_ready_lines()

    def _send_ready_lines(self) -> None:
        now_s = monotonic()
        for work in list(self._ranges.values()):  # in the order in which they were loaded
            window = self._target_window(work.leased.target)
            while window.room and (position := work.take(now_s)) is not None:
                window.began()
                task = asyncio.get_running_loop().create_task(self._send_line(work, position, window))
                work.tasks.add(task)
                task.add_done_callback(partial(self._line_ended, work))

    async def _send_line(self, work: "RangeWork", position: int, window: BatchWindow) -> None:
        attempts, failures = work.attempts.get(position, (0, 0))
        id = request_id(work.leased.batch, work.leased.number, position)
        custom_id, body = sent_body(work.line(position))
        received = AttemptResponse(None, sent=False, reason="the process was stopped")
        try:
            received = await self._send_attempt(work.leased, f"{id}-{work.leased.fence}.{attempts}", body, attempts)
        finally:
            window.ended(received, monotonic())
        now = self._now()
        verdict = evaluate_attempt(
            received,
            attempts=attempts + 1,
            failures=failures,
            deadline_at=work.leased.expires_at,
            now=now,
            settings=self._verdicts,
        )
        BATCH_LINES.labels(verdict.state.value).inc()
        match verdict.state:
            case AsyncState.DONE | AsyncState.FAILED:
                work.attempts.pop(position, None)
                work.end(outcome_of(position, id, custom_id, received))
            case AsyncState.QUEUED if verdict.due_at is not None:
                work.attempts[position] = (attempts + 1, failures + verdict.counts)
                wait_s = (verdict.due_at - now).total_seconds()
                work.put_back(position, monotonic() + wait_s)
            case _:
                pass  # the batch has expired, and finalizing records this line

    async def _send_attempt(self, leased: LeasedRange, id: str, body: bytes, attempts: int) -> AttemptResponse:
        work = AcceptedRequest(
            id=id,
            region=leased.region,
            path=leased.endpoint,
            body=body,
            serving_class=leased.serving_class,
            key=leased.key,
            left_s=min(ATTEMPT_S, max(1.0, (leased.expires_at - self._now()).total_seconds())),
            max_answer_bytes=self._settings.max_answer_bytes,
        )
        return await accepted_request_send(work, self._addresses, attempts)

    def _line_ended(self, work: "RangeWork", task: "asyncio.Task[None]") -> None:
        work.tasks.discard(task)
        self._has_room.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a line of batch %s could not be sent", work.leased.batch, exc_info=error)


class RangeWork:
    """A leased range: waiting lines, lines in flight, and outcomes that are not in the journal yet."""

    def __init__(self, leased: LeasedRange, lines: list[bytes], known: dict[int, bool], store: FileStore) -> None:
        self.leased = leased
        self._lines = lines
        self._waiting = deque(position for position in range(len(lines)) if position not in known)
        self._later: list[tuple[float, int]] = []
        self.attempts: dict[int, tuple[int, int]] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        self._unwritten: list[Outcome] = []
        self._written = dict(known)
        self._journal = store.append(journal_name(leased.batch, leased.number, leased.fence))
        self._appending: asyncio.Task[None] | None = None
        self._has_all = asyncio.Event()

    @property
    def counts(self) -> tuple[int, int]:
        completed = sum(self._written.values())
        return completed, len(self._written) - completed

    def take(self, now_s: float) -> int | None:
        """Returns the position of a line that may be sent now."""
        if self._later and self._later[0][0] <= now_s:
            return heappop(self._later)[1]
        return self._waiting.popleft() if self._waiting else None

    def put_back(self, position: int, due_s: float) -> None:
        heappush(self._later, (due_s, position))

    def line(self, position: int) -> bytes:
        return self._lines[position]

    def end(self, outcome: Outcome) -> None:
        self._unwritten.append(outcome)
        self._lines[outcome.position] = b""
        if len(self._written) + len(self._unwritten) == len(self._lines):
            self._has_all.set()

    async def write_until_done(self, every_s: float) -> None:
        """Appends outcomes to the journal until it has one per line. Raises StoreAway if an append failed, possibly
        after a part."""
        while len(self._written) < len(self._lines):
            with suppress(TimeoutError):
                async with asyncio.timeout(every_s):
                    await self._has_all.wait()
            await self._write_outcomes()

    async def close(self) -> None:
        """Stops sending, cancels lines in flight, and appends known outcomes."""
        self._waiting.clear()
        self._later.clear()
        tasks = list(self.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with suppress(StoreAway):  # the next process sends the rest again
            await self._write_outcomes()
        self._journal.close()

    async def _write_outcomes(self) -> None:
        """One append at a time, even if the task that waited for the last one was cancelled."""
        if self._appending is not None:
            await asyncio.shield(self._appending)
        outcomes, self._unwritten = self._unwritten, []
        if outcomes:
            self._appending = asyncio.create_task(self._append_outcomes(outcomes))
            await asyncio.shield(self._appending)

    async def _append_outcomes(self, outcomes: list[Outcome]) -> None:
        await asyncio.to_thread(self._journal.append, b"".join(map(journal_line, outcomes)))
        self._written |= {outcome.position: outcome.is_output for outcome in outcomes}
