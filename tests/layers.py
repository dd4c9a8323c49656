"""The order of the suite: fast layers first, over all workers; then the slow ones, one test after another.

A test of a slow layer starts engines or a whole fleet and measures itself against time limits, so nothing else may run
beside it. Only whole files belong to a slow layer.
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


class FastThenSlow(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """Gives each worker a file at a time, and all files of the slow layers to the worker that is free first."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "slow layers" if _is_slow(file) else file


@cache
def _is_slow(file: str) -> bool:
    text = (ROOT / file).read_text()
    return any(f"pytestmark = [pytest.mark.{marker}" in text for marker in SLOW)
