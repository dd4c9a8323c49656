"""Measures one cell by class and tenant: requests, errors, tokens, time to first token, time between tokens. Of probes
it knows only their tokens."""

import math
from collections import Counter, deque
from dataclasses import dataclass

from engine_agent.cell_proxy.admission import RequestMetadata
from engine_agent.cell_proxy.batch_window import MIN_ITLS, MIN_TTFTS, STEER_EVERY_S, RealtimeLatency
from engine_agent.cell_proxy.usage_rows import UsageCounts, UsageRows
from engine_agent.protocol.load_messages import (
    BatchLoad,
    CacheLoad,
    CellWork,
    ClassLoad,
    HandoverLoad,
    Load,
    TokenCheck,
)
from engine_agent.protocol.metrics import BUCKETS, BUCKETS_PER_DOUBLING, bucket_of, midpoint_s, upper_edge_s
from engine_agent.protocol.states import ServingClass

WINDOW_S = 30
"""Percentiles and rates of `engine_agent.protocol.load_messages.Load` cover the last 30 s."""
BYTES_PER_TOKEN = 4.0
"""For English text in a body, until this cell has its own data (OpenAI's rule of thumb)."""
LONG_BYTES = 2048
"""Longer bodies are nearly all prompt."""


class SlidingHistogram:
    """A histogram of durations, for all time and for a window of whole seconds. It never sorts samples, because
    recording and querying run on the event loop. `now` is an argument."""

    def __init__(self, window_s: int) -> None:
        self.count = 0
        self.sum_s = 0.0
        self._window_s = window_s
        self._all = [0] * BUCKETS
        self._window = [0] * BUCKETS
        self._window_count = 0
        self._seconds: deque[tuple[int, dict[int, int]]] = deque()

    def record(self, now: float, value_s: float) -> None:
        index = bucket_of(value_s)
        self.count += 1
        self.sum_s += value_s
        self._all[index] += 1
        self._window[index] += 1
        self._window_count += 1
        second = int(now)
        if not self._seconds or self._seconds[-1][0] != second:
            self._expire(second)
            self._seconds.append((second, {}))
        slot = self._seconds[-1][1]
        slot[index] = slot.get(index, 0) + 1

    def quantile(self, now: float, q: float) -> float | None:
        """The `q` quantile (0..1) over the window in seconds; None without samples."""
        self._expire(int(now))
        if not self._window_count:
            return None
        wanted = max(1, math.ceil(q * self._window_count))
        seen = 0
        for index, count in enumerate(self._window):
            seen += count
            if seen >= wanted:
                return midpoint_s(index)
        raise AssertionError("the window's buckets do not sum to its count")

    def recent_count(self, now: float) -> int:
        self._expire(int(now))
        return self._window_count

    def counts(self) -> dict[int, int]:
        """Samples of all time by bucket, without the empty buckets."""
        return {index: count for index, count in enumerate(self._all) if count}

    def cumulative(self) -> list[tuple[float, int]]:
        """(upper edge in seconds, samples of all time at or below it), one per doubling, for Prometheus."""
        pairs: list[tuple[float, int]] = []
        seen = 0
        for index, count in enumerate(self._all[:-1]):
            seen += count
            if index % BUCKETS_PER_DOUBLING == 0:
                pairs.append((upper_edge_s(index), seen))
        return pairs

    def _expire(self, second: int) -> None:
        while self._seconds and self._seconds[0][0] <= second - self._window_s:
            for index, count in self._seconds.popleft()[1].items():
                self._window[index] -= count
                self._window_count -= count


class SlidingSum:
    def __init__(self) -> None:
        self._seconds: deque[list[int]] = deque()
        self._sum = 0

    def add(self, now: float, amount: int) -> None:
        second = int(now)
        if not self._seconds or self._seconds[-1][0] != second:
            self._expire(second)
            self._seconds.append([second, 0])
        self._seconds[-1][1] += amount
        self._sum += amount

    def value(self, now: float) -> int:
        self._expire(int(now))
        return self._sum

    def _expire(self, second: int) -> None:
        while self._seconds and self._seconds[0][0] <= second - WINDOW_S:
            self._sum -= self._seconds.popleft()[1]


