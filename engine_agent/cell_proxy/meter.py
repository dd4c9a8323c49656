"""Measures one cell by class and tenant: requests, errors, tokens, time to first token, time between tokens. Of probes
it knows only their tokens."""

import math
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec

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
_STATUS_NAMES = tuple(f"{hundreds}xx" for hundreds in range(10))
Latency = Literal["ttft", "itl"]


class SlidingHistogram:
    """A histogram of durations, for all time and for a window of whole seconds. It never sorts samples, because
    recording and querying run on the event loop. `now` is an argument.

    Each chunk of a stream is recorded, so recording only adds to the buckets of the current second. They are added to
    the totals once they are queried, or the second is over."""

    def __init__(self, window_s: int) -> None:
        self.sum_s = 0.0
        self._window_s = window_s
        self._all: Counter[int] = Counter()
        self._window: Counter[int] = Counter()
        self._seconds: deque[tuple[int, Counter[int]]] = deque()
        self._second = -1
        self._new: dict[int, int] = {}
        """Samples of the current second that are not in the totals."""

    def record(self, now: float, value_s: float) -> None:
        second = int(now)
        if second != self._second:
            self._begin_second(second)
        index = bucket_of(value_s)
        new = self._new
        new[index] = new.get(index, 0) + 1
        self.sum_s += value_s

    @property
    def count(self) -> int:
        """Samples of all time."""
        self._add_new()
        return self._all.total()

    def quantile(self, now: float, q: float) -> float | None:
        """The `q` quantile (0..1) over the window in seconds; None without samples."""
        return _quantile(self.recent(now), q)

    def recent_count(self, now: float) -> int:
        return self.recent(now).total()

    def recent(self, now: float, seconds: int | None = None) -> Counter[int]:
        """Samples by bucket of the last `seconds`; None: of the window."""
        self._add_new()
        self._expire(int(now))
        if seconds is None:
            return self._window
        after = int(now) - seconds
        return sum((counts for second, counts in self._seconds if second > after), Counter[int]())

    def counts(self) -> dict[int, int]:
        """Samples of all time by bucket, without the empty buckets."""
        self._add_new()
        return dict(sorted(self._all.items()))

    def _begin_second(self, second: int) -> None:
        self._add_new()
        self._expire(second)
        self._second = second

    def _add_new(self) -> None:
        if not self._new:
            return
        if not self._seconds or self._seconds[-1][0] != self._second:
            self._seconds.append((self._second, Counter()))
        for counts in (self._all, self._window, self._seconds[-1][1]):
            counts.update(self._new)
        self._new = {}

    def _expire(self, second: int) -> None:
        while self._seconds and self._seconds[0][0] <= second - self._window_s:
            self._window -= self._seconds.popleft()[1]


def cumulative(counts: Mapping[int, int]) -> list[tuple[float, int]]:
    """(upper edge in seconds, samples at or below it), one per doubling, for Prometheus. `counts`: by bucket."""
    pairs: list[tuple[float, int]] = []
    seen = 0
    for index in range(BUCKETS - 1):
        seen += counts.get(index, 0)
        if index % BUCKETS_PER_DOUBLING == 0:
            pairs.append((upper_edge_s(index), seen))
    return pairs


def _quantile(counts: Counter[int], q: float) -> float | None:
    wanted = max(1, math.ceil(q * counts.total()))
    seen = 0
    for index in sorted(counts):
        seen += counts[index]
        if seen >= wanted:
            return midpoint_s(index)
    return None


def _p95(counts: Counter[int], least: int) -> float | None:
    return _quantile(counts, 0.95) if counts.total() >= least else None


class SlidingSum:
    def __init__(self) -> None:
        self._seconds: deque[list[int]] = deque()
        self._current = [-1, 0]
        self._sum = 0

    def add(self, now: float, amount: int) -> None:
        second = int(now)
        if self._current[0] != second:
            self._expire(second)
            self._current = [second, 0]
            self._seconds.append(self._current)
        self._current[1] += amount
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
        """From a request's arrival to the first event of its stream."""
        self.itl = SlidingHistogram(WINDOW_S)
        """Between later events: the wait that the reader feels."""
        self.in_flight = 0
        self.requests_total = 0
        self.errors_total = 0
        self.handed_back_total = 0
        self.passed_on_total = 0
        self.continued_total = 0
        self.prompt_tokens_total = 0
        self.completion_tokens_total = 0
        self.answers: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()

    def of(self, name: Latency) -> SlidingHistogram:
        return self.ttft if name == "ttft" else self.itl

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


