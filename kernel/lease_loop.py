"""Works on leased rows: claims what is due, runs an asyncio task for each claim, renews the leases meanwhile, and
releases unfinished work when it stops.

Near-real-time requests, batches, ranges of their lines, webhooks and callbacks are subclasses. Any number of processes
may run the same loop, and any may be killed at any moment: its leases expire, and another process claims the work."""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable
from datetime import datetime
from functools import partial
from time import monotonic
from typing import Generic, Protocol, TypeVar

from asgiref.sync import sync_to_async
from django.db import DatabaseError, close_old_connections, connection, connections

from kernel import clock
from kernel.loop_passes import PASSES

DATABASE_PAUSE_S = 2.0
"""Before the next pass, once the database did not answer."""
WRITE_PASSES_EVERY_S = 3.0
L = TypeVar("L", bound=Hashable)
T = TypeVar("T")

log = logging.getLogger(__name__)


class LeasePace(Protocol):
    """A loop polls every `poll_s`, and every `quiet_poll_s` once nothing was open for `quiet_after_s`."""

    @property
    def poll_s(self) -> float: ...
    @property
    def quiet_poll_s(self) -> float: ...
    @property
    def quiet_after_s(self) -> float: ...
    @property
    def renew_every_s(self) -> float: ...


class LeaseLoop(ABC, Generic[L]):
    """`running` has a task for each lease. Except for `work`, subclasses' methods run in the thread that has the
    database connection."""

    name: str
    """As pages show the age of its passes."""

    def __init__(self, pace: LeasePace, now: Callable[[], datetime] = clock.now) -> None:
        self._pace = pace
        self._now = now
        self.running: dict[L, asyncio.Task[None]] = {}
        self._renewed_at_s = 0.0
        self._open_at_s = float("-inf")
        self._wake = asyncio.Event()

    @abstractmethod
    def is_open(self, now: datetime) -> bool:
        """Whether `claim` could find anything: one index look-up."""

    @abstractmethod
    def claim(self, now: datetime) -> Iterable[L]:
        """Lease due work, as much as there is room for."""

    @abstractmethod
    async def work(self, leased: L) -> None:
        """Do the work and record its outcome. If this raises, the lease is left to expire, and the work is repeated."""

    def renew(self, leases: Collection[L], now: datetime) -> Collection[L]:
        """Extend leases. Returns those to continue; the tasks of the others are cancelled."""
        return leases

    @abstractmethod
    def release(self, leased: L, now: datetime) -> None:
        """Return unfinished work, so that another process may claim it immediately."""

    def wants_pass(self) -> bool:
        """Whether the next pass should not wait for its time. Evaluated after each end of work."""
        return False

    async def run(self, stopping: asyncio.Event) -> None:
        """Work until `stopping` is set; then release what is unfinished."""
        while not stopping.is_set():
            pause_s = DATABASE_PAUSE_S
            try:
                await self.step()
                is_quiet = monotonic() - self._open_at_s >= self._pace.quiet_after_s
                pause_s = self._pace.quiet_poll_s if is_quiet else self._pace.poll_s
            except DatabaseError as error:
                log.warning("%s: the database does not answer; next try in %g s: %s", self.name, pause_s, error)
            except Exception:
                log.exception("a pass of %s failed", self.name)
            await self._pause(pause_s, stopping)
        await self.stop()

    async def step(self) -> int:
        """Make one pass: renew, claim and start. Returns the number of new leases."""
        began_s, now = monotonic(), self._now()
        await self._renew(now)
        claimed = await in_thread(partial(self._claim, now))
        for leased in claimed:
            self.running[leased] = task = asyncio.create_task(self._work(leased))
            task.add_done_callback(partial(self._ended, leased))
        PASSES.note(self.name, monotonic() - began_s)
        return len(claimed)

    async def idle(self) -> None:
        """Return once nothing is running."""
        while self.running:
            await asyncio.wait(self.running.values())

    async def stop(self) -> None:
        """Cancel what is running, release it, and close the database connection."""
        await asyncio.sleep(0)  # a task that is cancelled before it starts would not release its lease
        tasks = list(self.running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await in_thread(_close_connections)

    async def _pause(self, seconds: float, stopping: asyncio.Event) -> None:
        events = [asyncio.ensure_future(event.wait()) for event in (stopping, self._wake)]
        try:
            await asyncio.wait(events, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for event in events:
                event.cancel()
            self._wake.clear()

    def _claim(self, now: datetime) -> list[L]:
        PASSES.write_every(WRITE_PASSES_EVERY_S)
        if not self.is_open(now):
            return []
        self._open_at_s = monotonic()
        return list(self.claim(now))

    async def _renew(self, now: datetime) -> None:
        if not self.running or monotonic() - self._renewed_at_s < self._pace.renew_every_s:
            return
        self._renewed_at_s = monotonic()
        leases = list(self.running)
        kept = await in_thread(partial(self.renew, leases, now))
        for leased in leases:
            task = self.running.get(leased)
            if leased not in kept and task is not None:
                task.cancel()

    async def _work(self, leased: L) -> None:
        try:
            await self.work(leased)
        except asyncio.CancelledError:
            await in_thread(partial(self.release, leased, self._now()))
            raise

    def _ended(self, leased: L, task: "asyncio.Task[None]") -> None:
        del self.running[leased]
        if self.wants_pass():
            self._wake.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s: work was not finished and is repeated", self.name, exc_info=error)


def _close_connections() -> None:
    if not connection.in_atomic_block:
        connections.close_all()


async def in_thread(work: Callable[[], T], *, is_long: bool = False) -> T:
    """Run database code in the one thread that has its connection, or long work in a thread with its own connection."""

    def fresh() -> T:
        if not connection.in_atomic_block:  # else the connection is its caller's
            close_old_connections()
        try:
            return work()
        finally:
            if is_long:
                connections.close_all()

    return await sync_to_async(fresh, thread_sensitive=not is_long)()
