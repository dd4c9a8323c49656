"""What a cell has counted since its proxy started, and the difference between two moments. Pure.

Latencies are counted in the buckets of `engine_agent.protocol.latency_buckets`: bucket -> samples.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

Counts = Mapping[int, int]


@dataclass(frozen=True, slots=True)
class CellCounters:
    """Totals of one generation of a cell. They only grow; a smaller number is another count."""

    generation: int = 0
    requests: int = 0
    errors: int = 0
    ttft: Counts = field(default_factory=dict)
    itl: Counts = field(default_factory=dict)

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
        )


def pooled(counts: Iterable[CellCounters]) -> CellCounters:
    """All of them as one; the generation means nothing any more."""
    requests, errors = 0, 0
    ttft: dict[int, int] = {}
    itl: dict[int, int] = {}
    for one in counts:
        requests += one.requests
        errors += one.errors
        _add(ttft, one.ttft)
        _add(itl, one.itl)
    return CellCounters(0, requests, errors, ttft, itl)


def _difference(after: Counts, before: Counts) -> dict[int, int]:
    left = {bucket: count - before.get(bucket, 0) for bucket, count in after.items()}
    return {bucket: count for bucket, count in left.items() if count > 0}


def _add(total: dict[int, int], more: Counts) -> None:
    for bucket, count in more.items():
        total[bucket] = total.get(bucket, 0) + count
