"""Keeps the latest row of every agent between two writes. Agents speak on the event loop and rows are written in a
thread, so every exchange between the two is under one lock. It writes nothing itself."""

import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar


class AgentRow(Protocol):
    """A row that says which connection it came by."""

    @property
    def connection(self) -> str: ...


Row = TypeVar("Row", bound=AgentRow)


class LatestRows(Generic[Row]):
    """Rows by agent id; a newer one takes the place of an older one that is not written yet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._unwritten: dict[str, Row] = {}
        self._known: dict[str, Row] = {}

    def note(self, agent: str, row: Row) -> Row | None:
        """Take in what an agent said. Returns what it had said before on its open connection, if anything."""
        with self._lock:
            before = self._known.get(agent)
            self._known[agent] = self._unwritten[agent] = row
        return before

    def end(self, agent: str, connection: str, last_words: Callable[[Row], Row]) -> None:
        """A connection ended: its last row, changed by `last_words`, is to be written, unless a newer connection of
        this agent has spoken or this one never did."""
        with self._lock:
            known = self._known.get(agent)
            if known is not None and known.connection == connection:
                del self._known[agent]
                self._unwritten[agent] = last_words(known)

    def take(self) -> dict[str, Row]:
        """All that is to be written; it counts as written unless it is given back."""
        with self._lock:
            rows, self._unwritten = self._unwritten, {}
        return rows

    def give_back(self, rows: dict[str, Row]) -> None:
        """Keep what could not be written for the next time. What came in meanwhile is newer and wins."""
        with self._lock:
            self._unwritten = {**rows, **self._unwritten}

    def write(self, store: Callable[[list[Row]], object]) -> None:
        """Take, store, and give back what could not be stored."""
        rows = self.take()
        try:
            store(list(rows.values()))
        except Exception:
            self.give_back(rows)
            raise
