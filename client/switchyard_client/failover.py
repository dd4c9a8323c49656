"""The order in which a call tries regions. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

TOO_MANY_REQUESTS = 429


@dataclass(frozen=True, slots=True)
class Retries:
    """Bounds of one call. `longest_wait_s`: maximum `Retry-After` to wait for. `rest_s`: how long a failed region is
    tried last."""

    attempts: int = 5
    longest_wait_s: float = 30.0
    rest_s: float = 5.0


@dataclass(frozen=True, slots=True)
class Attempt:
    """Send the request to the region with this index, after `after_s`."""

    region: int
    wait_s: float = 0.0


class Failover:
    """Decides which region a call tries next. The first is home. A failed region comes last for a while, for all calls
    of the client, and twice as long if it fails again. Time is an argument, in seconds of one clock."""

    def __init__(self, regions: int, retries: Retries) -> None:
        self._retries = retries
        self._rests_until = [0.0] * regions
        self._failures = [0] * regions

    def order(self, now: float) -> list[int]:
        """Returns all regions: available ones in the given order, then failed ones, the earliest failure first."""
        return sorted(range(len(self._rests_until)), key=lambda each: (max(0.0, self._rests_until[each] - now), each))

    def answered(self, region: int) -> None:
        self._rests_until[region] = self._failures[region] = 0

    def failed(self, region: int, now: float) -> None:
        """Marks a region that sent no byte of an answer as failed."""
        rest_s = self._retries.rest_s * 2 ** self._failures[region]
        self._failures[region] += rest_s < self._retries.longest_wait_s
        self._rests_until[region] = now + rest_s

    def after_silence(self, tried: Sequence[int], now: float) -> Attempt | None:
        """Returns another region immediately, or an earlier one after a pause if all were tried. Returns None to give
        up."""
        return self._next(tried, now, pause_s=0.1 * 2 ** len(tried))

    def after_refusal(
        self, tried: Sequence[int], region: int, status: int, retry_after_s: float | None, now: float
    ) -> Attempt | None:
        """Returns the next try after a refusal. Only refusals with `Retry-After` are retried: in the same region later
        if the key has used its limit (429), else in another one immediately. Returns None to give up."""
        if retry_after_s is None:
            return None
        if status == TOO_MANY_REQUESTS:
            return self._within_bounds(tried, Attempt(region, retry_after_s))
        self._rests_until[region] = now + retry_after_s
        return self._next(tried, now, pause_s=retry_after_s)

    def _next(self, tried: Sequence[int], now: float, pause_s: float) -> Attempt | None:
        order = self.order(now)
        fresh = [region for region in order if region not in tried]
        return self._within_bounds(tried, Attempt(fresh[0]) if fresh else Attempt(order[0], pause_s))

    def _within_bounds(self, tried: Sequence[int], attempt: Attempt) -> Attempt | None:
        is_within = len(tried) < self._retries.attempts and attempt.wait_s <= self._retries.longest_wait_s
        return attempt if is_within else None
