"""Counts what passes through one cell, by class and tenant: requests, errors, tokens, time to first token, time between
tokens. It measures requests of clients; of probes it knows only what they used."""

from collections import Counter, deque
from dataclasses import dataclass

from engine_agent.cell_proxy.admission import RequestMetadata
from engine_agent.cell_proxy.batch_window import MIN_ITLS, MIN_TTFTS, STEER_EVERY_S, RealtimeLatency
from engine_agent.cell_proxy.histogram import SlidingHistogram
from engine_agent.cell_proxy.usage_rows import UsageCounts, UsageRows
from engine_agent.protocol.messages import (
    BatchLoad,
    CacheLoad,
    CellWork,
    ClassLoad,
    HandoverLoad,
    Load,
    TokenCheck,
)
from engine_agent.protocol.states import ServingClass

WINDOW_S = 30
"""`engine_agent.protocol.messages.Load`: percentiles and rates cover the last 30 s."""
BYTES_PER_TOKEN = 4.0
"""Of English text in a body, until this cell has seen for itself (OpenAI's rule of thumb)."""
LONG_BYTES = 2048
"""Bodies from here on are nearly all prompt."""


class SlidingSum:
    """A sum over a window of whole seconds."""

    def __init__(self, window_s: int = WINDOW_S) -> None:
        self._window_s = window_s
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
        while self._seconds and self._seconds[0][0] <= second - self._window_s:
            self._sum -= self._seconds.popleft()[1]


class ClassMeter:
    """What one serving class did since the proxy started."""

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


class RealtimeMeter:
    """What real-time requests felt since the last step of the window of batch work."""

    def __init__(self) -> None:
        self.ttft = SlidingHistogram(STEER_EVERY_S)
        self.itl = SlidingHistogram(STEER_EVERY_S)

    def latency(self, now: float) -> RealtimeLatency:
        return RealtimeLatency(_p95(self.ttft, now, MIN_TTFTS), _p95(self.itl, now, MIN_ITLS))


def _p95(histogram: SlidingHistogram, now: float, least: int) -> float | None:
    return histogram.quantile(now, 0.95) if histogram.recent_count(now) >= least else None


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request. `prompt` None: the engine did not say. `cached` are part of it. `estimated`: no engine
    said what was used."""

    prompt: int | None
    completion: int
    cached: int = 0
    estimated: bool = False


@dataclass(slots=True)
class ProbeMeter:
    """What the proxy's own questions to the engine used, and prompts that were read for decode cells: none of it is a
    client's. `unknown`: how many did not say what."""

    begun: int = 0
    running: int = 0
    unknown: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Meter:
    """Everything measured about one cell since its proxy started."""

    def __init__(self, started_at: float) -> None:
        self.itl = SlidingHistogram(WINDOW_S)
        self.ttft = SlidingHistogram(WINDOW_S)
        self.classes: dict[ServingClass, ClassMeter] = {}
        self.realtime = RealtimeMeter()
        self.usage = UsageRows()
        self.probes = ProbeMeter()
        self.untold_total = 0
        """Requests of which no engine said what they used, or had counted by then."""
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
        """A request passed admission. Returns the row that it is counted in, which `ended` and `settled` want back."""
        meter = self.of(metadata.serving_class)
        row = self.usage.of(metadata.tenant, metadata.key, metadata.serving_class, adapter=metadata.adapter)
        for each in (meter, row):
            each.in_flight += 1
        meter.requests_total += 1
        row.requests += 1
        return row

    def refused(self, metadata: RequestMetadata, code: str) -> None:
        """A request did not pass admission."""
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
        """Tokens seen while they pass; negative when the end of an answer shows that fewer were tokens."""
        self._tokens.add(now, count)

    def ended(
        self, metadata: RequestMetadata, row: UsageCounts, *, status: int, failed: bool, cancelled: bool = False
    ) -> None:
        """An admitted request ended. `failed`: by the engine's or our fault; `cancelled`: its client or its deadline
        ended it. A failure of 503 is handed back: the ingress tries it elsewhere, and counts it if that fails too."""
        meter = self.of(metadata.serving_class)
        is_handed_back = failed and status == 503
        meter.answers[f"{status // 100}xx"] += 1
        meter.errors_total += failed
        meter.handed_back_total += is_handed_back
        row.errors += failed and not is_handed_back
        row.cancelled += cancelled

    def settled(self, metadata: RequestMetadata, row: UsageCounts, usage: Usage, *, body_bytes: int) -> Usage:
        """It is known what a request used that has ended; until then it is in flight. `body_bytes`: of its question.
        Returns what was counted."""
        prompt = self._prompt_tokens(usage, body_bytes)
        meter = self.of(metadata.serving_class)
        meter.in_flight -= 1
        meter.prompt_tokens_total += prompt
        meter.completion_tokens_total += usage.completion
        row.in_flight -= 1
        row.estimated += usage.estimated
        row.prompt_tokens += prompt
        row.cached_tokens += usage.cached
        row.completion_tokens += usage.completion
        return Usage(prompt, usage.completion, usage.cached, usage.estimated)

    def _prompt_tokens(self, usage: Usage, body_bytes: int) -> int:
        """As the engine reports. Where it reports nothing: as many as bodies of that length had so far, for what was
        read costs the same whether the answer is waited for or not."""
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
        """Of a long prompt of this length, as an estimate: as many as in long bodies so far. What is around a prompt is
        most of a short body, and says nothing of long ones."""
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
        """The protocol's view: `queued` is what exceeds the number of requests that the cell runs at once."""
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
    """As reports have durations; None: not known."""
    return None if value_s is None else round(value_s * 1000, 3)
