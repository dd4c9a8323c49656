"""The cloud's clock: the real one, or one that stands still until a test moves it."""

import time
from dataclasses import dataclass
from datetime import UTC, datetime


class Clock:
    """Seconds since 1970. `stands_at`: it starts there and moves by `advance` alone; None: it runs."""

    def __init__(self, stands_at: float | None = None) -> None:
        self._stands_at, self._ahead_s = stands_at, 0.0

    def now(self) -> float:
        """Seconds since 1970."""
        return (time.time() if self._stands_at is None else self._stands_at) + self._ahead_s

    def advance(self, seconds: float) -> None:
        self._ahead_s += seconds


@dataclass
class Delays:
    """How long things take. Defaults: what EC2 and Route 53 usually need."""

    visible_s: float = 0.0
    """Until a launched instance is found by id or in a list; AWS promises no figure."""
    pending_s: float = 30.0
    shutting_down_s: float = 30.0
    forgotten_s: float = 3600.0
    """How long a terminated instance is still described: about an hour."""
    insync_s: float = 60.0
    """Until all of Route 53's servers know a change: usually within 60 seconds."""
    target_registered_s: float = 90.0
    """Until a load balancer begins to check a new target: "a few minutes", as its guide has it."""


def moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
