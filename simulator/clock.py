"""Virtual time: events in the order of their moments, equal moments in the order in which they were scheduled.

It knows nothing of what happens. It never looks at a real clock, so a run is the same on every machine.
"""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from heapq import heappop, heappush
from itertools import count

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
"""What second 0 of a run is called; planners take datetimes."""

Action = Callable[[], None]


class EventQueue:
    """The clock of a run and what is still to come. Seconds since the run began."""

    def __init__(self, epoch: datetime = EPOCH) -> None:
        self.now_s = 0.0
        self.epoch = epoch
        self.done = 0
        self._events: list[tuple[float, int, Action]] = []
        self._serial = count()

    @property
    def now(self) -> datetime:
        return self.moment(self.now_s)

    def moment(self, at_s: float) -> datetime:
        """A second of the run as planners see it."""
        return self.epoch + timedelta(seconds=at_s)

    def second(self, moment: datetime) -> float:
        """The reverse of `moment`."""
        return (moment - self.epoch).total_seconds()

    def at(self, at_s: float, action: Action) -> None:
        """Have `action` happen at a second that is not past yet; at once if it is."""
        heappush(self._events, (max(at_s, self.now_s), next(self._serial), action))

    def after(self, delay_s: float, action: Action) -> None:
        """Have `action` happen so many seconds from now."""
        self.at(self.now_s + delay_s, action)

    def run_until(self, end_s: float, has_time: Callable[[], bool] = lambda: True) -> bool:
        """Let everything happen that is due by `end_s`, then be there. Returns False if it stopped before, because
        `has_time` said so between two events."""
        events = self._events
        while events and events[0][0] <= end_s:
            if not has_time():
                return False
            self.now_s, _, action = heappop(events)
            self.done += 1
            action()
        self.now_s = max(self.now_s, end_s)
        return True
