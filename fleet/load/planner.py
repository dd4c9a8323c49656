"""Arithmetic on counted load: counters of cells and their differences, windows over time, and comparison of two sets of
bucket counts. Knows no table and no clock. Latencies are added as bucket counts of `engine_agent.protocol.metrics`, so
percentiles of long windows or many cells are those of all their samples. Samples in one bucket are ties."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec

from engine_agent.protocol.load_messages import CacheLoad, CellWork, EngineLoad, Load
from engine_agent.protocol.metrics import bucket_of, midpoint_s

FRESH_FOR_S = 15.0
"""Agents report or send a heartbeat every 2 s; older reports are not current (docs/architecture.md, traffic)."""
HELD_FOR_S = FRESH_FOR_S + 60.0
"""Age limit of a report that heartbeats follow (`engine_agent.node.planning.heartbeats.REPORT_AT_LEAST_EVERY_S`)."""
Counts = Mapping[int, int]
"""Bucket -> number of samples; buckets are ordered by number."""


def total(counts: Counts) -> int:
    return sum(counts.values())


def quantile_bucket(counts: Counts, q: float) -> int:
    """The bucket of the `q` quantile (0..1). Raises ValueError if there are no samples."""
    wanted, seen = max(1, math.ceil(q * total(counts))), 0
    for bucket in sorted(counts):
        seen += counts[bucket]
        if seen >= wanted:
            return bucket
    raise ValueError("no samples have no quantile")


def count_above(counts: Counts, bucket: int) -> int:
    """Number of samples in higher buckets."""
    return sum(count for other, count in counts.items() if other > bucket)


def greater_by_chance(one: Counts, other: Counts) -> float:
    """Probability that samples of one kind would be split into these two with `one` ranking this high above `other`.

    Mann-Whitney U, one-sided, normal approximation with continuity and tie correction (Lehmann, Nonparametrics, 1.4);
    good from about 20 samples each. 1.0 where either is empty or all samples are alike."""
    n, m = total(one), total(other)
    if not n or not m:
        return 1.0
    below, u, ties = 0, 0.0, 0.0
    for bucket in sorted({*one, *other}):
        here, there = one.get(bucket, 0), other.get(bucket, 0)
        u += here * (below + there / 2)
        below += there
        ties += (here + there) ** 3 - (here + there)
    size = n + m
    variance = n * m / 12 * (size + 1 - ties / (size * (size - 1)))
    if variance <= 0:
        return 1.0
    return _upper_tail((u - n * m / 2 - 0.5) / math.sqrt(variance))


def more_by_chance(hits: int, tries: int, other_hits: int, other_tries: int) -> float:
    """Probability that `hits` or more of all hits fall among these tries if both kinds are alike. Fisher's exact test,
    one-sided: the hypergeometric tail. 1.0 without tries or hits."""
    all_hits, all_tries = hits + other_hits, tries + other_tries
    if not tries or not other_tries or not all_hits:
        return 1.0
    whole = _log_choose(all_tries, tries)
    most = min(all_hits, tries)
    chances = (
        math.exp(_log_choose(all_hits, k) + _log_choose(all_tries - all_hits, tries - k) - whole)
        for k in range(max(hits, tries - (all_tries - all_hits)), most + 1)
    )
    return min(1.0, math.fsum(chances))


def _upper_tail(z: float) -> float:
    return 0.5 * math.erfc(z / math.sqrt(2))


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


MAX_COUNT = 2**53
"""Real counts are smaller; a larger report must not break other sums."""
MAX_BUCKET = 1023
"""Latency buckets end here; reported ones beyond are ignored."""


class CellCounters(msgspec.Struct, frozen=True, array_like=True):
    """Totals of one generation of a cell. They only grow; a smaller number is another counter. `handed_back`: errors
    that the ingress retries elsewhere and counts if they fail there. `passed_on`: errors of streams that a relay
    continues elsewhere, or counts as cut; `continued`: requests that are such streams of other cells. `cached_tokens`:
    prompt tokens found in the prefix cache. `steps` of the engine took `busy_ms`."""

    generation: int = 0
    requests: int = 0
    errors: int = 0
    ttft: Counts = {}
    itl: Counts = {}
    handed_back: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    busy_ms: int = 0
    passed_on: int = 0
    continued: int = 0

    def since(self, before: "CellCounters") -> "CellCounters | None":
        """The increase since then, or None after a restart of the cell or its proxy."""
        if self.generation != before.generation or self.requests < before.requests or self.errors < before.errors:
            return None
        return CellCounters(
            self.generation,
            self.requests - before.requests,
            self.errors - before.errors,
            _difference(self.ttft, before.ttft),
            _difference(self.itl, before.itl),
            max(0, self.handed_back - before.handed_back),
            _growth(self.prompt_tokens, before.prompt_tokens),
            _growth(self.cached_tokens, before.cached_tokens),
            _growth(self.preemptions, before.preemptions),
            _growth(self.steps, before.steps),
            _growth(self.busy_ms, before.busy_ms),
            max(0, self.passed_on - before.passed_on),
            max(0, self.continued - before.continued),
        )


def counters_of(load: Load, generation: int) -> CellCounters:
    """Reported counters of a cell's generation, clipped to possible values."""
    cache, engine, work = load.cache or CacheLoad(), load.engine or EngineLoad(), load.work or CellWork(0.0)
    return CellCounters(
        generation,
        bounded(load.requests_total),
        bounded(load.errors_total),
        _valid(load.ttft_counts),
        _valid(load.itl_counts),
        bounded(load.handed_back_total),
        bounded(load.prompt_tokens_total),
        bounded(cache.found_tokens_total + cache.other_found_tokens_total),
        bounded(engine.preemptions_total),
        bounded(work.steps),
        bounded(work.busy_ms),
        bounded(load.passed_on_total),
        bounded(load.continued_total),
    )


