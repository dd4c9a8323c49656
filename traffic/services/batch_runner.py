"""The process of batches: validates, leases ranges of lines, sends them through the ingress of their region as class
`batch`, keeps their outcomes in journals, and finalizes. Any number may run, and any may be killed at any moment. It
decides nothing: what an answer means, which batch comes first and how many lines are under way is planned elsewhere.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from functools import partial
from time import monotonic
from typing import TypeVar

from asgiref.sync import sync_to_async
from django.conf import settings as django_settings
from django.db import DatabaseError, InterfaceError, OperationalError, close_old_connections, connections

from kernel import clock
from kernel.metrics import BATCH_LINES
from traffic.models import Batch
from traffic.planning.async_request import AsyncSettings, AsyncState, AttemptResponse, judge
from traffic.planning.batch import BatchSettings, BatchState
from traffic.planning.batch_lines import sent_body
from traffic.planning.batch_order import plan_order
from traffic.planning.batch_outcome import outcome_of
from traffic.planning.batch_window import LOOK_EVERY_S, BatchWindow, lines_at_once
from traffic.planning.key import sender_key_text
from traffic.planning.routing import IngressAddress
from traffic.selectors.async_request import ingress_addresses_by_region
from traffic.selectors.batch import batch_jobs, batch_loads, ready_cells
from traffic.services.batch import batch_lose, batch_settings, batches_advance, batches_open
from traffic.services.batch_finish import batch_finish, request_id
from traffic.services.batch_lease import (
    LeasedRange,
    batch_chore_claim,
    batch_chore_release,
    batch_chore_renew,
    batch_validation_excuse,
    range_claim,
    range_finish,
    range_outcomes,
    range_release,
    ranges_renew,
)
from traffic.services.batch_pacing import batches_pace, batches_sample
from traffic.services.batch_range import RangeWork
from traffic.services.batch_validation import batch_validate
from traffic.services.file_store import NoSuchFile, StoreAway, file_store
from traffic.services.ingress_client import ingress_post

ATTEMPT_S = 3600.0
"""Of one line, queueing included; then it is tried again."""
ANSWER_ROOM_S = 2.0
DATABASE_PAUSE_S = 2.0
PACE_EVERY_S = 10.0
LAST_READS_S = 2.0
"""How long a process that ends waits for ranges that are being read, to give them back."""
AHEAD = 2
"""Ranges that are held for each model, so that the next one is there when the first one ends."""
T = TypeVar("T")

log = logging.getLogger(__name__)


class BatchRunner:
    def __init__(self, settings: BatchSettings | None = None, now: Callable[[], datetime] = clock.now) -> None:
        self._settings = settings or batch_settings()
        self._verdicts = AsyncSettings(
            first_retry_s=self._settings.first_retry_s,
            longest_retry_s=self._settings.longest_retry_s,
            max_failures=self._settings.max_failures,
        )
        self._now = now
        self._store = file_store()
        self._work: dict[LeasedRange, RangeWork] = {}
        self._opening: dict[LeasedRange, asyncio.Task[None]] = {}
        self._windows: dict[str, BatchWindow] = {}
        self._addresses: dict[str, list[IngressAddress]] = {}
        self._chore: tuple[Batch, asyncio.Task[None]] | None = None
        self._renewed_at_s = 0.0
        self._steered_at_s = 0.0
        self._paced_at_s = 0.0
        self._looked_at_s = 0.0
        self._seen_open_at_s = monotonic()
        self._changed = asyncio.Event()

    async def run(self, stopping: asyncio.Event) -> None:
        """Work until `stopping` is set; then give back what is not finished."""
        sending = asyncio.create_task(self._keep_sending())
        while not stopping.is_set():
            try:
                await self.step()
                quiet_s = monotonic() - self._seen_open_at_s
                pause_s = self._settings.quiet_poll_s if quiet_s > self._settings.quiet_after_s else self._pause_s()
            except (DatabaseError, StoreAway) as error:
                log.warning("batches wait %g s: %s", DATABASE_PAUSE_S, error)
                pause_s = DATABASE_PAUSE_S
            try:
                async with asyncio.timeout(pause_s):
                    await stopping.wait()
            except TimeoutError:
                continue
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        await self.stop()

    async def step(self) -> None:
        """One pass: write outcomes, renew, finish and lease, and begin to send."""
        await self._write()
        await self._renew()
        await self._finish()
        if monotonic() - self._looked_at_s >= self._settings.poll_s:  # outcomes are written more often
            self._looked_at_s = monotonic()
            await self._look()
        self._send()

    async def _look(self) -> None:
        claimed, chore = await self._in_thread(self._prepare)
        for leased in claimed:
            self._opening[leased] = asyncio.create_task(self._open(leased))
        if chore is not None:
            self._chore = (chore, asyncio.create_task(self._do(chore)))

    async def stop(self) -> None:
        """Cut what is being sent, write what is known, give back the rest, and let go of the database."""
        if self._opening:
            await asyncio.wait(list(self._opening.values()), timeout=LAST_READS_S)
        for work in list(self._work.values()):
            await work.cut()
        for work in list(self._work.values()):
            await self._let_go(work)
        if self._chore is not None:
            batch, task = self._chore
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await self._in_thread(partial(batch_chore_release, batch=batch))
        await self._in_thread(connections.close_all)

    def _pause_s(self) -> float:
        return self._settings.sync_every_s if self._work or self._opening else self._settings.poll_s

    def _prepare(self) -> tuple[list[LeasedRange], Batch | None]:
        if not batches_open():
            return [], None  # hardly ever anything: nothing else is asked
        self._seen_open_at_s = monotonic()
        now = self._now()
        batches_advance(now=now)
        self._pace(now)
        self._steer(now)
        chore = batch_chore_claim(now=now, settings=self._settings) if self._chore is None else None
        self._addresses = ingress_addresses_by_region()
        return self._claimed(now), chore

    def _claimed(self, now: datetime) -> list[LeasedRange]:
        """New ranges, for models of which too little is held."""
        ours = {*list(self._opening), *list(self._work)}  # in this order: one that is opened just now is in either
        held: dict[str, int] = {}
        for leased in ours:
            held[leased.target] = held.get(leased.target, 0) + 1
        free = self._settings.ranges_at_once - len(ours)
        if free <= 0:
            return []
        found = batch_jobs(now, {target: window.rate for target, window in self._windows.items()})
        targets = {job.id: f"{region} {model}" for job, region, model in found}
        claimed: list[LeasedRange] = []
        for batch_id in plan_order((job for job, _, _ in found), now):
            target = targets[batch_id]
            if held.get(target, 0) >= AHEAD or len(claimed) >= free:
                continue
            claim = range_claim(batch_id=batch_id, now=now, settings=self._settings)
            if claim is not None:
                claimed.append(claim)
                held[target] = held.get(target, 0) + 1
        for target in {leased.target for leased in claimed}:
            region, _, model = target.partition(" ")
            self._window(target).most = lines_at_once(batch_loads(ready_cells(region, model), now))
        return claimed

    def _pace(self, now: datetime) -> None:
        """Note how far batches are, and what falls behind its deadline."""
        if monotonic() - self._paced_at_s >= PACE_EVERY_S:
            self._paced_at_s = monotonic()
            batches_sample(now=now)
            batches_pace(now=now, rates={target: window.rate for target, window in self._windows.items()})

    def _steer(self, now: datetime) -> None:
        """Let windows follow those of their cells."""
        if monotonic() - self._steered_at_s < LOOK_EVERY_S:
            return
        self._steered_at_s = monotonic()
        for target in {leased.target for leased in list(self._work)}:
            region, _, model = target.partition(" ")
            self._window(target).most = lines_at_once(batch_loads(ready_cells(region, model), now))

    async def _open(self, leased: LeasedRange) -> None:
        """Read a range, beside the pass: a store that is slow must hold up no lease. One that takes longer than this
        range's own loses it to another process, which the next renewal finds out."""
        try:
            self._work[leased] = await asyncio.to_thread(self._opened, leased)
            self._changed.set()
        except NoSuchFile:
            log.error("the work file of batch %s is gone", leased.batch)
            await self._in_thread(partial(self._lose, leased.batch))
        except StoreAway as away:  # its lease ends by itself, and then it is tried again
            log.warning("a range of batch %s cannot be read now: %s", leased.batch, away)
        finally:
            self._opening.pop(leased, None)

    def _opened(self, leased: LeasedRange) -> RangeWork:
        text = self._store.read(leased.work, leased.start, leased.end)
        earlier = range_outcomes(self._store, leased.batch, leased.number, leased.fence - 1)
        known = {outcome.position: outcome.is_output for outcome in earlier}
        return RangeWork(leased, text.split(b"\n")[:-1], known, self._store)

    def _lose(self, batch_id: str) -> None:
        batch_lose(batch=Batch.objects.get(id=batch_id), now=self._now())

    async def _do(self, batch: Batch) -> None:
        """Validate or finalize a batch, in a thread of its own."""
        now = self._now()
        validating = partial(batch_validate, batch=batch, now=now, settings=self._settings)
        work = validating if batch.state == BatchState.VALIDATING.value else partial(batch_finish, batch=batch, now=now)
        try:
            await self._in_thread(work, is_long=True)
        except NoSuchFile:
            log.error("the files of batch %s are gone", batch.id)
            await self._in_thread(partial(batch_lose, batch=batch, now=self._now()))
        except (OperationalError, InterfaceError, StoreAway) as error:
            log.warning("batch %s stays %s for now: %s", batch.id, batch.state, error)
            with suppress(DatabaseError):
                await self._in_thread(partial(batch_validation_excuse, batch=batch))
        except Exception:
            # Its lease ends by itself, and then it is tried again; validated, a few times at most.
            log.exception("batch %s could not be moved on from %s", batch.id, batch.state)
        finally:
            self._chore = None

    async def _renew(self) -> None:
        """Keep our leases. What was cancelled, or taken from us, is cut off, so that its engines stop."""
        at_s = monotonic()
        if at_s - self._renewed_at_s < self._settings.renew_every_s:
            return
        self._renewed_at_s = at_s
        if self._chore is not None:
            batch = self._chore[0]
            await self._in_thread(partial(batch_chore_renew, batch=batch, now=self._now(), settings=self._settings))
        counts = [(leased, *work.counts) for leased, work in self._work.items()]
        if not counts:
            return
        renewing = partial(ranges_renew, counts=counts, now=self._now(), settings=self._settings)
        kept = await self._in_thread(renewing)
        for leased, *_ in counts:
            if leased not in kept:
                await self._let_go(self._work[leased])

    async def _finish(self) -> None:
        for work in [work for work in self._work.values() if work.is_done]:
            del self._work[work.leased]
            completed, failed = work.counts
            work.close()
            await self._in_thread(partial(range_finish, leased=work.leased, completed=completed, failed=failed))

    async def _let_go(self, work: RangeWork, *, is_lost: bool = False) -> None:
        """Cut what is under way, and give back what is not finished. `is_lost`: its journal is not used again."""
        self._work.pop(work.leased, None)
        await work.cut()
        if not is_lost:
            with suppress(StoreAway):  # whoever goes on reads what is there, and sends the rest again
                await work.write()
        completed, failed = work.counts
        work.close()
        await self._in_thread(partial(range_release, leased=work.leased, completed=completed, failed=failed))

    async def _write(self) -> None:
        """Begin appends. One that hangs holds up no lease: a range whose append failed is let go, and sent again."""
        now_s = monotonic()
        for work in list(self._work.values()):
            try:
                work.begin_write(now_s)
            except StoreAway:
                await self._let_go(work, is_lost=True)
                raise

    async def _keep_sending(self) -> None:
        """Send as soon as there is room, not with the next pass."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            self._send()

    def _send(self) -> None:
        now_s = monotonic()
        for work in list(self._work.values()):  # in the order in which they were leased
            window = self._window(work.leased.target)
            while window.room and (position := work.take(now_s)) is not None:
                window.began()
                task = asyncio.get_running_loop().create_task(self._line(work, position, window))
                work.tasks.add(task)
                task.add_done_callback(partial(self._line_ended, work))

    async def _line(self, work: RangeWork, position: int, window: BatchWindow) -> None:
        attempts, failures = work.attempts.get(position, (0, 0))
        id = request_id(work.leased.batch, work.leased.number, position)
        custom_id, body = sent_body(work.line(position))
        received = AttemptResponse(None, sent=False, reason="the process was stopped")
        try:
            received = await self._attempt(work.leased, f"{id}-{work.leased.fence}.{attempts}", body, attempts)
        finally:
            window.ended(received, monotonic())
        now = self._now()
        verdict = judge(
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
                pass  # its batch has run out of time, and says so of this line

    async def _attempt(self, leased: LeasedRange, id: str, body: bytes, attempts: int) -> AttemptResponse:
        addresses = self._addresses.get(leased.region, [])
        if not addresses:
            return AttemptResponse(None, sent=False, reason=f"region {leased.region} has no ingress")
        left_s = min(ATTEMPT_S, max(1.0, (leased.expires_at - self._now()).total_seconds()))
        headers = {
            "X-Switchyard-Class": leased.serving_class,
            "X-Switchyard-Deadline-Ms": str(int(left_s * 1000)),
            "X-Request-Id": id,
        }
        if leased.key:
            headers["Authorization"] = f"Bearer {sender_key_text(leased.key, django_settings.SECRET_KEY)}"
        return await ingress_post(
            addresses[attempts % len(addresses)],
            leased.endpoint,
            body,
            headers,
            limit_s=left_s + ANSWER_ROOM_S,
            max_bytes=self._settings.max_answer_bytes,
        )

    def _window(self, target: str) -> BatchWindow:
        return self._windows.setdefault(target, BatchWindow())

    def _line_ended(self, work: RangeWork, task: "asyncio.Task[None]") -> None:
        work.tasks.discard(task)
        self._changed.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a line of batch %s could not be sent", work.leased.batch, exc_info=error)

    @staticmethod
    async def _in_thread(work: Callable[[], T], *, is_long: bool = False) -> T:
        """Run what asks the database: in the one thread that has its connection, or, what takes long, in another."""

        def fresh() -> T:
            close_old_connections()
            try:
                return work()
            finally:
                if is_long:
                    connections.close_all()

        return await sync_to_async(fresh, thread_sensitive=not is_long)()
