"""The order of the suite: fast layers first, over all workers; then the slow ones, in two lanes.

Many tests of the fast layers wait, too, for processes and servers: three workers keep two cores busy with them. A test
of a slow layer starts engines or a whole fleet. Two lanes of such tests fit on two cores: in one the engines and then
the browser, in the other the scenarios; within a lane one test follows another. The third worker is done by then. Only
whole files belong to a slow layer.
"""

from functools import cache
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling

ROOT = Path(__file__).resolve().parent.parent

SLOW = ("vllm", "scenario", "browser")
"""Markers of the slow layers, in the order in which they run after everything else.

Browser tests close the line: Playwright's synchronous interface leaves an event loop running in its thread.
"""


def layer_of(item: pytest.Item) -> int:
    """0 for the fast layers, then one for each of the slow ones."""
    return max((index + 1 for index, marker in enumerate(SLOW) if item.get_closest_marker(marker)), default=0)


LANES = {"vllm": "engines and browsers", "browser": "engines and browsers", "scenario": "scenarios"}


class FastThenSlow(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """Gives each worker a file at a time, and a lane of the slow layers to each of the first two that are free."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return _lane(file) or file


@cache
def _lane(file: str) -> str | None:
    text = (ROOT / file).read_text()
    return next((LANES[marker] for marker in SLOW if f"pytestmark = [pytest.mark.{marker}" in text), None)