def bounded(count: int) -> int:
    """A reported count, from 0 to `MAX_COUNT`."""
    return max(0, min(count, MAX_COUNT))


def pooled(counts: Iterable[CellCounters]) -> CellCounters:
    """The sum of all; its generation has no meaning."""
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
    for bucket, count in more.items():
        total[bucket] = total.get(bucket, 0) + count


def _growth(after: int, before: int) -> int:
    """The increase of a counter that may restart alone, with the engine."""
    return after - before if after >= before else after


def _difference(after: Counts, before: Counts) -> dict[int, int]:
    left = {bucket: count - before.get(bucket, 0) for bucket, count in after.items()}
    return {bucket: count for bucket, count in left.items() if count > 0}


def _valid(counts: Mapping[int, int]) -> dict[int, int]:
    return {bucket: bounded(count) for bucket, count in counts.items() if 0 <= bucket <= MAX_BUCKET and count > 0}


FINE_S = 15
KEPT_S: Mapping[int, int] = {FINE_S: 3600, 300: 86_400, 3600: 14 * 86_400}
"""Step of a window -> retention: 240, 288 and 336 windows per subject."""
COARSE_S = tuple(step for step in KEPT_S if step != FINE_S)


MINUTE_S = 60
NODE_KEPT_S: Mapping[int, int] = {MINUTE_S: 6 * 3600, 300: 86_400, 3600: 14 * 86_400}
"""Step of a node's window -> retention: 360, 288 and 336 windows per node."""
NODE_GAUGES = (
    *("cpu_percent", "memory_percent", "disk_percent", "utilisation_percent", "device_memory_percent"),
    *("clock_percent", "temperature_c", "power_watts"),
)
NODE_ERRORS = ("ecc_errors", "link_errors")
NODE_TOTALS = ("network_received", "network_sent", "disk_read", "disk_written", *NODE_ERRORS)
"""Columns of a node's window: means, and totals since the machine or its driver started."""


class Sample(msgspec.Struct, array_like=True):
    """Increase of a series between two moments, and its gauges at the second. `handed_back`, `passed_on` and
    `continued` are those of `CellCounters`. `engines` cells reported an engine's batch, and `kv_cells` a KV cache;
    `kv_percent` is their sum."""

    requests: int = 0
    errors: int = 0
    slow: int = 0
    cells: float = 0.0
    in_flight: float = 0.0
    queued: float = 0.0
    tokens_per_s: float = 0.0
    ttft: dict[int, int] = msgspec.field(default_factory=dict)
    itl: dict[int, int] = msgspec.field(default_factory=dict)
    handed_back: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    busy_ms: int = 0
    engines: int = 0
    running: int = 0
    waiting: int = 0
    kv_cells: int = 0
    kv_percent: float = 0.0
    passed_on: int = 0
    continued: int = 0


class OpenWindow(msgspec.Struct, array_like=True):
    """A long window in progress: the sum of `samples` samples over `covered_s` seconds."""

    index: int
    samples: int = 0
    covered_s: float = 0.0
    total: Sample = msgspec.field(default_factory=Sample)


class Accumulator(msgspec.Struct, array_like=True):
    """Base of a series' next window: time of its last sample in seconds since 1970, its cell's counters then, and its
    long windows by step."""

    at: float | None = None
    counters: CellCounters | None = None
    open: dict[int, OpenWindow] = msgspec.field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FinishedWindow:
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
    prompt_tokens: int
    preemptions: int
    ttft_p99_ms: float | None
    running: float | None
    waiting: float | None
    kv_percent: float | None
    cache_hit_percent: float | None
    step_ms: float | None


