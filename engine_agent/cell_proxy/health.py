"""Evaluates the engine's health from probes and from tokens of requests. Tokens are evidence for an engine, and no
request is evidence against it. Pure: every method takes `now` (seconds of any monotonic clock). It decides when a probe
is due; `probes` runs it. Healthy means alive (the engine's /health answers) and proven: its golden prompts were
answered as its version must, once, and a real token was generated since the last hard failure."""

from collections.abc import Callable

import msgspec

from engine_agent.cell_proxy.settings import ProbeTimes
from engine_agent.protocol.load_messages import Load
from engine_agent.protocol.messages import Health
from engine_agent.protocol.states import Phase

LONG_AGO = float("-inf")


class EngineHealth:
    """The health of one engine. `ok` and `reason` are plain attributes, because every request reads them."""

    def __init__(self, times: ProbeTimes, max_concurrency: int, *, has_golden: bool = False) -> None:
        self.times = times
        self.max_concurrency = max_concurrency
        self.ok = False
        self.reason = "the engine was not probed yet"
        self._dead_because = self.reason
        self._golden_pending = has_golden
        self._wrong_in_a_row = 0
        self._unproven_because = (
            "its golden prompts were not answered yet" if has_golden else "no token came out of the engine yet"
        )
        self._slow_in_a_row = 0
        self._probe_ms: float | None = None
        self._checked_at: float | None = None
        self._token_seen_at = LONG_AGO
        self._token_probed_at = LONG_AGO
        self._bad_since: float | None = None
        self.on_change: Callable[[], None] = lambda: None
        """Called when `ok` may have changed."""

    def answered(self, now: float, probe_ms: float | None = None) -> None:
        """/health responded 200 after `probe_ms`; None if the response was held until something changed."""
        self._checked_at = now
        self._probe_ms = self._probe_ms if probe_ms is None else probe_ms
        self._slow_in_a_row = 0
        self._dead_because = ""
        self._settle(now)

    def failed(self, now: float, reason: str) -> None:
        """A hard failure: connection refused or lost, or /health reported an unhealthy engine."""
        self._checked_at, self._probe_ms = now, None
        self._slow_in_a_row = 0
        self._dead_because = reason
        self._unproven_because = f"no token came out of the engine since it failed ({reason})"
        self._token_probed_at = LONG_AGO
        self._settle(now)

    def timed_out(self, now: float) -> None:
        """/health did not answer in time. Only several time-outs in a row count."""
        self._checked_at = now
        self._slow_in_a_row += 1
        if self._slow_in_a_row >= self.times.slow_strikes:
            self._probe_ms = None
            times, timeout_s = self._slow_in_a_row, self.times.health_timeout_s
            self._dead_because = f"/health did not answer {times} times in a row ({timeout_s:g} s each)"
        self._settle(now)

    @property
    def is_late(self) -> bool:
        """/health did not answer last time, and the health is unchanged so far."""
        return self._slow_in_a_row > 0

    def token_seen(self, now: float) -> None:
        """The engine generated a real token, for a probe or a client. Called for every piece of a stream."""
        self._token_seen_at = now
        if self._unproven_because and not self._dead_because and not self._golden_pending:
            self._unproven_because = ""
            self._settle(now)

    def golden_passed(self, now: float) -> None:
        self._golden_pending = False
        self._wrong_in_a_row = 0
        self.token_seen(now)

    def golden_wrong(self, now: float, reason: str) -> None:
        self._wrong_in_a_row += 1
        self._unproven_because = reason
        self._settle(now)

    def token_probed(self, now: float) -> None:
        self._token_probed_at = now

    def token_failed(self, now: float, reason: str) -> None:
        self._unproven_because = reason
        self._settle(now)

    def token_probe_due(self, now: float, in_flight: int) -> bool:
        """Whether a token probe is due. While unproven: every `token_retry_s`. Later only if there was no token for
        `token_interval_s` and the engine has a free slot, because behind a full batch a probe would wait and show
        nothing."""
        if self._dead_because or self._golden_pending:
            return False
        if self._unproven_because:
            return now - self._token_probed_at >= self.times.token_retry_s
        last = max(self._token_seen_at, self._token_probed_at)
        return in_flight < self.max_concurrency and now - last >= self.times.token_interval_s

    def golden_due(self, now: float) -> bool:
        """Whether the golden prompts are due: once alive, until they passed or were wrong too often."""
        if self._dead_because or not self._golden_pending or self._is_wrong():
            return False
        return now - self._token_probed_at >= self.times.token_retry_s

    def bad_for_s(self, now: float) -> float:
        """Seconds since the engine became unhealthy; 0 while it is healthy."""
        return 0.0 if self._bad_since is None else now - self._bad_since

    def report(self, now: float) -> Health:
        age_s = None if self._checked_at is None else round(now - self._checked_at, 3)
        return Health(
            ok=self.ok, reason=self.reason, probe_ms=self._probe_ms, checked_s_ago=age_s, wrong=self._is_wrong()
        )

    def _is_wrong(self) -> bool:
        return self._wrong_in_a_row >= self.times.golden_strikes

    def _settle(self, now: float) -> None:
        self.reason = self._dead_because or self._unproven_because
        self.ok = not self.reason
        self.on_change()
        if self.ok:
            self._bad_since = None
        elif self._bad_since is None:
            self._bad_since = now


class ProxyStatus(msgspec.Struct, frozen=True):
    """The response to `GET /status`. `in_flight`: admitted requests that have not ended. `state`: for the next long
    poll (`engine_agent.protocol.local_servers`). `pairs`: name of the cell's pairs
    (`engine_agent.protocol.proxy_messages`)."""

    health: Health
    load: Load
    phase: Phase
    in_flight: int = 0
    state: str = ""
    pairs: str = ""
