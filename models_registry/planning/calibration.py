"""What a calibration of speculation says: how often Medusa heads guessed right, and what follows from that. Pure.

It holds, for each position of answers that heads were judged by, at which rank each head guessed right. That is all
that any chain or tree needs: heads are not independent of each other, so shares by head alone would misjudge paths.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from models_registry.planning.medusa_tree import Path

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
    """Not a calibration; the text names what is wrong and what would be right."""


@dataclass(frozen=True, slots=True)
class Task:
    """One kind of prompt. `answers`: of each answer, `heads` characters for every position: the rank at which each head
    guessed right, or `-`."""

    name: str
    heads: int
    answers: tuple[str, ...]

    @property
    def positions(self) -> int:
        return sum(map(len, self.answers)) // self.heads

    def paths(self, answers: Sequence[str] | None = None) -> list[list[Path]]:
        """Of each answer, position by position, the longest run of right guesses from the first head on."""
        return [
            [_right(answer[place : place + self.heads]) for place in range(0, len(answer), self.heads)]
            for answer in (self.answers if answers is None else answers)
        ]


@dataclass(frozen=True, slots=True)
class Calibration:
    """`heads_sha256`: digest of the weights that guessed. `model`: of the model whose answers they are."""

    model: str
    heads_sha256: str
    heads: int
    tasks: tuple[Task, ...]


@dataclass(frozen=True, slots=True)
class TaskFigures:
    """What follows for one task. `accuracies`: by head, then by rank, the share of positions at which that guess was
    right. `chain[k]`: tokens of a step that verifies the best guesses of the first k heads, exactly, as decoding goes
    through the answers. `paths`: the most probable ones, each after its prefix, so that the first n are the tree of
    size n; `counts` at how many positions each was right. `tree[n]`: tokens of a step with that tree, built on one half
    of the answers and judged by the other."""

    name: str
    positions: int
    accuracies: tuple[tuple[float, ...], ...]
    chain: tuple[float, ...]
    paths: tuple[Path, ...]
    counts: tuple[int, ...]
    tree: tuple[float, ...]


def read_calibration(stated: Any) -> Calibration:
    """A calibration as the trainer writes it (`engine_agent.engines.medusa`).

    Raises:
        BadCalibration: it is none.
    """
    if not isinstance(stated, Mapping) or stated.get("format") != 1:
        raise BadCalibration("the calibration has no format 1; give the calibration.json that the trainer wrote")
    heads = stated.get("heads")
    if type(heads) is not int or not 1 <= heads <= MOST_HEADS:
        raise BadCalibration(f"heads is {heads!r}; it must be a whole number from 1 to {MOST_HEADS}")
    tasks = stated.get("tasks")
    if not isinstance(tasks, list) or not 1 <= len(tasks) <= MOST_TASKS:
        raise BadCalibration(f"tasks must be a list of 1 to {MOST_TASKS} objects with name and answers")
    read = tuple(_task(each, heads) for each in tasks)
    if len({task.name for task in read}) < len(read):
        raise BadCalibration("two tasks have the same name; each must have its own")
    if sum(len(answer) for task in read for answer in task.answers) > MOST_CHARACTERS:
        raise BadCalibration(f"the answers have more than {MOST_CHARACTERS} characters; judge by fewer")
    return Calibration(_text(stated, "model"), _text(stated, "heads_sha256"), heads, read)


def _task(stated: Any, heads: int) -> Task:
    if not isinstance(stated, Mapping):
        raise BadCalibration(f"task {str(stated)[:40]!r} must be an object with name and answers")
    name, answers = _text(stated, "name"), stated.get("answers")
    if not isinstance(answers, list) or not 2 <= len(answers) <= MOST_ANSWERS:
        raise BadCalibration(f"task {name}: answers must be a list of 2 to {MOST_ANSWERS} texts")
    for answer in answers:
        if not isinstance(answer, str) or not answer or len(answer) % heads or not RANKS.issuperset(answer):
            raise BadCalibration(
                f"task {name}: answer {str(answer)[:24]!r} must be {heads} characters for each position, digits or -"
            )
    return Task(name, heads, tuple(answers))


def _text(stated: Mapping[str, Any], name: str) -> str:
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
            more = _walk(judged, frozenset(built[:size]))
            tokens, steps = tokens + more[0], steps + more[1]
        tree.append(tokens / steps)
    chains = [
        _walk(paths, frozenset((0,) * length for length in range(1, count + 1))) for count in range(task.heads + 1)
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
    """At how many positions each path was right, every prefix counted with it."""
    counts: Counter[Path] = Counter()
    for answer in paths:
        for path in answer:
            counts.update(path[:length] for length in range(1, len(path) + 1))
    return counts


def most_probable(counts: Mapping[Path, int], most: int) -> tuple[Path, ...]:
    """The paths that were right most often, each after its prefix: a prefix is right at least as often. Of equal ones
    the shorter comes first, then that of lower ranks."""
    ordered = sorted(counts, key=lambda path: (-counts[path], len(path), path))
    return tuple(islice(ordered, most))


def _walk(paths: Sequence[Sequence[Path]], tree: frozenset[Path]) -> tuple[int, int]:
    """Tokens and steps of decoding these answers with a tree: each step gives its own token and those of the longest
    path in the tree that is right there."""
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
