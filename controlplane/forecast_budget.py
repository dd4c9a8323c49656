"""How much time of this process forecasts may take: one at a time, each for a few seconds of a core and of the caller's
time, and in a minute so many of a user and of all users together. A request that comes while there is none left is
refused and told when to try again; a forecast that reaches its bound says how far it looked, and other work under the
same bound is refused."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from kernel.refusals import Busy, InvalidInput, ShareUsedUp

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class ForecastLimits:
    """Seconds of a core. A forecast of 1,000 nodes takes one or two; a page or a script asks for one now and then."""

    of_one_s: float = 5.0
    waited_s: float = 8.0
    """By the clock, for one: a busy process gives a forecast only a part of a core."""
    of_user_s: float = 10.0
    of_all_s: float = 20.0
    window_s: float = 60.0
    patience_s: float = 1.0
    """How long a request waits while another forecast is made."""


@dataclass
class ForecastBudget:
    """One of a process. `spent`: when a forecast ended, whose it was, and what it took, oldest first."""

    limits: ForecastLimits = field(default_factory=ForecastLimits)
    monotonic: Clock = time.monotonic
    core_s: Clock = time.thread_time
    _spent: deque[tuple[float, str, float]] = field(default_factory=deque)
    _slot: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def take(self, user: str) -> Iterator[Callable[[], bool]]:
        """Gives a function that says whether there is time left. Raises Busy if another forecast runs for longer than
        `patience_s`, or all users together had their share of this minute; ShareUsedUp if the user had."""
        if not self._slot.acquire(timeout=self.limits.patience_s):
            raise Busy("another forecast is being made; try again in a few seconds", self.limits.of_one_s)
        began_s = self.core_s()
        try:
            until_s = began_s + min(self.limits.of_one_s, self._left_s(user))
            answered_by_s = self.monotonic() + self.limits.waited_s
            yield lambda: self.core_s() < until_s and self.monotonic() < answered_by_s
        finally:
            self._spent.append((self.monotonic(), user, self.core_s() - began_s))
            self._slot.release()

    def _left_s(self, user: str) -> float:
        now = self.monotonic()
        while self._spent and self._spent[0][0] <= now - self.limits.window_s:
            self._spent.popleft()
        of_user_s = self.limits.of_user_s - sum(took_s for _, whose, took_s in self._spent if whose == user)
        of_all_s = self.limits.of_all_s - sum(took_s for _, _, took_s in self._spent)
        left_s = min(of_user_s, of_all_s)
        if left_s <= 0:
            wait_s = self._spent[0][0] + self.limits.window_s - now
            whose, refusal = ("you had", ShareUsedUp) if of_user_s <= 0 else ("all users together had", Busy)
            raise refusal(f"{whose} as many forecasts as there is time for in a minute; try again later", wait_s)
        return left_s


def require_time(has_time: Callable[[], bool], field: str, what: str) -> None:
    """For work that is useless if it is incomplete. Raises InvalidInput, which names `what` took too long, once there
    is no time left."""
    if not has_time():
        message = f"{what} takes longer than a request may ({FORECASTS.limits.of_one_s:.0f} s of a core); ask for less"
        raise InvalidInput(field=field, rule="time", message=message)


FORECASTS = ForecastBudget()
