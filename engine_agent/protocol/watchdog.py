"""How to tell that another process is silent without being wrong about it, for whoever watches one: ask first, count
what was not answered, and forgive one's own late wake-up.

A process that was stopped, or got no processor, wakes up with every deadline passed: it must not take its own sleep
for the other's. So silence is measured on a clock that runs only while its owner looks, and only from the first
question that was asked and not answered. Pure: the time is an argument, or comes from a function.
"""

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

LONGEST_PAUSE_S = 3.0
"""A longer gap between two looks is the watcher's own sleep: it looks every second, and waits 2 s for an answer."""
QUESTIONS = 2
"""One may be lost with the very process that asked it."""


class AwakeClock:
    """Seconds in which its owner was awake: a gap between two readings counts for `longest_pause_s` at most. It must be
    read more often than that."""

    def __init__(self, ticks_s: Callable[[], float] = monotonic, *, longest_pause_s: float = LONGEST_PAUSE_S) -> None:
        self._ticks_s = ticks_s
        self._longest_pause_s = longest_pause_s
        self._slept_s = 0.0
        self._read_at_s: float | None = None

    def now_s(self) -> float:
        """Seconds of this clock: those of the one below it, less what its owner slept."""
        ticks_s = self._ticks_s()
        if self._read_at_s is not None:
            self._slept_s += max(0.0, ticks_s - self._read_at_s - self._longest_pause_s)
        self._read_at_s = ticks_s
        return ticks_s - self._slept_s


@dataclass(slots=True)
class Watchdog:
    """The verdict on one process, from questions that were asked. `now_s` is of an `AwakeClock`."""

    patience_s: float
    questions: int = QUESTIONS
    unanswered: int = 0
    _silent_since_s: float = 0.0

    def answered(self) -> None:
        """It answered, or has just been started."""
        self.unanswered = 0

    def missed(self, asked_at_s: float) -> None:
        """A question of `asked_at_s` was not answered."""
        if not self.unanswered:
            self._silent_since_s = asked_at_s
        self.unanswered += 1

    def silent_s(self, now_s: float) -> float:
        """Since the first of the questions that were not answered in a row; 0 if the last one was."""
        return now_s - self._silent_since_s if self.unanswered else 0.0

    def is_silent(self, now_s: float) -> bool:
        """Whether so many questions, over so long, had no answer that nothing is left but to end it."""
        return self.unanswered >= self.questions and self.silent_s(now_s) > self.patience_s


@dataclass(slots=True)
class LateWakeUp:
    """For loops that enforce others' deadlines: at first, and after a gap of their own, they hold back for `grace_s`,
    so that what came in meanwhile is read before anybody is judged by it."""

    grace_s: float
    longest_pause_s: float = LONGEST_PAUSE_S
    _looked_at_s: float | None = None
    _hold_until_s: float = 0.0

    def may_judge(self, now_s: float) -> bool:
        if self._looked_at_s is None or now_s - self._looked_at_s > self.longest_pause_s:
            self._hold_until_s = now_s + self.grace_s
        self._looked_at_s = now_s
        return now_s >= self._hold_until_s