def sample_of(load: Load, generation: int, before: CellCounters | None, ttft_objective_ms: float | None) -> Sample:
    """A cell's increase since `before`. Without `before` nothing counts. A counter that restarted, with the cell or its
    proxy, counts completely."""
    now = counters_of(load, generation)
    added = CellCounters() if before is None else now.since(before) or now
    limit = None if ttft_objective_ms is None else bucket_of(ttft_objective_ms / 1000)
    engine = load.engine or EngineLoad()
    return Sample(
        requests=added.requests,
        errors=added.errors,
        slow=0 if limit is None else count_above(added.ttft, limit),
        cells=1.0,
        in_flight=float(bounded(load.in_flight)),
        queued=float(bounded(load.queued)),
        tokens_per_s=max(0.0, min(load.tokens_per_s, float(MAX_COUNT))),
        ttft=dict(added.ttft),
        itl=dict(added.itl),
        handed_back=added.handed_back,
        prompt_tokens=added.prompt_tokens,
        cached_tokens=added.cached_tokens,
        preemptions=added.preemptions,
        steps=added.steps,
        busy_ms=added.busy_ms,
        engines=int(load.engine is not None),
        running=bounded(engine.running),
        waiting=bounded(engine.waiting),
        kv_cells=int(engine.kv_percent is not None),
        kv_percent=max(0.0, min(engine.kv_percent or 0.0, 100.0)),
        passed_on=added.passed_on,
        continued=added.continued,
    )


def seen_by_clients(sample: Sample) -> Sample:
    """The same from the clients' view, who got one response per request. A stream that continued is one request, of
    the cell where it began, and a success."""
    back = min(sample.handed_back, sample.requests, sample.errors)
    return msgspec.structs.replace(
        sample,
        requests=max(0, sample.requests - back - sample.continued),
        errors=max(0, sample.errors - back - sample.passed_on),
        handed_back=0,
        passed_on=0,
        continued=0,
    )


def refused_sample(count: int, cut: int = 0) -> Sample:
    """Requests that no cell answered, and streams that were cut, whose cells have counted the request."""
    return Sample(requests=count, errors=count + cut)


def pooled_samples(samples: Iterable[Sample]) -> Sample:
    """The sum of samples of several cells at the same time."""
    total = Sample()
    for sample in samples:
        _add(total, sample)
    return total


def fine_index(now_s: float) -> int:
    """The fine window of a moment. Samples in the same window count once."""
    return int(now_s // FINE_S)


def advance(series: Accumulator, sample: Sample | None, now_s: float) -> list[FinishedWindow]:
    """Adds a sample to the series, which changes, and returns finished windows. Without a sample, only expired long
    windows are finished. A fine window has the number of the last complete one, even if it covers more time."""
    done = [_finished(step, series.open.pop(step)) for step in _finished_steps(series, now_s)]
    if sample is None:
        return done
    covered_s = FINE_S if series.at is None else max(1.0, now_s - series.at)
    series.at = now_s
    done.append(_finished(FINE_S, OpenWindow(fine_index(now_s) - 1, 1, covered_s, sample)))
    for step in COARSE_S:
        window = series.open.setdefault(step, OpenWindow(_coarse_index(step, now_s)))
        window.samples += 1
        window.covered_s += covered_s
        _add(window.total, sample)
    return done


def quantile_ms(counts: Counts, q: float) -> float | None:
    """The `q` quantile (0..1) of counted latencies in milliseconds, or None without samples."""
    return round(midpoint_s(quantile_bucket(counts, q)) * 1000, 3) if total(counts) else None


def _coarse_index(step: int, now_s: float) -> int:
    """A sample covers the time before it, so one at a full hour belongs to the hour that ends."""
    return int((now_s - FINE_S / 2) // step)


def _finished_steps(series: Accumulator, now_s: float) -> list[int]:
    return [step for step, window in series.open.items() if window.index < _coarse_index(step, now_s)]


def _finished(step: int, window: OpenWindow) -> FinishedWindow:
    total, samples = window.total, max(1, window.samples)
    return FinishedWindow(
        step_s=step,
        at=datetime.fromtimestamp(window.index * step, UTC),
        covered_s=round(window.covered_s, 3),
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
        prompt_tokens=total.prompt_tokens,
        preemptions=total.preemptions,
        ttft_p99_ms=quantile_ms(total.ttft, 0.99),
        running=total.running / samples if total.engines else None,
        waiting=total.waiting / samples if total.engines else None,
        kv_percent=_ratio(total.kv_percent, total.kv_cells),
        cache_hit_percent=_ratio(100 * min(total.cached_tokens, total.prompt_tokens), total.prompt_tokens),
        step_ms=_ratio(total.busy_ms, total.steps),
    )


def _ratio(amount: float, of: int) -> float | None:
    return round(amount / of, 3) if of else None


def _add(total: Sample, more: Sample) -> None:
    total.requests += more.requests
    total.errors += more.errors
    total.handed_back += more.handed_back
    total.passed_on += more.passed_on
    total.continued += more.continued
    total.slow += more.slow
    total.cells += more.cells
    total.in_flight += more.in_flight
    total.queued += more.queued
    total.tokens_per_s += more.tokens_per_s
    total.prompt_tokens += more.prompt_tokens
    total.cached_tokens += more.cached_tokens
    total.preemptions += more.preemptions
    total.steps += more.steps
    total.busy_ms += more.busy_ms
    total.engines += more.engines
    total.running += more.running
    total.waiting += more.waiting
    total.kv_cells += more.kv_cells
    total.kv_percent += more.kv_percent
    add_counts(total.ttft, more.ttft)
    add_counts(total.itl, more.itl)
