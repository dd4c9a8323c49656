"""Decides from heartbeats and from calls whether a member of the cell hangs. Pure: `now_s` is seconds of any monotonic
clock. It touches nothing; what ends a cell is for the links to do.

A member that is silent hangs, and so does one that a step does not come back from. Only steps are timed: other calls,
such as writing the weights to disk, may take as long as they need.
"""

from collections.abc import Mapping
from dataclasses import dataclass

STALLED_S = 1.0
"""A pause between two looks that says that this process itself stood still, and nothing of the others."""


@dataclass
class _Watched:
    name: str
    heard_at_s: float
    done: int = 0
    behind_since_s: float | None = None


class HangDetector:
    """What is known of the other members, by rank, and the verdict on them."""

    def __init__(self, hang_s: float, names: Mapping[int, str], now_s: float) -> None:
        self._hang_s = hang_s
        self._watched = {rank: _Watched(name, now_s) for rank, name in names.items()}
        self._called = 0
        self._checked_at_s = now_s

    def note_beat(self, rank: int, done: int, now_s: float) -> None:
        """A member reported that it lives and that it has finished call number `done`."""
        watched = self._watched[rank]
        watched.heard_at_s = now_s
        if done > watched.done:
            watched.done = done
            watched.behind_since_s = now_s if done < self._called else None

    def step_called(self, number: int, now_s: float) -> None:
        """All members were called to take a step."""
        self._called = number
        for watched in self._watched.values():
            if watched.behind_since_s is None:
                watched.behind_since_s = now_s

    def verdict(self, now_s: float) -> str:
        """Why the cell hangs; empty while it does not. To be called several times a second."""
        self._forgive_own_stall(now_s)
        for watched in self._watched.values():
            if now_s - watched.heard_at_s >= self._hang_s:
                return f"{watched.name} hangs: nothing was heard of it for {self._hang_s:g} s"
        stuck = [
            watched.name
            for watched in self._watched.values()
            if watched.behind_since_s is not None and now_s - watched.behind_since_s >= self._hang_s
        ]
        if stuck:
            return f"{' and '.join(stuck)} did not finish step {self._called} within {self._hang_s:g} s"
        return ""

    def _forgive_own_stall(self, now_s: float) -> None:
        stalled_s = now_s - self._checked_at_s
        self._checked_at_s = now_s
        if stalled_s < STALLED_S:
            return
        for watched in self._watched.values():
            watched.heard_at_s += stalled_s
            if watched.behind_since_s is not None:
                watched.behind_since_s += stalled_s
