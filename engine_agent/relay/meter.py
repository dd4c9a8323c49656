"""The counts of one relay process."""

import uuid
from collections import Counter
from typing import Final

from msgspec import Struct

from engine_agent.protocol.ingress_messages import RefusedAccount
from engine_agent.protocol.metrics import bucket_of
from engine_agent.protocol.stream_counts import PoolStreams

MOST_POOLS: Final = 4096
"""Streams of further pools are counted together, under the empty name."""
MOST_ACCOUNTS: Final = 1024
"""Cut streams of further accounts are counted without a key."""


class RelayCounts(Struct, frozen=True):
    """The counts of one process, for the agent of its ingress. `life` names the process. `refused`: attempts to
    continue a stream that failed, by reason. `cut`: streams that ended early and whose failure no cell counts."""

    life: str
    requests: int
    open: int
    kept_bytes: int
    refused: dict[str, int]
    pools: dict[str, PoolStreams]
    cut: tuple[RefusedAccount, ...] = ()


class PoolMeter:
    """As `PoolStreams`."""

    def __init__(self) -> None:
        self.relayed = self.repeated = 0
        self.continued: Counter[str] = Counter()
        self.cut: Counter[str] = Counter()
        self.unable: Counter[str] = Counter()
        self._pauses: Counter[int] = Counter()

    def paused(self, pause_s: float) -> None:
        self._pauses[bucket_of(pause_s)] += 1

    def totals(self) -> PoolStreams:
        return PoolStreams(
            relayed_total=self.relayed,
            continued_total=dict(self.continued),
            cut_total=dict(self.cut),
            unable_total=dict(self.unable),
            repeated_total=self.repeated,
            pauses=dict(self._pauses),
        )


class RelayMeter:
    """`requests` that passed, and those `open` now; bytes of those that are kept to be sent again."""

    def __init__(self) -> None:
        self.life = str(uuid.uuid4())
        self.requests = 0
        self.open = 0
        self.kept_bytes = 0
        self.refused: Counter[str] = Counter()
        self._pools: dict[bytes, PoolMeter] = {}
        self._cut: Counter[tuple[str, str, str]] = Counter()

    def of(self, pool: bytes) -> PoolMeter:
        """The counts of a pool, which HAProxy named."""
        meter = self._pools.get(pool)
        if meter is None:
            name = pool if len(self._pools) < MOST_POOLS else b""
            meter = self._pools.setdefault(name, PoolMeter())
        return meter

    def note_cut(self, deployment: str, key: str, serving_class: str) -> None:
        """A stream ended early, and its cells have passed the failure on."""
        name = (deployment, key, serving_class)
        if name not in self._cut and len(self._cut) >= MOST_ACCOUNTS:
            name = (deployment, "", serving_class)
        self._cut[name] += 1

    def counts(self) -> RelayCounts:
        pools = {name.decode("latin-1"): meter.totals() for name, meter in self._pools.items()}
        cut = tuple(RefusedAccount(name[0], 0, name[1], name[2], count) for name, count in self._cut.items())
        return RelayCounts(self.life, self.requests, self.open, self.kept_bytes, dict(self.refused), pools, cut)
