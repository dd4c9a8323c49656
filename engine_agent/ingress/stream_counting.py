"""Adds up the streams that the relays of an ingress counted, by pool, for its reports. The totals are in a file, so
they outlive agents and relays. Each relay process counts from 0 and names itself, so its counts are added only once.
Counts since the last reading are lost with a relay that dies."""

import contextlib
import logging
import os
import uuid
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct, field

from engine_agent.protocol.stream_counts import PoolStreams, StreamTotals, growth_of, sum_of
from engine_agent.relay.meter import RelayCounts

log = logging.getLogger(__name__)

FILE: Final = "streams.json"
POOLS_PER_REPORT: Final = 128
"""About 400 bytes each, below the limit of a frame."""
TURN_S: Final = 15.0
"""Three times the interval at which the control plane reads reports, so that it misses none."""
LIVES_KEPT: Final = 256
"""Relay processes whose counts are known. More are not running."""


class _Stored(Struct):
    """`added`: the counts of each relay process that are in `pools`, least recently read first."""

    since: str
    pools: dict[str, PoolStreams] = field(default_factory=dict)
    added: dict[str, dict[str, PoolStreams]] = field(default_factory=dict)


class StreamCounting:
    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / FILE
        self._stored = _Stored(str(uuid.uuid4()))
        self._turn_began_s = 0.0
        self._first = 0
        self._load()

    def note(self, counts: RelayCounts) -> None:
        """Adds what a relay has counted since it was read last."""
        before = self._stored.added.pop(counts.life, {})
        self._stored.added[counts.life] = counts.pools
        if before == counts.pools:
            return
        for name, now in counts.pools.items():
            known, total = before.get(name, PoolStreams()), self._stored.pools.get(name, PoolStreams())
            self._stored.pools[name] = sum_of(total, growth_of(now, known))
        for life in list(self._stored.added)[:-LIVES_KEPT]:
            del self._stored.added[life]
        beside = self._path.with_suffix(".new")
        with contextlib.suppress(OSError):  # the totals in memory are reported, and written with the next change
            beside.write_bytes(msgspec.json.encode(self._stored))
            os.replace(beside, self._path)

    def report(self, now_s: float) -> StreamTotals | None:
        """The totals for a report, of many pools in turns; None before the first stream."""
        pools = self._stored.pools
        if not pools:
            return None
        if now_s >= self._turn_began_s + TURN_S:
            self._turn_began_s = now_s
            self._first = self._first + POOLS_PER_REPORT if self._first + POOLS_PER_REPORT < len(pools) else 0
        shown = sorted(pools)[self._first : self._first + POOLS_PER_REPORT]
        return StreamTotals(self._stored.since, {name: pools[name] for name in shown})

    def _load(self) -> None:
        """Unreadable totals start again, under a new name, so nothing counts twice."""
        try:
            self._stored = msgspec.json.decode(self._path.read_bytes(), type=_Stored)
        except FileNotFoundError:
            return
        except (OSError, msgspec.DecodeError) as error:
            log.warning("%s cannot be read, counting begins anew: %s", self._path, error)