class Usage(msgspec.Struct, frozen=True):
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
        self.classes: dict[ServingClass, ClassMeter] = {}
        self.usage = UsageRows()
        self.probes = ProbeMeter()
        self.unreported_total = 0
        """Requests without usage reported by an engine."""
        self.replayed_total = 0
        """Tokens that the engine read as prompts, and that are no prompt or that another cell has counted."""
        self.recounted_total = 0
        """Generated tokens of other cells that this one counted, because those failed before they could."""
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
        meter.continued_total += metadata.replayed is not None
        row.requests_total += metadata.replayed is None  # the first cell has counted the request
        return row

    def refused(self, metadata: RequestMetadata, code: str) -> None:
        self.of(metadata.serving_class).refusals[code] += 1

    def ttft_p50_s(self, now: float) -> float | None:
        return _quantile(self._recent("ttft", now), 0.5)

    def realtime_latency(self, now: float) -> RealtimeLatency:
        """Latency of real-time requests since the last step of the batch window."""
        meter = self.classes.get(ServingClass.REALTIME)
        if meter is None:
            return RealtimeLatency()
        return RealtimeLatency(
            _p95(meter.ttft.recent(now, STEER_EVERY_S), MIN_TTFTS), _p95(meter.itl.recent(now, STEER_EVERY_S), MIN_ITLS)
        )

    def all_counts(self, name: Latency) -> dict[int, int]:
        """Samples of all classes and all time by bucket."""
        total: Counter[int] = Counter()
        for each in self.classes.values():
            total.update(each.of(name).counts())
        return dict(sorted(total.items()))

    def _recent(self, name: Latency, now: float) -> Counter[int]:
        return sum((each.of(name).recent(now) for each in self.classes.values()), Counter[int]())

    def tokens(self, now: float, count: int) -> None:
        """Tokens seen as they pass; negative if the end of an answer shows that there were fewer."""
        self._tokens.add(now, count)

    def ended(
        self,
        metadata: RequestMetadata,
        row: UsageCounts,
        *,
        status: int,
        failed: bool,
        passed_on: bool = False,
        cancelled: bool = False,
    ) -> None:
        """An admitted request ended. `failed`: the engine or the proxy failed it; `cancelled`: its client or its
        deadline ended it. A failure with 503 is handed back: the ingress tries it elsewhere, and counts it if that
        fails as well. So does a relay with a failure that is `passed_on`: its stream continues elsewhere."""
        meter = self.of(metadata.serving_class)
        is_handed_back = failed and status == 503 and not passed_on
        meter.answers[_STATUS_NAMES[status // 100]] += 1
        meter.errors_total += failed
        meter.handed_back_total += is_handed_back
        meter.passed_on_total += passed_on
        row.errors_total += failed and not (is_handed_back or passed_on)
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
    def passed_on_total(self) -> int:
        return sum(meter.passed_on_total for meter in self.classes.values())

    @property
    def continued_total(self) -> int:
        return sum(meter.continued_total for meter in self.classes.values())

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
        ttft, itl = self._recent("ttft", now), self._recent("itl", now)
        covered_s = min(WINDOW_S, max(1.0, now - self._started_at))
        return Load(
            in_flight=in_flight,
            queued=max(0, in_flight - max_concurrency),
            tokens_per_s=round(max(0, self._tokens.value(now)) / covered_s, 2),
            ttft_p50_ms=milliseconds(_quantile(ttft, 0.50)),
            ttft_p99_ms=milliseconds(_quantile(ttft, 0.99)),
            itl_p50_ms=milliseconds(_quantile(itl, 0.50)),
            itl_p99_ms=milliseconds(_quantile(itl, 0.99)),
            requests_total=self.requests_total,
            errors_total=self.errors_total,
            handed_back_total=self.handed_back_total,
            passed_on_total=self.passed_on_total,
            continued_total=self.continued_total,
            prompt_tokens_total=self.prompt_tokens_total,
            ttft_counts=self.all_counts("ttft"),
            itl_counts=self.all_counts("itl"),
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
