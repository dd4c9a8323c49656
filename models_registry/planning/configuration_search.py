"""Searches configurations for the best goodput per chip: the product of what may vary, pruned by predictions, then
halved while points become longer. Pure: it says what to measure next, and who measures brings the results.

One configuration of each shape (what it computes with, whatever its limits) is measured first; what that tells of a
step predicts the others of its shape (`step_model`), and what is predicted far from the best is never measured. The
rest is measured with points of 25 % of their length, the better half with 50 %, and the better half of these in full
(successive halving, Jamieson and Talwalkar 2016).
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from typing import Any

from models_registry.planning.varied_columns import LIMITS

FIDELITIES = (0.25, 0.5, 1.0)
HOPEFUL_SHARE = 0.7
"""Of the best there is: a fitted model errs by less than the rest."""
MOST_CANDIDATES = 512

Choice = tuple[tuple[str, Any], ...]
"""What differs from the version that is searched around, by name; names in the order in which they were stated."""
Measured = Mapping[tuple[Choice, float], float]
"""Goodput per chip by choice and fidelity, 0 where no rate held."""


class TooMany(ValueError):
    """More configurations than a search takes."""


class Standing(StrEnum):
    """What became of a configuration so far."""

    WAITING = "waiting"
    UNMEASURED = "unmeasured"
    """The search ended before its turn came."""
    PRUNED = "pruned"
    DROPPED = "dropped"
    REFUSED = "refused"
    LEFT = "left"


@dataclass(frozen=True, slots=True)
class SearchLimits:
    """When a search ends though it could go on."""

    most_trials: int = 40
    most_s: float = 12 * 3600.0


@dataclass(frozen=True, slots=True)
class Spent:
    trials: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Trial:
    """Measure this choice with points of so large a share of their length."""

    choice: Choice
    fidelity: float
    reason: str


@dataclass(frozen=True, slots=True)
class Searched:
    """The search is over; `choice` None: nothing held at all. `is_whole`: it came to its end within its limits."""

    choice: Choice | None
    reason: str
    is_whole: bool = True


def choices_of(varied: Mapping[str, Sequence[Any]]) -> tuple[Choice, ...]:
    """Every combination, in a fixed order.

    Raises:
        TooMany: more than a search takes.
    """
    count = math.prod(len(values) for values in varied.values())
    if count > MOST_CANDIDATES:
        raise TooMany(f"{count} combinations; a search takes {MOST_CANDIDATES}: vary less at once")
    return tuple(tuple(zip(varied, values, strict=True)) for values in product(*varied.values()))


def shape_of(choice: Choice) -> str:
    """Equal for configurations whose steps cost the same and that differ in limits alone."""
    return repr([(name, value) for name, value in choice if name not in LIMITS])


def plan_search(
    choices: Sequence[Choice],
    predicted: Mapping[Choice, float],
    measured: Measured,
    limits: SearchLimits = SearchLimits(),
    spent: Spent = Spent(),
) -> Trial | Searched:
    """The next trial, or the end. `choices`: without those that could not be measured at all; `predicted`: goodput per
    chip of those that nobody has measured yet, as far as something says it."""
    for fidelity, left in _rounds(choices, predicted, measured):
        waiting = [choice for choice in left if (choice, fidelity) not in measured]
        if not waiting:
            continue
        if told := _exceeded(limits, spent):
            return _cut_short(choices, measured, told)
        pruned = len(choices) - len(hopeful(choices, predicted, measured))
        words = f"{len(left)} configurations at {fidelity:.0%} of the length, {len(waiting)} to go"
        choice = (
            min(waiting, key=lambda one: _turn(one, predicted, measured)) if fidelity == FIDELITIES[0] else waiting[0]
        )
        return Trial(choice, fidelity, words + (f"; {pruned} pruned by prediction" if pruned else ""))
    return _searched(choices, predicted, measured)


def hopeful(choices: Sequence[Choice], predicted: Mapping[Choice, float], measured: Measured) -> tuple[Choice, ...]:
    """Those worth measuring, or measured already, the best first; what nobody predicted is kept."""
    known = {choice: value for choice in choices if (value := _known(choice, predicted, measured)) is not None}
    best = max(known.values(), default=0.0)
    kept = [
        choice
        for choice in choices
        if (choice, FIDELITIES[0]) in measured or known.get(choice, best) >= HOPEFUL_SHARE * best
    ]
    return tuple(sorted(kept, key=lambda choice: -known.get(choice, best)))


def standings(
    choices: Sequence[Choice],
    predicted: Mapping[Choice, float],
    measured: Measured,
    refused: Mapping[Choice, str],
    *,
    is_over: bool = False,
) -> dict[Choice, tuple[Standing, str]]:
    """What became of each, and why. `refused`: why a choice could not be measured at all; `is_over`: no further one
    will be."""
    found: dict[Choice, tuple[Standing, str]] = {choice: (Standing.REFUSED, why) for choice, why in refused.items()}
    there = [choice for choice in choices if choice not in refused]
    kept = hopeful(there, predicted, measured)
    best = max((value for one in there if (value := _known(one, predicted, measured)) is not None), default=0.0)
    for choice in set(there) - set(kept):
        told = f"predicted {predicted[choice]:.4g}/s a chip, below {HOPEFUL_SHARE:.0%} of the best, {best:.4g}"
        found[choice] = (Standing.PRUNED, told)
    before: tuple[Choice, ...] = ()
    for fidelity, left in _rounds(there, predicted, measured):
        for choice in set(before) - set(left):
            shorter = FIDELITIES[FIDELITIES.index(fidelity) - 1]
            value = measured[choice, shorter]
            told = f"{value:.4g}/s a chip at {shorter:.0%} of the length, not in the better half"
            found[choice] = (Standing.DROPPED, told)
        for choice in left:
            found[choice] = _standing(choice, fidelity, predicted, measured, is_over=is_over)
        before = left
    return found


def _standing(
    choice: Choice, fidelity: float, predicted: Mapping[Choice, float], measured: Measured, *, is_over: bool
) -> tuple[Standing, str]:
    if (choice, fidelity) in measured:
        return Standing.LEFT, f"{measured[choice, fidelity]:.4g}/s a chip at {fidelity:.0%} of the length"
    told = f", {predicted[choice]:.4g}/s a chip predicted" if choice in predicted else ""
    if is_over:
        return Standing.UNMEASURED, f"the search ended before it was measured at {fidelity:.0%} of the length{told}"
    return Standing.WAITING, f"to be measured at {fidelity:.0%} of the length{told}"


def _rounds(
    choices: Sequence[Choice], predicted: Mapping[Choice, float], measured: Measured
) -> Iterator[tuple[float, tuple[Choice, ...]]]:
    """Each round that has begun: its fidelity, and who is in it."""
    left = hopeful(choices, predicted, measured)
    for fidelity in FIDELITIES:
        yield fidelity, left
        if any((choice, fidelity) not in measured for choice in left):
            return
        ranked = sorted(left, key=lambda choice, f=fidelity: -measured[choice, f])  # type: ignore[misc]
        left = tuple(ranked[: math.ceil(len(ranked) / 2)])


def _turn(choice: Choice, predicted: Mapping[Choice, float], measured: Measured) -> tuple[bool, bool, float]:
    """One of each shape first, that with the widest limits, which sees most loads; then those that nobody predicts."""
    shapes = {shape_of(other) for other, _ in measured}
    widest = math.prod(value for name, value in choice if name in LIMITS and isinstance(value, int) and value > 0)
    return shape_of(choice) in shapes, choice in predicted, -float(widest)


def _known(choice: Choice, predicted: Mapping[Choice, float], measured: Measured) -> float | None:
    """As measured for longest, else as predicted."""
    for fidelity in reversed(FIDELITIES):
        if (choice, fidelity) in measured:
            return measured[choice, fidelity]
    return predicted.get(choice)


def _searched(choices: Sequence[Choice], predicted: Mapping[Choice, float], measured: Measured) -> Searched:
    last: tuple[Choice, ...] = ()
    for _, left in _rounds(choices, predicted, measured):
        last = left
    ranked = sorted(last, key=lambda choice: -measured[choice, FIDELITIES[-1]])
    if not ranked or measured[ranked[0], FIDELITIES[-1]] <= 0:
        return Searched(None, "no configuration held the objective at any rate")
    second = f", {measured[ranked[1], FIDELITIES[-1]]:.4g} of the next" if len(ranked) > 1 else ""
    found = measured[ranked[0], FIDELITIES[-1]]
    return Searched(ranked[0], f"{found:.4g} requests a second and chip{second}")


def _exceeded(limits: SearchLimits, spent: Spent) -> str:
    if spent.trials >= limits.most_trials:
        return f"after {spent.trials} trials, the most of this search"
    if spent.seconds >= limits.most_s:
        return f"after {spent.seconds / 3600:.1f} hours, the most of this search"
    return ""


def _cut_short(choices: Sequence[Choice], measured: Measured, told: str) -> Searched:
    """The best of the longest measurements that there are."""
    for fidelity in reversed(FIDELITIES):
        of_round = {choice: measured[choice, fidelity] for choice in choices if measured.get((choice, fidelity), 0) > 0}
        if of_round:
            best = max(of_round, key=lambda choice: of_round[choice])
            reason = f"{of_round[best]:.4g} requests a second and chip at {fidelity:.0%} of the length, {told}"
            return Searched(best, reason, is_whole=False)
    return Searched(None, f"no configuration held the objective {told}", is_whole=False)


def without(choices: Sequence[Choice], refused: Collection[Choice]) -> tuple[Choice, ...]:
    return tuple(choice for choice in choices if choice not in refused)
