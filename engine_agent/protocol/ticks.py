"""One tick a second for all periodic checks of a process, so that they wake it once and not each at its own time."""

import random

TICK_S = 1.0
_PHASE_S = random.random()
"""Processes of one host tick at different times."""
_EARLY_S = 0.02
"""An event loop may wake this much before a tick, and waits for the one after it then."""


def seconds_to_tick(now_s: float) -> float:
    """Seconds until the next tick. `now_s`: of the event loop's clock."""
    left_s = TICK_S - (now_s + _PHASE_S) % TICK_S
    return left_s if left_s > _EARLY_S else left_s + TICK_S
