"""Shares of requests, with how sure one can be of them: exact tests and intervals of a binomial. Pure.

The interval is Clopper's and Pearson's (Biometrika 26, 1934): never narrower than its confidence says.
"""

import math
from collections.abc import Callable

STEPS = 50
"""Halvings of [0, 1]: beyond the precision that anybody reads."""


def at_most_by_chance(successes: int, trials: int, share: float) -> float:
    """Probability that `trials`, each a success with probability `share`, give no more than so many successes."""
    return sum(_chance(k, trials, share) for k in range(successes + 1)) if successes < trials else 1.0


def at_least_by_chance(successes: int, trials: int, share: float) -> float:
    """Probability that `trials`, each a success with probability `share`, give so many successes or more."""
    return sum(_chance(k, trials, share) for k in range(successes, trials + 1)) if successes > 0 else 1.0


def share_interval(successes: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """Between which shares the true one lies, with this confidence.

    Raises:
        ValueError: no trials, or more successes than trials.
    """
    if not 0 <= successes <= trials or trials == 0:
        raise ValueError(f"{successes} of {trials} is no share")
    tail = (1 - confidence) / 2
    low = _crossing(lambda share: at_least_by_chance(successes, trials, share) >= tail) if successes else 0.0
    high = _crossing(lambda share: at_most_by_chance(successes, trials, share) < tail) if successes < trials else 1.0
    return low, high


def _chance(successes: int, trials: int, share: float) -> float:
    if share <= 0.0 or share >= 1.0:
        return float(successes == (trials if share >= 1.0 else 0))
    ways = math.lgamma(trials + 1) - math.lgamma(successes + 1) - math.lgamma(trials - successes + 1)
    return math.exp(ways + successes * math.log(share) + (trials - successes) * math.log1p(-share))


def _crossing(is_beyond: Callable[[float], bool]) -> float:
    """The share from which on a test holds that holds at 1 and not at 0."""
    low, high = 0.0, 1.0
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if is_beyond(middle) else (middle, high)
    return (low + high) / 2
