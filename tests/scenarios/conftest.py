"""One fleet for all scenarios, as `make up` starts it: first all on the simulator; its second start, for those who need
real inference, puts `smollm2` on vLLM. Each test leaves it whole; browsers look at it when it has something to show."""

import logging
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.scenarios.running_fleet import REGIONS, RunningFleet

logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for every poll would bury what a failing test says


@dataclass(frozen=True)
class SecondStart:
    """Cells by name before `make down` and after `make up ENGINE=vllm`, and the processes that were left between."""

    before: dict[str, Any]
    left: list[str]
    after: dict[str, Any]


@pytest.fixture(scope="package")
def started() -> Iterator[RunningFleet]:
    """From `make up` to `make down`, which leaves no process."""
    with tempfile.TemporaryDirectory(prefix="fleet-") as folder:
        fleet = RunningFleet(Path(folder).resolve() / "home")
        try:
            fleet.up("sim")
            fleet.wait_until_whole()
            yield fleet
        finally:
            fleet.down()
        assert fleet.processes() == [], "make down left processes"


@pytest.fixture(scope="package")
def second_start(started: RunningFleet) -> SecondStart:
    started.wait_until_whole()
    started.scale("smollm2", REGIONS[0], 0)  # a cell that there is keeps its version
    before = started.cells()
    started.down()
    left = [" ".join(process.cmdline()) for process in started.processes()]
    started.up("vllm")
    after = started.cells()
    started.scale("smollm2", REGIONS[0], 1)
    started.wait_until_whole()
    return SecondStart(before, left, after)


@pytest.fixture
def fleet(started: RunningFleet, request: pytest.FixtureRequest) -> Iterator[RunningFleet]:
    """With vLLM for tests that are marked so, which come last."""
    if request.node.get_closest_marker("vllm"):
        request.getfixturevalue("second_start")
    yield started
    started.wait_until_whole()