class ClassMeter:
    """Counts of one serving class since the proxy started."""

    def __init__(self) -> None:
        self.ttft = SlidingHistogram(WINDOW_S)
        self.itl = SlidingHistogram(WINDOW_S)
        self.in_flight = 0
        self.requests_total = 0
        self.errors_total = 0
        self.handed_back_total = 0
        self.prompt_tokens_total = 0
        self.completion_tokens_total = 0
        self.answers: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()

    def load(self, now: float) -> ClassLoad:
        return ClassLoad(
            in_flight=self.in_flight,
            requests_total=self.requests_total,
            errors_total=self.errors_total,
            refused_total=self.refusals.total(),
            prompt_tokens_total=self.prompt_tokens_total,
            completion_tokens_total=self.completion_tokens_total,
            ttft_p50_ms=milliseconds(self.ttft.quantile(now, 0.50)),
            ttft_p99_ms=milliseconds(self.ttft.quantile(now, 0.99)),
            itl_p50_ms=milliseconds(self.itl.quantile(now, 0.50)),
            itl_p99_ms=milliseconds(self.itl.quantile(now, 0.99)),
        )


class RealtimeLatencyMeter:
    """Latency of real-time requests since the last step of the batch window."""

    def __init__(self) -> None:
        self.ttft = SlidingHistogram(STEER_EVERY_S)
        self.itl = SlidingHistogram(STEER_EVERY_S)

    def latency(self, now: float) -> RealtimeLatency:
        return RealtimeLatency(_p95(self.ttft, now, MIN_TTFTS), _p95(self.itl, now, MIN_ITLS))


