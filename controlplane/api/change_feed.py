"""Wakes the watchers of this process when objects of a kind have changed, with one query per tick for all of them. It
never reports what changed. It may wake them without a change but never misses one, because every tick asks for what was
not visible in the previous snapshot (kernel.rest.changes). It runs only while there are watchers."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from django.db import DatabaseError, InterfaceError, connection, connections

from kernel.rest.changes import KINDS_CHANGED

TICK_S = 0.25
RETRY_S = 2.0
"""After an error of the database."""
IDLE_S = 10.0
"""Polling continues for this long after the last watcher, because watchers usually reconnect."""
BEGIN_LIMIT_S = 3.0
MOST_WATCHERS = 5000
"""A watcher costs about 20 kB; further ones get an immediate response."""

Poll = Callable[[str | None], tuple[str, list[str]]]
"""Previous snapshot, None for the first -> current snapshot, and the kinds that changed in between."""

log = logging.getLogger(__name__)


class CannotWait(Exception):
    """The watcher cannot wait and gets an immediate response."""


def kinds_changed(since: str | None) -> tuple[str, list[str]]:
    """Query PostgreSQL on the connection of the calling thread."""
    with connection.cursor() as cursor:
        if since is None:
            cursor.execute("SELECT pg_current_snapshot()::text, ARRAY[]::text[]")
        else:
            cursor.execute(KINDS_CHANGED, {"since": since})
        snapshot, kinds = cursor.fetchone()
    return snapshot, list(kinds)


@dataclass(slots=True)
class Watcher:
    """A watcher's position in the feed: changes after `seen` are new to it."""

    feed: "ChangeFeed"
    seen: int

    async def changed(self, kind: str) -> None:
        """Return as soon as an object of this kind has a new change."""
        while self.feed.last_change(kind) <= self.seen:
            await self.feed.next_tick()
        self.seen = self.feed.last_change(kind)


class ChangeFeed:
    """One per process; starts with its first watcher."""

    def __init__(self, poll: Poll = kinds_changed, tick_s: float = TICK_S) -> None:
        self._poll = poll
        self._tick_s = tick_s
        self._watchers = 0
        self._ticks = 0
        self._changes: dict[str, int] = {}
        self._running: asyncio.Task[None] | None = None
        self._begun = self._ticked = asyncio.Event()

    @contextlib.asynccontextmanager
    async def watcher(self) -> AsyncIterator[Watcher]:
        """Returns a position from which no later change is skipped. Raises CannotWait if this process has too many
        watchers, or the database does not answer."""
        if self._watchers >= MOST_WATCHERS:
            raise CannotWait(f"{self._watchers} watchers already wait in this process")
        self._watchers += 1
        try:
            await self._begin()
            yield Watcher(self, self._ticks)
        finally:
            self._watchers -= 1

    async def _begin(self) -> None:
        """Return once there is a snapshot to compare with."""
        if self._running is None or self._running.done():
            self._begun, self._ticked = asyncio.Event(), asyncio.Event()
            self._running = asyncio.create_task(self._run(), name="change-feed")
        try:
            async with asyncio.timeout(BEGIN_LIMIT_S):
                await self._begun.wait()
        except TimeoutError:
            raise CannotWait("the database does not respond") from None

    def last_change(self, kind: str) -> int:
        """The tick that last saw a change of this kind; 0 if none did."""
        return self._changes.get(kind, 0)

    async def next_tick(self) -> None:
        await self._ticked.wait()

    async def _run(self) -> None:
        idle_s = 0.0
        snapshot: str | None = None
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="change-feed") as thread:
            try:
                while idle_s < IDLE_S:
                    pause_s = self._tick_s
                    try:
                        snapshot, kinds = await asyncio.get_running_loop().run_in_executor(thread, self._poll, snapshot)
                        self._notify(kinds)
                    except (DatabaseError, InterfaceError) as error:
                        log.warning("watchers wait for the database: %s", error)
                        thread.submit(connections.close_all)
                        pause_s = RETRY_S
                    await asyncio.sleep(pause_s)
                    idle_s = 0.0 if self._watchers else idle_s + pause_s
                self._running = None  # the next watcher starts a new task
            finally:
                thread.submit(connections.close_all)  # `connection` would be that of the calling thread

    def _notify(self, kinds: list[str]) -> None:
        self._ticks += 1
        self._changes.update(dict.fromkeys(kinds, self._ticks))
        self._begun.set()
        ticked, self._ticked = self._ticked, asyncio.Event()
        ticked.set()
