"""Detects that another process is silent: sends checks, counts unanswered ones, and excludes the watcher's own pauses.
A process that was stopped or got no CPU wakes up with every deadline passed. It must not mistake its own pause for
silence of the other. So silence is measured on a clock that only runs while its owner reads it, from the first
unanswered check. Pure: the time is an argument, or comes from a function."""

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

LONGEST_PAUSE_S = 3.0
"""A longer gap between two readings is a pause of the watcher: it checks every second, and waits 2 s for an answer."""
QUESTIONS = 2
"""One may be lost together with the process that sent it."""


class AwakeClock:
    """Seconds in which its owner was awake: a gap between two readings counts at most `longest_pause_s`. Read it more
    often than that."""

    def __init__(self, ticks_s: Callable[[], float] = monotonic, *, longest_pause_s: float = LONGEST_PAUSE_S) -> None:
        self._ticks_s = ticks_s
        self._longest_pause_s = longest_pause_s
        self._slept_s = 0.0
        self._read_at_s: float | None = None

    def now_s(self) -> float:
        """Seconds of the underlying clock, minus the pauses of its owner."""
        ticks_s = self._ticks_s()
        if self._read_at_s is not None:
            self._slept_s += max(0.0, ticks_s - self._read_at_s - self._longest_pause_s)
        self._read_at_s = ticks_s
        return ticks_s - self._slept_s


@dataclass(slots=True)
class Watchdog:
    """The state of one watched process. `now_s` is from an `AwakeClock`."""

    patience_s: float
    questions: int = QUESTIONS
    unanswered: int = 0
    _silent_since_s: float = 0.0

    def answered(self) -> None:
        self.unanswered = 0

    def missed(self, asked_at_s: float) -> None:
        """A check sent at `asked_at_s` was not answered."""
        if not self.unanswered:
            self._silent_since_s = asked_at_s
        self.unanswered += 1

    def silent_s(self, now_s: float) -> float:
        """Seconds since the first of the consecutive unanswered checks; 0 if the last one was answered."""
        return now_s - self._silent_since_s if self.unanswered else 0.0

    def is_silent(self, now_s: float) -> bool:
        """Whether enough consecutive checks over enough time had no answer, so that the process must be killed."""
        return self.unanswered >= self.questions and self.silent_s(now_s) > self.patience_s


@dataclass(slots=True)
class LateWakeUp:
    """For loops that enforce deadlines of other processes. At the start and after a pause of the loop they wait
    `grace_s`, so that messages that arrived meanwhile are read before a deadline is enforced."""

    grace_s: float
    longest_pause_s: float = LONGEST_PAUSE_S
    _looked_at_s: float | None = None
    _waits_until_s: float = 0.0

    def may_enforce(self, now_s: float) -> bool:
        if self._looked_at_s is None or now_s - self._looked_at_s > self.longest_pause_s:
            self._waits_until_s = now_s + self.grace_s
        self._looked_at_s = now_s
        return now_s >= self._waits_until_s
