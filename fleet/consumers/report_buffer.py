"""Keeps the latest report of every agent until it is written. Messages arrive on the event loop and reports are
written in a thread, so every exchange between the two is under one lock. It writes nothing itself."""

import threading
from collections.abc import Callable
from itertools import islice
from typing import Generic, Protocol, TypeVar

BATCH = 1000
"""Reports that are written together: a tenth of a second of PostgreSQL. What arrives meanwhile replaces what waits."""


class AgentReport(Protocol):
    """A report that names the connection it arrived on."""

    @property
    def connection(self) -> str: ...


R = TypeVar("R", bound=AgentReport)


class ReportBuffer(Generic[R]):
    """Reports by agent id; a newer one replaces an older one that is not written yet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: dict[str, R] = {}
        self._latest: dict[str, R] = {}

    def put(self, agent: str, report: R) -> R | None:
        """Add a report. Returns the previous one of the agent's open connection, if any."""
        with self._lock:
            previous = self._latest.get(agent)
            self._latest[agent] = self._pending[agent] = report
        return previous

    def end(self, agent: str, connection: str, final: Callable[[R], R]) -> None:
        """A connection ended: its last report, changed by `final`, is to be written, unless the agent has reported on a
        newer connection or never reported on this one."""
        with self._lock:
            latest = self._latest.get(agent)
            if latest is not None and latest.connection == connection:
                del self._latest[agent]
                self._pending[agent] = final(latest)

    def take(self, most: int = BATCH) -> dict[str, R]:
        """The pending reports of up to `most` agents, those that wait longest first; they count as written unless they
        are restored."""
        with self._lock:
            reports = dict(islice(self._pending.items(), most))
            for agent in reports:
                del self._pending[agent]
        return reports

    def restore(self, reports: dict[str, R]) -> None:
        """Keep what could not be written for the next flush. Reports that arrived meanwhile are newer and win."""
        with self._lock:
            self._pending = {**reports, **self._pending}

    def flush(self, store: Callable[[list[R]], object]) -> None:
        """Store what is pending now, a batch at a time; what cannot be stored stays pending."""
        left = len(self._pending)
        while left > 0 and (reports := self.take(min(BATCH, left))):
            left -= len(reports)
            try:
                store(list(reports.values()))
            except Exception:
                self.restore(reports)
                raise
