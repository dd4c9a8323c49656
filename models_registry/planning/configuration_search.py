"""Searches configurations for the best goodput per chip: the product of what may vary, pruned by predictions, then
halved while points become longer. Pure: it says what to measure next, and who measures brings the results.

Predictions cost three short measurements each (`step_model`); what they call far from the best is never measured. The
rest is measured with points of 25 % of their length, the better half with 50 %, and the better half of these in full
(successive halving, Jamieson and Talwalkar 2016).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

FIDELITIES = (0.25, 0.5, 1.0)
"""Of a point's usual length."""
HOPEFUL_SHARE = 0.7
"""Of the best prediction: a fitted model errs by less than the rest."""
MOST_CANDIDATES = 512

Choice = tuple[tuple[str, Any], ...]
"""What differs from the version that is searched around, by name; names in the order in which they were stated."""


class TooMany(ValueError):
    """More configurations than a search takes."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Measure this choice with points of so large a share of their length."""

    choice: Choice
    fidelity: float
    reason: str


@dataclass(frozen=True, slots=True)
class Searched:
    """The search is over; `choice` None: nothing held at all."""

    choice: Choice | None
    reason: str


def choices_of(varied: Mapping[str, Sequence[Any]]) -> tuple[Choice, ...]:
    """Every combination, in a fixed order.

    Raises:
        TooMany: more than a search takes.
    """
    count = math.prod(len(values) for values in varied.values())
    if count > MOST_CANDIDATES:
        raise TooMany(f"{count} combinations; a search takes {MOST_CANDIDATES}: vary less at once")
    return tuple(tuple(zip(varied, values, strict=True)) for values in product(*varied.values()))


def hopeful(choices: Sequence[Choice], predicted: Mapping[Choice, float]) -> tuple[Choice, ...]:
    """Those worth measuring, the best prediction first; what nobody predicted is kept."""
    best = max(predicted.values(), default=0.0)
    kept = [choice for choice in choices if predicted.get(choice, best) >= HOPEFUL_SHARE * best]
    return tuple(sorted(kept, key=lambda choice: -predicted.get(choice, best)))


def plan_search(
    choices: Sequence[Choice], predicted: Mapping[Choice, float], measured: Mapping[tuple[Choice, float], float]
) -> Trial | Searched:
    """The next trial, or the end. `predicted` and `measured` are goodput per chip; measured is by choice and fidelity,
    0 where no rate held."""
    left = hopeful(choices, predicted)
    for place, fidelity in enumerate(FIDELITIES):
        waiting = [choice for choice in left if (choice, fidelity) not in measured]
        if waiting:
            pruned = len(choices) - len(hopeful(choices, predicted))
            told = f"{len(left)} configurations at {fidelity:.0%} of the length, {len(waiting)} to go"
            return Trial(waiting[0], fidelity, told + (f"; {pruned} pruned by prediction" if pruned else ""))
        ranked = sorted(left, key=lambda choice, f=fidelity: -measured[choice, f])  # type: ignore[misc]
        is_last = place == len(FIDELITIES) - 1
        left = tuple(ranked if is_last else ranked[: max(1, math.ceil(len(ranked) / 2))])
    best = left[0] if left else None
    if best is None or measured[best, FIDELITIES[-1]] <= 0:
        return Searched(None, "no configuration held the objective at any rate")
    found = measured[best, FIDELITIES[-1]]
    second = f", {measured[left[1], FIDELITIES[-1]]:.4g} of the next" if len(left) > 1 else ""
    return Searched(best, f"{found:.4g} requests a second and chip{second}")
