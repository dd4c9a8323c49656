"""What all relays of a fleet counted, although relays die."""

import contextlib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import httpx

from engine_agent.protocol.continuation import COUNTS_PATH

SUMMED = ("continued:", "lost:", "repeated:", "refused:", "requests")
WITHIN_S = 0.5
"""For an answer. A paused relay must not delay the next fault."""


class RelayCounts:
    """Adds up the counts that grow. What a relay counted between the last poll and its death is not included."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._last: dict[Path, Mapping[str, int]] = {}
        self.totals: Counter[str] = Counter()

    def poll(self) -> None:
        """Reads the counts of all relays that answer. The first poll sets where they begin."""
        is_first = not self._last
        for socket in sorted(self._home.glob("ingresses/*/relay/[0-9]*.sock")):
            with contextlib.suppress(httpx.HTTPError, ValueError):
                self._add(socket, _read(socket), is_first=is_first)

    def _add(self, socket: Path, counts: Mapping[str, int], *, is_first: bool) -> None:
        before = counts if is_first else self._last.get(socket, {})
        if counts.get("requests", 0) < before.get("requests", 0):
            before = {}  # another process
        self._last[socket] = counts
        self.totals.update({
            name: count - before.get(name, 0) for name, count in counts.items() if name.startswith(SUMMED)
        })  # fmt: skip


def _read(socket: Path) -> dict[str, int]:
    with httpx.Client(
        transport=httpx.HTTPTransport(uds=str(socket)), base_url="http://relay", timeout=WITHIN_S
    ) as http:
        counts: dict[str, int] = http.get(COUNTS_PATH).raise_for_status().json()
        return counts
