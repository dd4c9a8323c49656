"""The layers of the suite, from cheap to dear: in which order they run, on which workers, and where the time went.

Over several workers, a file at a time (tests/on_demand.py). Tests on the scenarios' fleet have a lane, and those that
start single vLLM engines another: within it one test follows another, on one worker, because what they start is shared.
So have those on the cloud of tests, whose EC2 costs each process that has it 0.2 GB and two seconds. Scenarios with a
separate fleet also have one, so that two fleets do not compete: each needs most of a processor.

The scenarios' lane is the longest and starts first. It waits more than it computes, so that the other workers run
the rest meanwhile: the pure tests first, which say soonest what is wrong, then the other lanes, and single files last.
Those fill what is left of every worker, so that all end together: a lane that begins last is waited for alone.
Only whole files belong to a layer or lane, by their `pytestmark`.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

FAST = ("pure", "services")
"""What `make test FAST=1` runs, except tests marked `slow`: no process but PostgreSQL and Valkey."""
GROWN = 1.25
"""A layer that takes this many times its budget is reported: less is the noise of a machine."""
LANES = ("cloud", "own_fleet", "scenario", "vllm")
"""Of a file with the marks of two, the first."""
SLOW, LONG = "slow", "long"
LAYERS = (*FAST, "cloud", "processes", "scenario", "browser", "vllm")
"""From cheap to dear: in this order in one process. Browser and vLLM tests in the lane of scenarios use their fleet."""
RANKS = {"scenario": 0, "pure": 1, "browser": 2, "vllm": 3, "cloud": 4, "services": 5, "processes": 5}
"""The order over several workers. Services and processes side by side: the one computes while the other waits."""


def layer_of(item: pytest.Item) -> str:
    for layer in reversed(LAYERS):
        if item.get_closest_marker(layer):
            return layer
    fixtures = set(getattr(item, "fixturenames", ()))
    return "services" if item.get_closest_marker("django_db") or {"db", "transactional_db"} & fixtures else "pure"


def unit_of(file: Path) -> str:
    """Returns what one worker runs as a whole: a lane, or the file alone."""
    return next((lane for lane in LANES if lane in marks_of(file)), str(file))


def rank_of_file(file: Path) -> int:
    """By its marks, without importing it: fixtures of a conftest that need the database go unnoticed."""
    layer = next((layer for layer in reversed(LAYERS) if layer in marks_of(file)), None)
    return RANKS[layer or ("services" if "django_db" in file.read_text() else "pure")]


@cache
def marks_of(file: Path) -> frozenset[str]:
    """Which layers and lanes a file's `pytestmark` names, `slow` and `long`; none where no such file is."""
    text = file.read_text() if file.suffix == ".py" and file.is_file() else ""
    marks = next((line for line in text.splitlines() if line.startswith("pytestmark =")), "")
    return frozenset(mark for mark in (*LAYERS, *LANES, SLOW, LONG) if f"pytest.mark.{mark}" in marks)


@dataclass
class Spent:
    """Seconds of tests with set-up and tear-down by layer, and how many tests: a worker's or a session's."""

    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    tests: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))

    def add(self, layer: str, report: pytest.TestReport) -> None:
        self.seconds[layer] += report.duration
        self.tests[layer] += report.when == "call"

    def lines(self, budget: Mapping[str, float]) -> Iterator[str]:
        """Yields a table for the terminal: `budget` has the seconds of each layer of a whole run, and is empty if this
        was none."""
        for layer in LAYERS:
            if self.tests[layer]:
                line = f"{layer:<10} {self.tests[layer]:>6} tests {self.seconds[layer]:>8.1f} s"
                if layer in budget:
                    line += f", budget {budget[layer]:>5.0f} s"
                    if self.seconds[layer] > GROWN * budget[layer]:
                        line += f": grew by {self.seconds[layer] / budget[layer] - 1:.0%}"
                yield line