def _p95(histogram: SlidingHistogram, now: float, least: int) -> float | None:
    return histogram.quantile(now, 0.95) if histogram.recent_count(now) >= least else None


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request. `prompt` None: unknown. `cached` are part of it. `estimated`: no engine reported the
    usage."""

    prompt: int | None
    completion: int
    cached: int = 0
    estimated: bool = False


@dataclass(slots=True)
class ProbeMeter:
    """Tokens of the proxy's own probes, and of prompts read for decode cells. They belong to no client. `unknown`:
    probes without reported usage."""

    begun: int = 0
    running: int = 0
    unknown: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Meter:
    def __init__(self, started_at: float) -> None:
        self.itl = SlidingHistogram(WINDOW_S)
        self.ttft = SlidingHistogram(WINDOW_S)
        self.classes: dict[ServingClass, ClassMeter] = {}
        self.realtime = RealtimeLatencyMeter()
        self.usage = UsageRows()
        self.probes = ProbeMeter()
        self.unreported_total = 0
        """Requests without usage reported by an engine."""
        self._tokens = SlidingSum()
        self._started_at = started_at
        self._sized_bytes = self._sized_tokens = 0
        self._long_bytes = self._long_tokens = 0

    def of(self, serving_class: ServingClass) -> ClassMeter:
        meter = self.classes.get(serving_class)
        if meter is None:
            meter = self.classes[serving_class] = ClassMeter()
        return meter

    def admitted(self, metadata: RequestMetadata) -> UsageCounts:
        """A request passed admission. Returns its usage row, for `ended` and `settled`."""
        meter = self.of(metadata.serving_class)
        row = self.usage.of(metadata.tenant, metadata.key, metadata.serving_class, adapter=metadata.adapter)
        for each in (meter, row):
            each.in_flight += 1
        meter.requests_total += 1
        row.requests_total += 1
        return row

    def refused(self, metadata: RequestMetadata, code: str) -> None:
        self.of(metadata.serving_class).refusals[code] += 1

    def first_token(self, now: float, ttft_s: float, serving_class: ServingClass = ServingClass.REALTIME) -> None:
        """The first event of a stream, `ttft_s` after its request came in."""
        self.ttft.record(now, ttft_s)
        self.of(serving_class).ttft.record(now, ttft_s)
        if serving_class is ServingClass.REALTIME:
            self.realtime.ttft.record(now, ttft_s)

    def next_tokens(self, now: float, gap_s: float, serving_class: ServingClass = ServingClass.REALTIME) -> None:
        """Further events of a stream, `gap_s` after the last: the wait that the reader feels."""
        self.itl.record(now, gap_s)
        self.of(serving_class).itl.record(now, gap_s)
        if serving_class is ServingClass.REALTIME:
            self.realtime.itl.record(now, gap_s)

    def tokens(self, now: float, count: int) -> None:
        """Tokens seen as they pass; negative if the end of an answer shows that there were fewer."""
        self._tokens.add(now, count)

    def ended(
        self, metadata: RequestMetadata, row: UsageCounts, *, status: int, failed: bool, cancelled: bool = False
    ) -> None:
        """An admitted request ended. `failed`: the engine or the proxy failed it; `cancelled`: its client or its
        deadline ended it. A failure with 503 is handed back: the ingress tries it elsewhere, and counts it if that
        fails as well."""
        meter = self.of(metadata.serving_class)
        is_handed_back = failed and status == 503
        meter.answers[f"{status // 100}xx"] += 1
        meter.errors_total += failed
        meter.handed_back_total += is_handed_back
        row.errors_total += failed and not is_handed_back
        row.cancelled_total += cancelled

    def settled(self, metadata: RequestMetadata, row: UsageCounts, usage: Usage, *, body_bytes: int) -> Usage:
        """The usage of a request that has ended is known. Until then it counts as in flight. `body_bytes`: length of
        its request body. Returns the counted usage."""
        prompt = self._prompt_tokens(usage, body_bytes)
        meter = self.of(metadata.serving_class)
        meter.in_flight -= 1
        meter.prompt_tokens_total += prompt
        meter.completion_tokens_total += usage.completion
        row.in_flight -= 1
        row.estimated_total += usage.estimated
        row.prompt_tokens_total += prompt
        row.cached_tokens_total += usage.cached
        row.completion_tokens_total += usage.completion
        return Usage(prompt, usage.completion, usage.cached, usage.estimated)

    def _prompt_tokens(self, usage: Usage, body_bytes: int) -> int:
        """As reported by the engine, else estimated from the bodies so far: reading a prompt costs the same whether or
        not the client waits."""
        if usage.prompt is None:
            known = self._sized_bytes > 0
            return round(body_bytes * self._sized_tokens / self._sized_bytes if known else body_bytes / BYTES_PER_TOKEN)
        if usage.prompt:
            self._sized_bytes += body_bytes
            self._sized_tokens += usage.prompt
            if body_bytes >= LONG_BYTES:
                self._long_bytes += body_bytes
                self._long_tokens += usage.prompt
        return usage.prompt

    def tokens_of_long(self, text_bytes: int) -> int:
        """Estimates the tokens of a long prompt from long bodies so far. In short bodies, most bytes are not prompt."""
        known = self._long_bytes > 0
        return round(text_bytes * self._long_tokens / self._long_bytes if known else text_bytes / BYTES_PER_TOKEN)

    @property
    def requests_total(self) -> int:
        return sum(meter.requests_total for meter in self.classes.values())

    @property
    def errors_total(self) -> int:
        return sum(meter.errors_total for meter in self.classes.values())

    @property
    def handed_back_total(self) -> int:
        return sum(meter.handed_back_total for meter in self.classes.values())

    @property
    def prompt_tokens_total(self) -> int:
        return sum(meter.prompt_tokens_total for meter in self.classes.values())

    @property
    def tokens_total(self) -> int:
        return sum(meter.completion_tokens_total for meter in self.classes.values())

    def load(
        self,
        now: float,
        *,
        in_flight: int,
        max_concurrency: int,
        token_check: TokenCheck | None = None,
        work: CellWork | None = None,
        batch: BatchLoad | None = None,
        handovers: HandoverLoad | None = None,
        cache: CacheLoad | None = None,
    ) -> Load:
        """The load as the protocol defines it. `queued`: requests beyond the cell's concurrency."""
        covered_s = min(WINDOW_S, max(1.0, now - self._started_at))
        return Load(
            in_flight=in_flight,
            queued=max(0, in_flight - max_concurrency),
            tokens_per_s=round(max(0, self._tokens.value(now)) / covered_s, 2),
            ttft_p50_ms=milliseconds(self.ttft.quantile(now, 0.50)),
            ttft_p99_ms=milliseconds(self.ttft.quantile(now, 0.99)),
            itl_p50_ms=milliseconds(self.itl.quantile(now, 0.50)),
            itl_p99_ms=milliseconds(self.itl.quantile(now, 0.99)),
            requests_total=self.requests_total,
            errors_total=self.errors_total,
            handed_back_total=self.handed_back_total,
            prompt_tokens_total=self.prompt_tokens_total,
            ttft_counts=self.ttft.counts(),
            itl_counts=self.itl.counts(),
            classes={name.value: meter.load(now) for name, meter in self.classes.items()},
            usage=self.usage.rows(),
            token_check=token_check,
            work=work,
            batch=batch,
            handovers=handovers,
            cache=cache,
        )


def milliseconds(value_s: float | None) -> float | None:
    return None if value_s is None else round(value_s * 1000, 3)
