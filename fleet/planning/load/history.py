"""Makes windows of what cells count: what was added since the last look, at once for short windows, summed for long
ones. Pure; it knows no table and no clock.

Latencies are summed as counts in buckets, so the percentiles of a long window, or of many cells, are those of all their
samples and no average of percentiles.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec

from engine_agent.protocol.latency_buckets import bucket_of, middle_s
from fleet.planning.load.counters import CellCounters
from fleet.planning.load.statistics import quantile_bucket, share_above

FINE_S = 15
KEPT_S: Mapping[int, int] = {FINE_S: 3600, 300: 86_400, 3600: 14 * 86_400}
"""Step of a window -> how long windows of that step are kept: 240, 288 and 336 of each subject."""
COARSE_S = tuple(step for step in KEPT_S if step != FINE_S)
MOST = 2**53
"""No count that is meant is as large; it keeps one that is not from breaking the sums of others."""
MOST_BUCKET = 1023
"""There are fewer buckets of latencies; what a node says beyond them is no latency."""

Buckets = dict[int, int]


class Spoken(msgspec.Struct, frozen=True):
    """The part of a reported load that is kept."""

    in_flight: int = 0
    queued: int = 0
    tokens_per_s: float = 0.0
    requests_total: int = 0
    errors_total: int = 0
    ttft_counts: Buckets = {}
    itl_counts: Buckets = {}


class Sample(msgspec.Struct, array_like=True):
    """What was added between two looks, and the gauges at the second."""

    requests: int = 0
    errors: int = 0
    slow: int = 0
    cells: float = 0.0
    in_flight: float = 0.0
    queued: float = 0.0
    tokens_per_s: float = 0.0
    ttft: Buckets = msgspec.field(default_factory=dict)
    itl: Buckets = msgspec.field(default_factory=dict)


class Sum(msgspec.Struct, array_like=True):
    """A long window that is being filled: the sum of `samples` samples, over `covered_s` seconds."""

    index: int
    samples: int = 0
    covered_s: float = 0.0
    total: Sample = msgspec.field(default_factory=Sample)


class Totals(msgspec.Struct, array_like=True):
    """What a cell had counted at the last look."""

    generation: int
    requests: int
    errors: int
    ttft: Buckets
    itl: Buckets


class Memory(msgspec.Struct, array_like=True):
    """What the next window of a subject is counted from: the time of the last look, in seconds since 1970, what its
    cell had counted then, and its long windows, by their step."""

    at: float | None = None
    totals: Totals | None = None
    filling: dict[int, Sum] = msgspec.field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Figures:
    """One finished window, as it is stored."""

    step_s: int
    at: datetime
    covered_s: float
    requests: int
    errors: int
    slow: int
    cells: float
    in_flight: float
    queued: float
    tokens_per_s: float
    ttft_p50_ms: float | None
    ttft_p95_ms: float | None
    itl_p50_ms: float | None
    itl_p95_ms: float | None


def counters_of(spoken: Spoken, generation: int) -> CellCounters:
    """What a cell says it has counted, within the bounds of sense."""
    ttft, itl = _sensible(spoken.ttft_counts), _sensible(spoken.itl_counts)
    return CellCounters(generation, _bounded(spoken.requests_total), _bounded(spoken.errors_total), ttft, itl)


def sample_of(spoken: Spoken, generation: int, before: Totals | None, ttft_objective_ms: float | None) -> Sample:
    """What a cell added since `before`. None: nothing is known of what it had counted, so nothing counts as added.

    A count that began anew, with the cell or its proxy, is all new.
    """
    now = counters_of(spoken, generation)
    added = CellCounters() if before is None else now.since(_counters(before)) or now
    limit = None if ttft_objective_ms is None else bucket_of(ttft_objective_ms / 1000)
    return Sample(
        requests=added.requests,
        errors=added.errors,
        slow=0 if limit is None else share_above(added.ttft, limit),
        cells=1.0,
        in_flight=float(_bounded(spoken.in_flight)),
        queued=float(_bounded(spoken.queued)),
        tokens_per_s=max(0.0, min(spoken.tokens_per_s, float(MOST))),
        ttft=dict(added.ttft),
        itl=dict(added.itl),
    )


def totals_of(spoken: Spoken, generation: int) -> Totals:
    """What to remember of a cell until the next look."""
    now = counters_of(spoken, generation)
    return Totals(now.generation, now.requests, now.errors, dict(now.ttft), dict(now.itl))


def pooled(samples: Iterable[Sample]) -> Sample:
    """Samples of several cells at the same time as one."""
    total = Sample()
    for sample in samples:
        _add(total, sample)
    return total


def fine_index(now_s: float) -> int:
    """The fine window that a moment lies in; looks in the same one count once."""
    return int(now_s // FINE_S)


def advance(memory: Memory, sample: Sample | None, now_s: float) -> list[Figures]:
    """Take a look into the memory, which changes, and return the windows that are finished.

    Without a sample only those long windows are finished whose time is over. A fine window is called by the last one
    that is over, also where it covers more, because nobody looked for a while.
    """
    done = [_finished(step, memory.filling.pop(step)) for step in _over(memory, now_s)]
    if sample is None:
        return done
    covered_s = FINE_S if memory.at is None else max(1.0, now_s - memory.at)
    memory.at = now_s
    done.append(_finished(FINE_S, Sum(fine_index(now_s) - 1, 1, covered_s, sample)))
    for step in COARSE_S:
        filling = memory.filling.setdefault(step, Sum(_coarse_index(step, now_s)))
        filling.samples += 1
        filling.covered_s += covered_s
        _add(filling.total, sample)
    return done


def quantile_ms(counts: Buckets, q: float) -> float | None:
    """The `q` quantile (0..1) of counted latencies, in milliseconds; None without any."""
    return round(middle_s(quantile_bucket(counts, q)) * 1000, 3) if counts else None


def _coarse_index(step: int, now_s: float) -> int:
    """A look speaks of the time before it: that of a full hour belongs to the hour that ends."""
    return int((now_s - FINE_S / 2) // step)


def _over(memory: Memory, now_s: float) -> list[int]:
    return [step for step, filling in memory.filling.items() if filling.index < _coarse_index(step, now_s)]


def _finished(step: int, filled: Sum) -> Figures:
    total, samples = filled.total, max(1, filled.samples)
    return Figures(
        step_s=step,
        at=datetime.fromtimestamp(filled.index * step, UTC),
        covered_s=round(filled.covered_s, 3),
        requests=total.requests,
        errors=total.errors,
        slow=total.slow,
        cells=total.cells / samples,
        in_flight=total.in_flight / samples,
        queued=total.queued / samples,
        tokens_per_s=total.tokens_per_s / samples,
        ttft_p50_ms=quantile_ms(total.ttft, 0.50),
        ttft_p95_ms=quantile_ms(total.ttft, 0.95),
        itl_p50_ms=quantile_ms(total.itl, 0.50),
        itl_p95_ms=quantile_ms(total.itl, 0.95),
    )


def _add(total: Sample, more: Sample) -> None:
    total.requests += more.requests
    total.errors += more.errors
    total.slow += more.slow
    total.cells += more.cells
    total.in_flight += more.in_flight
    total.queued += more.queued
    total.tokens_per_s += more.tokens_per_s
    for mine, others in ((total.ttft, more.ttft), (total.itl, more.itl)):
        for bucket, count in others.items():
            mine[bucket] = mine.get(bucket, 0) + count


def _counters(totals: Totals) -> CellCounters:
    return CellCounters(totals.generation, totals.requests, totals.errors, totals.ttft, totals.itl)


def _bounded(count: int) -> int:
    return max(0, min(count, MOST))


def _sensible(counts: Mapping[int, int]) -> Buckets:
    return {bucket: _bounded(count) for bucket, count in counts.items() if 0 <= bucket <= MOST_BUCKET and count > 0}
