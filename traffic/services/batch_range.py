"""A range of lines that a process has leased: which of its lines wait, which are under way, and which outcomes are in
its journal. It sends nothing and decides nothing."""

import asyncio
from collections import deque
from heapq import heappop, heappush
from time import monotonic

from traffic.planning.batch_outcome import Outcome, journal_line
from traffic.services.batch_lease import LeasedRange, journal_name
from traffic.services.file_store import FileStore


class RangeWork:
    """A range that is ours: the lines that wait, those under way, and the outcomes that are not in the journal yet."""

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
        self._every_s, self._written_at_s = store.sync_every_s, monotonic()
        self._writing: asyncio.Task[None] | None = None

    @property
    def is_done(self) -> bool:
        return len(self._written) == len(self._lines)

    @property
    def counts(self) -> tuple[int, int]:
        """Lines completed and failed, in the journals."""
        completed = sum(self._written.values())
        return completed, len(self._written) - completed

    def take(self, now_s: float) -> int | None:
        """The position of a line that may be sent now."""
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

    def begin_write(self, now_s: float) -> None:
        """Bring outcomes to the store, one append at a time, while others are awaited.

        Raises:
            StoreAway: the last append failed; what of it is there is unknown, and this range must be let go.
        """
        if self._writing is not None and self._writing.done():
            ended, self._writing = self._writing, None
            ended.result()
        has_all = len(self._written) + len(self._unwritten) == len(self._lines)
        is_due = has_all or now_s - self._written_at_s >= self._every_s
        if self._writing is None and self._unwritten and is_due:
            self._written_at_s = now_s
            self._writing = asyncio.create_task(self._write())

    async def write(self) -> None:
        """The rest, and wait for it.

        Raises:
            StoreAway: as above.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            await writing
        await self._write()

    async def _write(self) -> None:
        outcomes, self._unwritten = self._unwritten, []
        if outcomes:
            await asyncio.to_thread(self._journal.append, b"".join(map(journal_line, outcomes)))
            self._written |= {outcome.position: outcome.is_output for outcome in outcomes}

    async def cut(self) -> None:
        tasks = list(self.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def close(self) -> None:
        self._journal.close()
