"""How many agents introduce themselves at once, and when the others shall come again.

After web was away the whole fleet stands before it. Each introduction costs some milliseconds of one thread, and who
has waited for too long gives up and begins anew: so only some are let in, and everybody else gets a place in a line,
given out at the pace at which introductions end. It decides and remembers; the socket asks and answers.
"""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic

AT_ONCE = 500
"""Under way; at the slowest pace still within the 10 s that an agent waits for an answer."""
OF_EACH = 3
"""Of one credential: whoever holds one shall not hold the places of others."""
PACE_OVER_S = 5.0
SLOWEST_PER_S = 50.0
SUPPOSED_PER_S = 200.0
"""Until `KNOWN_AFTER` have ended: what one process does on a busy machine."""
KNOWN_AFTER = 50
LATE_BY = 1.5
"""How much later than stated an agent may come, which varies its pause (`come_again_s`)."""
LATEST_S = 30.0
"""Nobody is told to wait for longer: by then much has changed."""


@dataclass(frozen=True, slots=True)
class ComeAgain:
    """There is no room; there will be after so many seconds."""

    after_s: float


@dataclass(slots=True)
class Introduction:
    """One that was let in. A second `end` does nothing."""

    _over: Callable[[], None]
    _ended: bool = field(default=False)

    def end(self) -> None:
        if not self._ended:
            self._ended = True
            self._over()


class Introductions:
    """Those under way in one web process, and the line before it."""

    def __init__(self, now: Callable[[], float] = monotonic) -> None:
        self._now = now
        self._under_way: Counter[str] = Counter()
        self.count = 0
        """Under way now."""
        self._ends: deque[float] = deque()
        self._next_place_at = now()
        self._line_ends_at = now()

    @property
    def has_line(self) -> bool:
        """Whether agents were told to come again because the process was full, and some of them are still to come."""
        return self.count >= AT_ONCE or self._now() < self._line_ends_at

    def begin(self, credential: str) -> Introduction | ComeAgain:
        """Let in whoever shows this credential, or say when to come again."""
        if self._under_way.get(credential, 0) >= OF_EACH or self.count >= AT_ONCE:
            after_s = self._next_place_s()
            if self.count >= AT_ONCE:
                comes_at = self._now() + LATE_BY * max(after_s, 1.0)
                self._line_ends_at = max(self._line_ends_at, comes_at)
            return ComeAgain(after_s)
        self._under_way[credential] += 1
        self.count += 1
        return Introduction(lambda: self._end(credential))

    def _end(self, credential: str) -> None:
        self._under_way[credential] -= 1
        if not self._under_way[credential]:
            del self._under_way[credential]
        self.count -= 1
        self._ends.append(self._now())

    def _next_place_s(self) -> float:
        now = self._now()
        while self._ends and self._ends[0] <= now - PACE_OVER_S:
            self._ends.popleft()
        self._next_place_at = max(now, self._next_place_at) + 1 / self._pace_per_s(now)
        return min(self._next_place_at - now, LATEST_S)

    def _pace_per_s(self, now: float) -> float:
        if len(self._ends) < KNOWN_AFTER:
            return SUPPOSED_PER_S
        return max(SLOWEST_PER_S, len(self._ends) / max(now - self._ends[0], 1.0))
