"""When a HAProxy that died may be started again: at once, and more and more slowly if it keeps dying. Pure; the time
is an argument."""

from dataclasses import dataclass

from engine_agent.runtime.connection import ConnectionSettings, backoff_s

STEADY_AFTER_S = 5.0
"""One that lived this long was no failed start."""
PACE = ConnectionSettings(backoff_min_s=0.25, backoff_max_s=5.0)


@dataclass(slots=True)
class Restarts:
    """The starts of one HAProxy. `draw`s are uniform in [0, 1)."""

    due_at_s: float = 0.0
    _started_at_s: float | None = None
    _failures: int = 0

    def note_start(self, now_s: float) -> None:
        self._started_at_s = now_s

    def note_absence(self, now_s: float, draw: float) -> bool:
        """It does not run. Returns whether that is news: it had been started, and so has died."""
        if self._started_at_s is None:
            return False
        steady = now_s - self._started_at_s >= STEADY_AFTER_S
        self._failures = 0 if steady else self._failures + 1
        self.due_at_s = now_s if self._failures <= 1 else now_s + backoff_s(PACE, self._failures, draw)
        self._started_at_s = None
        return True

    def may_start(self, now_s: float) -> bool:
        return now_s >= self.due_at_s
