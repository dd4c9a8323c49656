"""Counts what passes through one cell: requests, errors, tokens, time to first token, time between tokens. Pure: `now`
is an argument. It measures requests of clients only; probes do not appear here."""

from collections import Counter, deque

from engine_agent.protocol.messages import Load
from engine_agent.proxy.histogram import SlidingHistogram

WINDOW_S = 30
"""`engine_agent.protocol.messages.Load`: percentiles and rates cover the last 30 s."""


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


class Meter:
    """Everything measured about one cell since its proxy started."""

    def __init__(self, started_at: float) -> None:
        self.ttft = SlidingHistogram(WINDOW_S)
        self.itl = SlidingHistogram(WINDOW_S)
        self.requests_total = 0
        self.errors_total = 0
        self.tokens_total = 0
        self.answers: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self._tokens = SlidingSum()
        self._started_at = started_at

    def admitted(self) -> None:
        """A request passed admission."""
        self.requests_total += 1

    def refused(self, code: str) -> None:
        """A request did not pass admission."""
        self.refusals[code] += 1

    def first_token(self, now: float, ttft_s: float) -> None:
        """The first event of a stream, `ttft_s` after its request came in."""
        self.ttft.record(now, ttft_s)

    def next_tokens(self, now: float, gap_s: float) -> None:
        """Further events of a stream, `gap_s` after the last: the wait that the reader feels."""
        self.itl.record(now, gap_s)

    def tokens(self, now: float, count: int) -> None:
        """Tokens seen while they pass; negative when the end of an answer shows that fewer were tokens."""
        self._tokens.add(now, count)

    def finished(self, *, status: int, failed: bool, tokens: int) -> None:
        """An admitted request ended. `failed`: by the engine's or our fault."""
        self.answers[f"{status // 100}xx"] += 1
        self.errors_total += failed
        self.tokens_total += tokens

    def load(self, now: float, *, in_flight: int, max_concurrency: int) -> Load:
        """The protocol's view: `queued` is what exceeds the number of requests that the cell runs at once."""
        covered_s = min(WINDOW_S, max(1.0, now - self._started_at))
        return Load(
            in_flight=in_flight,
            queued=max(0, in_flight - max_concurrency),
            tokens_per_s=round(max(0, self._tokens.value(now)) / covered_s, 2),
            ttft_p50_ms=_ms(self.ttft.quantile(now, 0.50)),
            ttft_p99_ms=_ms(self.ttft.quantile(now, 0.99)),
            itl_p50_ms=_ms(self.itl.quantile(now, 0.50)),
            itl_p99_ms=_ms(self.itl.quantile(now, 0.99)),
            requests_total=self.requests_total,
            errors_total=self.errors_total,
            ttft_counts=self.ttft.counts(),
            itl_counts=self.itl.counts(),
        )


def _ms(value_s: float | None) -> float | None:
    return None if value_s is None else round(value_s * 1000, 3)
