"""What a cell has counted since its proxy started, and the difference between two moments. Pure.

Latencies are counted in the buckets of `engine_agent.protocol.metrics`: bucket -> samples.
"""

from collections.abc import Iterable, Mapping

import msgspec

from engine_agent.protocol.messages import Load
from fleet.planning.load.statistics import Counts

MAX_COUNT = 2**53
"""No real count is as large; a reported one that is must not break the sums of others."""
MAX_BUCKET = 1023
"""There are fewer buckets of latencies; what a node reports beyond them is no latency."""


class CellCounters(msgspec.Struct, frozen=True, array_like=True):
    """Totals of one generation of a cell. They only grow; a smaller number is another count. `handed_back` are those of
    the errors that an ingress tries elsewhere, and counts if they fail there."""

    generation: int = 0
    requests: int = 0
    errors: int = 0
    ttft: Counts = {}
    itl: Counts = {}
    handed_back: int = 0

    def since(self, before: "CellCounters") -> "CellCounters | None":
        """What was counted since then; None if it is not the same count (the cell or its proxy started anew)."""
        if self.generation != before.generation or self.requests < before.requests or self.errors < before.errors:
            return None
        return CellCounters(
            self.generation,
            self.requests - before.requests,
            self.errors - before.errors,
            _difference(self.ttft, before.ttft),
            _difference(self.itl, before.itl),
            max(0, self.handed_back - before.handed_back),
        )


def counters_of(load: Load, generation: int) -> CellCounters:
    """What a cell of this generation reports to have counted, clipped to what can be."""
    return CellCounters(
        generation,
        bounded(load.requests_total),
        bounded(load.errors_total),
        _valid(load.ttft_counts),
        _valid(load.itl_counts),
        bounded(load.handed_back_total),
    )


def bounded(count: int) -> int:
    """A reported count, from 0 to `MAX_COUNT`."""
    return max(0, min(count, MAX_COUNT))


def pooled(counts: Iterable[CellCounters]) -> CellCounters:
    """All of them as one; the generation means nothing any more."""
    requests, errors, handed_back = 0, 0, 0
    ttft: dict[int, int] = {}
    itl: dict[int, int] = {}
    for one in counts:
        requests += one.requests
        errors += one.errors
        handed_back += one.handed_back
        add_counts(ttft, one.ttft)
        add_counts(itl, one.itl)
    return CellCounters(0, requests, errors, ttft, itl, handed_back)


def add_counts(total: dict[int, int], more: Counts) -> None:
    """Add `more` to `total`, bucket by bucket."""
    for bucket, count in more.items():
        total[bucket] = total.get(bucket, 0) + count


def _difference(after: Counts, before: Counts) -> dict[int, int]:
    left = {bucket: count - before.get(bucket, 0) for bucket, count in after.items()}
    return {bucket: count for bucket, count in left.items() if count > 0}


def _valid(counts: Mapping[int, int]) -> dict[int, int]:
    return {bucket: bounded(count) for bucket, count in counts.items() if 0 <= bucket <= MAX_BUCKET and count > 0}
