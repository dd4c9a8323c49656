"""Reads calibrations and step costs, and decides how many tokens to guess at each batch size. A calibration has, for
each position of its answers, the rank at which each Medusa head guessed right: heads are correlated, so shares per head
would misjudge paths. A step that verifies v tokens of each of b sequences takes s(b, v) seconds, and guessing takes
g(b): with t tokens per step a sequence gets t / (s(b, v) + g(b)) tokens per second, and 1 / s(b, 1) without
speculation. Pure: it never changes a version."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from models_registry.versions.planning.speculation import BatchRange, Path

MOST_HEADS = 8
MOST_TASKS = 8
MOST_ANSWERS = 4096
MOST_CHARACTERS = 512 * 1024
"""Of all answers: 16 thousand positions of 8 heads take a quarter."""
MOST_PATHS = 63
"""Of a tree; a step then verifies 64 tokens."""
NO_RANK = "-"
RANKS = frozenset("0123456789" + NO_RANK)


class BadCalibration(ValueError):
    """Not a calibration; the text names the error and the expected form."""


@dataclass(frozen=True, slots=True)
class Task:
    """One kind of prompt. `answers`: for each answer, `heads` characters per position: the rank at which each head
    guessed right, or `-`."""

    name: str
    heads: int
    answers: tuple[str, ...]

    @property
    def positions(self) -> int:
        return sum(map(len, self.answers)) // self.heads

    def paths(self, answers: Sequence[str] | None = None) -> list[list[Path]]:
        """For each answer and position, the longest run of right guesses from the first head on."""
        return [
            [_right(answer[place : place + self.heads]) for place in range(0, len(answer), self.heads)]
            for answer in (self.answers if answers is None else answers)
        ]


@dataclass(frozen=True, slots=True)
class Calibration:
    """`heads_sha256`: digest of the guessing weights. `model`: the model that gave the answers."""

    model: str
    heads_sha256: str
    heads: int
    tasks: tuple[Task, ...]


@dataclass(frozen=True, slots=True)
class TaskFigures:
    """Figures of one task. `accuracies`: by head, then by rank, the share of positions at which that guess was right.
    `chain[k]`: exact tokens per step when the best guesses of the first k heads are verified while decoding the
    answers. `paths`: most probable first, each after its prefix, so that the first n are the tree of size n; `counts`:
    positions at which each was right. `tree[n]`: tokens per step with that tree, built on one half of the answers and
    evaluated on the other."""

    name: str
    positions: int
    accuracies: tuple[tuple[float, ...], ...]
    chain: tuple[float, ...]
    paths: tuple[Path, ...]
    counts: tuple[int, ...]
    tree: tuple[float, ...]


def read_calibration(stated: Any) -> Calibration:
    """A calibration as the trainer writes it (`engine_agent.engines.medusa`). Raises BadCalibration if it cannot be
    read."""
    if not isinstance(stated, Mapping) or stated.get("format") != 1:
        raise BadCalibration("the calibration does not have format 1; give the calibration.json that the trainer wrote")
    heads = stated.get("heads")
    if type(heads) is not int or not 1 <= heads <= MOST_HEADS:
        raise BadCalibration(f"heads is {heads!r}; it must be a whole number from 1 to {MOST_HEADS}")
    tasks = stated.get("tasks")
    if not isinstance(tasks, list) or not 1 <= len(tasks) <= MOST_TASKS:
        raise BadCalibration(f"tasks must be a list of 1 to {MOST_TASKS} objects with name and answers")
    read = tuple(_task(each, heads) for each in tasks)
    if len({task.name for task in read}) < len(read):
        raise BadCalibration("two tasks have the same name; names must be unique")
    if sum(len(answer) for task in read for answer in task.answers) > MOST_CHARACTERS:
        raise BadCalibration(f"the answers have more than {MOST_CHARACTERS} characters; calibrate with fewer")
    return Calibration(_text_field(stated, "model"), _text_field(stated, "heads_sha256"), heads, read)


def _task(stated: Any, heads: int) -> Task:
    if not isinstance(stated, Mapping):
        raise BadCalibration(f"task {str(stated)[:40]!r} must be an object with name and answers")
    name, answers = _text_field(stated, "name"), stated.get("answers")
    if not isinstance(answers, list) or not 2 <= len(answers) <= MOST_ANSWERS:
        raise BadCalibration(f"task {name}: answers must be a list of 2 to {MOST_ANSWERS} texts")
    for answer in answers:
        if not isinstance(answer, str) or not answer or len(answer) % heads or not RANKS.issuperset(answer):
            raise BadCalibration(
                f"task {name}: answer {str(answer)[:24]!r} must be {heads} characters for each position, digits or -"
            )
    return Task(name, heads, tuple(answers))


def _text_field(stated: Mapping[str, Any], name: str) -> str:
    value = stated.get(name)
    if not isinstance(value, str) or not value or len(value) > 100 or not value.isprintable():
        raise BadCalibration(f"{name} is {str(value)[:40]!r}; it must be a text of 1 to 100 characters")
    return value


def _right(ranks: str) -> Path:
    return tuple(map(int, ranks.partition(NO_RANK)[0]))


def task_figures(task: Task) -> TaskFigures:
    paths = task.paths()
    counts = path_counts(paths)
    order = most_probable(counts, MOST_PATHS)
    halves = [task.paths(task.answers[first::2]) for first in (0, 1)]
    trees = [most_probable(path_counts(half), MOST_PATHS) for half in halves]
    tree = [1.0]
    for size in range(1, len(order) + 1):
        tokens = steps = 0
        for built, judged in zip(trees, reversed(halves), strict=True):
            more = _decode_with_tree(judged, frozenset(built[:size]))
            tokens, steps = tokens + more[0], steps + more[1]
        tree.append(tokens / steps)
    chains = [
        _decode_with_tree(paths, frozenset((0,) * length for length in range(1, count + 1)))
        for count in range(task.heads + 1)
    ]
    return TaskFigures(
        name=task.name,
        positions=task.positions,
        accuracies=_accuracies(task),
        chain=tuple(tokens / steps for tokens, steps in chains),
        paths=order,
        counts=tuple(counts[path] for path in order),
        tree=tuple(tree),
    )


def path_counts(paths: Sequence[Sequence[Path]]) -> Counter[Path]:
    """Number of positions at which each path was right, with all its prefixes."""
    counts: Counter[Path] = Counter()
    for answer in paths:
        for path in answer:
            counts.update(path[:length] for length in range(1, len(path) + 1))
    return counts


def most_probable(counts: Mapping[Path, int], most: int) -> tuple[Path, ...]:
    """The paths that were right most often, each after its prefix, which is right at least as often. Ties go to the
    shorter path, then to lower ranks."""
    ordered = sorted(counts, key=lambda path: (-counts[path], len(path), path))
    return tuple(islice(ordered, most))


def _decode_with_tree(paths: Sequence[Sequence[Path]], tree: frozenset[Path]) -> tuple[int, int]:
    """Tokens and steps of decoding these answers with a tree: each step adds its own token and those of the longest
    right path."""
    tokens = steps = 0
    for answer in paths:
        place = 0
        while place < len(answer):
            right = answer[place]
            length = len(right)
            while length and right[:length] not in tree:
                length -= 1
            place += 1 + length
            steps += 1
        tokens += len(answer)
    return tokens, steps


def _accuracies(task: Task) -> tuple[tuple[float, ...], ...]:
    shares = []
    for head in range(task.heads):
        seen = Counter(rank for answer in task.answers for rank in answer[head :: task.heads])
        shares.append(tuple(seen[str(rank)] / task.positions for rank in range(10)))
    return tuple(shares)


LEAST_GAIN = 1.05
"""Below this speedup speculation is off: two measurements of one step differ by as much."""
MOST_POINTS = 1024
MOST_BATCH = 4096


class BadStepCost(ValueError):
    """Not a step cost; the text names the error and the expected form."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """`steps`: batch -> verified tokens per sequence -> seconds. `guess`: batch -> seconds. `source`: `measured` or
    `given`. `hardware` and `software`: as reported by the measurement."""

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
        """The largest number that was measured for every batch."""
        return min(max(row) for row in self.steps.values())

    def step_s(self, batch: int, verified: int) -> float:
        """Seconds, interpolated linearly; constant below the first measurement."""
        by_batch = {each: _between(row, verified) for each, row in self.steps.items()}
        return _between(by_batch, batch) + (_between(self.guess, batch) if verified > 1 and self.guess else 0.0)


@dataclass(frozen=True, slots=True)
class Choice:
    """For one task: guessed `tokens` for one sequence (paths, if `is_tree`), and its speedup. `ranges`: guessed tokens
    by batch size. `off_from`: the smallest batch size without speculation; None if it pays at every measured size.
    `gains`: batch size -> speedup of the chosen number."""

    task: str
    is_tree: bool
    tokens: int
    gain: float
    ranges: tuple[BatchRange, ...]
    off_from: int | None
    gains: Mapping[int, float]
    reason: str


def read_step_cost(stated: Any) -> StepCost:
    """Read step costs from a document. Rows of several contexts are averaged. Raises BadStepCost if it cannot be
    read."""
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
    for row in _row_list(stated, "steps"):
        batch, verified = _whole_number(row, "batch", MOST_BATCH), _whole_number(row, "verified", 64)
        steps.setdefault(batch, {}).setdefault(verified, []).append(_seconds(row))
    guess: dict[int, list[float]] = {}
    for row in _row_list(stated, "guess") if "guess" in stated else ():
        guess.setdefault(_whole_number(row, "batch", MOST_BATCH), []).append(_seconds(row))
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
    """Speedup for `batch` sequences by number of guessed tokens, from 0 on, within the measured range. `tokens`: tokens
    per step, by the same."""
    plain = cost.step_s(batch, 1)
    return tuple(
        each * plain / cost.step_s(batch, size + 1) for size, each in enumerate(tokens[: cost.most_verified()])
    )


def guessed_at(ranges: Sequence[Sequence[int]], batch: int) -> int:
    """Returns the draft length for a number of sequences; the last range is open-ended."""
    return next((tokens for first, _, tokens in reversed(ranges) if first <= batch), 0)


def choose(figures: TaskFigures, cost: StepCost, *, is_tree: bool, least_gain: float = LEAST_GAIN) -> Choice:
    """Returns the best draft length at each batch size, measured or interpolated. Larger batches never guess more."""
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
    """Speculation is off beyond the measured range."""
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
        return (
            f"no guess makes {figures.name} {LEAST_GAIN:g} times as fast on {cost.instance_type}, even for one sequence"
        )
    dear = cost.step_s(1, chosen[1] + 1) / cost.step_s(1, 1)
    return (
        f"{chosen[1]} guessed tokens give {tokens[chosen[1]]:.2f} tokens per step, which takes {dear:.2f} "
        f"times as long: {gains[1]:.2f} times as fast with one sequence"
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


def _row_list(stated: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    rows = stated.get(name)
    if (
        not isinstance(rows, list)
        or not 1 <= len(rows) <= MOST_POINTS
        or not all(isinstance(row, Mapping) for row in rows)
    ):
        raise BadStepCost(f"{name} must be a list of 1 to {MOST_POINTS} objects")
    return rows


def _whole_number(row: Mapping[str, Any], name: str, most: int) -> int:
    value = row.get(name)
    if type(value) is not int or not 1 <= value <= most:
        raise BadStepCost(f"{name} is {str(value)[:40]!r}; it must be a whole number from 1 to {most}")
    return value


def _seconds(row: Mapping[str, Any]) -> float:
    value = row.get("seconds")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 3600:
        raise BadStepCost(f"seconds is {str(value)[:40]!r}; it must be a number above 0")
    return float(value)


def _mean(times: Sequence[float]) -> float:
    return sum(times) / len(times)
