"""The layers of the suite, from cheap to dear: in which order they run, on which workers, and where the time went.

Fast layers first, over all workers, a file at a time; then the slow ones, which start engines or a whole fleet, each in
a lane of its own: within a lane one test follows another, so that two fleets never meet. Only whole files belong to a
layer, by their `pytestmark`.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling

ROOT = Path(__file__).resolve().parent.parent

FAST = ("pure", "services")
"""What `make test FAST=1` runs: no process but PostgreSQL and Valkey."""
SLOW = ("vllm", "scenario", "browser")
"""Each a lane. Browser tests are the last of their worker: Playwright's synchronous interface leaves an event loop
running in its thread."""
LAYERS = (*FAST, "processes", *SLOW)


def layer_of(item: pytest.Item) -> str:
    """Of a collected test."""
    for layer in (*SLOW, "processes"):
        if item.get_closest_marker(layer):
            return layer
    fixtures = set(getattr(item, "fixturenames", ()))
    return "services" if item.get_closest_marker("django_db") or {"db", "transactional_db"} & fixtures else "pure"


class FastThenSlow(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """Gives each worker a file at a time, and then each lane of the slow layers to the first worker that is free."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return _lane(file) or file


@cache
def _lane(file: str) -> str | None:
    path = ROOT / file
    text = path.read_text() if path.is_file() else ""
    return next((layer for layer in SLOW if f"pytestmark = [pytest.mark.{layer}" in text), None)


@dataclass
class Spent:
    """Seconds of tests with set-up and tear-down by layer, and how many tests: a worker's or a session's."""

    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    tests: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))

    def add(self, layer: str, report: pytest.TestReport) -> None:
        """Count one phase of a test."""
        self.seconds[layer] += report.duration
        self.tests[layer] += report.when == "call"

    def lines(self) -> Iterator[str]:
        """A table for the terminal."""
        for layer in LAYERS:
            if self.tests[layer]:
                yield f"{layer:<10} {self.tests[layer]:>6} tests {self.seconds[layer]:>8.1f} s"
