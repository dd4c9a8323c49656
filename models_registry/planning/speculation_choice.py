"""How much to guess: tokens of a step by a calibration, over what the step costs on a kind of machine. Pure.

A step that verifies v tokens of each of b sequences takes s(b, v) seconds, and guessing for them g(b). With t tokens of
a step, its own and those guessed right, a sequence gets t / (s(b, v) + g(b)) a second, and 1 / s(b, 1) without.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from models_registry.planning.calibration import TaskFigures
from models_registry.planning.speculation import BatchRange

LEAST_GAIN = 1.05
"""Below it, guessing is off: two measurements of one step differ by as much."""
MOST_POINTS = 1024
MOST_BATCH = 4096


class BadStepCost(ValueError):
    """Not what steps cost; the text names what is wrong and what would be right."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """`steps`: batch -> verified tokens of each sequence -> seconds; `guess`: batch -> seconds. `source`: `measured` or
    `given`; `hardware` and `software` as whoever measured says."""

    instance_type: str
    source: str
    hardware: str
    software: str
    steps: Mapping[int, Mapping[int, float]]
    guess: Mapping[int, float]

    @property
    def most_batch(self) -> int:
        return max(self.steps)

    def most_verified(self) -> int:
        """The most that every batch was measured with."""
        return min(max(row) for row in self.steps.values())

    def step_s(self, batch: int, verified: int) -> float:
        """Seconds, between what was measured along straight lines; below the first of either, as the first."""
        by_batch = {each: _between(row, verified) for each, row in self.steps.items()}
        return _between(by_batch, batch) + (_between(self.guess, batch) if verified > 1 and self.guess else 0.0)


@dataclass(frozen=True, slots=True)
class Choice:
    """For one task: `tokens` guessed with one sequence (paths of the tree, where `is_tree`), and how much faster that
    is than without. `ranges`: how many at which batch size. `off_from`: the smallest batch size at which it is off;
    None: it pays as far as was measured. `gains`: batch size -> with what is chosen there, against without."""

    task: str
    is_tree: bool
    tokens: int
    gain: float
    ranges: tuple[BatchRange, ...]
    off_from: int | None
    gains: Mapping[int, float]
    reason: str


def read_step_cost(stated: Any) -> StepCost:
    """What steps cost, of a document. Rows of several contexts are averaged.

    Raises:
        BadStepCost: it is none.
    """
    if not isinstance(stated, Mapping):
        raise BadStepCost("the step cost must be an object with instance_type, source and steps")
    source = stated.get("source")
    if source not in ("measured", "given"):
        raise BadStepCost(f"source is {str(source)[:40]!r}; it must be measured or given")
    names = [stated.get(name, "") for name in ("instance_type", "hardware", "software")]
    if not all(isinstance(name, str) and len(name) <= 120 and name.isprintable() for name in names) or not names[0]:
        raise BadStepCost(
            "instance_type, hardware and software must be texts of 120 characters at most, the first not empty"
        )
    steps: dict[int, dict[int, list[float]]] = {}
    for row in _rows(stated, "steps"):
        batch, verified = _whole(row, "batch", MOST_BATCH), _whole(row, "verified", 64)
        steps.setdefault(batch, {}).setdefault(verified, []).append(_seconds(row))
    guess: dict[int, list[float]] = {}
    for row in _rows(stated, "guess") if "guess" in stated else ():
        guess.setdefault(_whole(row, "batch", MOST_BATCH), []).append(_seconds(row))
    for batch, by_verified in steps.items():
        if 1 not in by_verified or len(by_verified) < 2:
            raise BadStepCost(
                f"batch {batch} needs a step of 1 verified token, and of more; it has {sorted(by_verified)}"
            )
    return StepCost(
        *(names[0], source, names[1], names[2]),
        {batch: {each: _mean(times) for each, times in row.items()} for batch, row in sorted(steps.items())},
        {batch: _mean(times) for batch, times in sorted(guess.items())},
    )


def gains_by_size(tokens: Sequence[float], cost: StepCost, batch: int) -> tuple[float, ...]:
    """How much faster `batch` sequences are than without, by how many are guessed, from none on; as far as steps were
    measured. `tokens`: of a step, by the same."""
    plain = cost.step_s(batch, 1)
    return tuple(
        each * plain / cost.step_s(batch, size + 1) for size, each in enumerate(tokens[: cost.most_verified()])
    )


def guessed_at(ranges: Sequence[Sequence[int]], batch: int) -> int:
    """How many are guessed with so many sequences; the last range goes on."""
    return next((tokens for first, _, tokens in reversed(ranges) if first <= batch), 0)


def choose(figures: TaskFigures, cost: StepCost, *, is_tree: bool, least_gain: float = LEAST_GAIN) -> Choice:
    """What pays most at each batch size that was measured or lies between. Larger batches never guess more."""
    tokens = figures.tree if is_tree else figures.chain
    most = len(tokens) - 1
    chosen: dict[int, int] = {}
    gains: dict[int, float] = {}
    for batch in range(1, cost.most_batch + 1):
        tried = ((gain, -each) for each, gain in enumerate(gains_by_size(tokens, cost, batch)[: most + 1]) if each)
        gain, best = max(tried, default=(1.0, 0))  # a tree has no path where no guess was ever right
        pays = gain >= least_gain
        chosen[batch], gains[batch] = (-best, gain) if pays else (0, 1.0)
        most = min(most, chosen[batch])
        if not most:
            break
    off_from = next((batch for batch, each in chosen.items() if each == 0), None)
    ranges = _ranges(chosen, cost.most_batch)
    return Choice(
        figures.name,
        is_tree,
        chosen[1],
        gains[1],
        ranges,
        off_from,
        gains,
        _reason(figures, cost, chosen, gains, tokens),
    )


def _ranges(chosen: Mapping[int, int], most_batch: int) -> tuple[BatchRange, ...]:
    """Behind what was measured it is off: nobody knows."""
    ranges: list[BatchRange] = []
    for batch, each in chosen.items():
        if ranges and ranges[-1][2] == each:
            ranges[-1] = (ranges[-1][0], batch, each)
        else:
            ranges.append((batch, batch, each))
    if ranges[-1][2]:
        ranges.append((most_batch + 1, most_batch + 1, 0))
    return tuple(ranges)


def _reason(
    figures: TaskFigures, cost: StepCost, chosen: Mapping[int, int], gains: Mapping[int, float], tokens: Sequence[float]
) -> str:
    if not chosen[1]:
        return f"no guess makes {figures.name} {LEAST_GAIN:g} times as fast on {cost.instance_type}, even alone"
    dear = cost.step_s(1, chosen[1] + 1) / cost.step_s(1, 1)
    return (
        f"{chosen[1]} guessed tokens make {tokens[chosen[1]]:.2f} tokens of a step that takes {dear:.2f} times as "
        f"long: {gains[1]:.2f} times as fast with one sequence"
    )


def _between(points: Mapping[int, float], at: int) -> float:
    places = sorted(points)
    behind = bisect_right(places, at)
    if behind == 0:
        return points[places[0]]
    if behind == len(places):
        return points[places[-1]]
    low, high = places[behind - 1], places[behind]
    return points[low] + (points[high] - points[low]) * (at - low) / (high - low)


def _rows(stated: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    rows = stated.get(name)
    if (
        not isinstance(rows, list)
        or not 1 <= len(rows) <= MOST_POINTS
        or not all(isinstance(row, Mapping) for row in rows)
    ):
        raise BadStepCost(f"{name} must be a list of 1 to {MOST_POINTS} objects")
    return rows


def _whole(row: Mapping[str, Any], name: str, most: int) -> int:
    value = row.get(name)
    if type(value) is not int or not 1 <= value <= most:
        raise BadStepCost(f"{name} is {str(value)[:40]!r}; it must be a whole number from 1 to {most}")
    return value


def _seconds(row: Mapping[str, Any]) -> float:
    value = row.get("seconds")
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or not 0 < value < 3600:
        raise BadStepCost(f"seconds is {str(value)[:40]!r}; it must be a number above 0")
    return float(value)


def _mean(times: Sequence[float]) -> float:
    return sum(times) / len(times)
