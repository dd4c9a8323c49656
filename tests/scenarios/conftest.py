"""One fleet for all scenarios, as `make up` starts it. In the default run `smollm2` is on vLLM from the start. In the
long run all models are on the simulator first; a second start, for the tests that need real inference, puts `smollm2`
on vLLM. Each test leaves the fleet whole.

With `--lab HOME` it is the fleet of the laboratory that runs there, for the scenarios that are marked `anywhere`."""

import logging
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.scenarios.lab_fleet import LabFleet
from tests.scenarios.running_fleet import REGIONS, AskedFleet, RunningFleet

logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for every poll would bury what a failing test says


@dataclass(frozen=True)
class SecondStart:
    """Cells by name before `make down` and after `make up ENGINE=vllm`, and the processes that were left between."""

    before: dict[str, Any]
    left: list[str]
    after: dict[str, Any]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In a laboratory nothing but what runs anywhere."""
    if config.getoption("lab"):
        others = [item for item in items if not item.get_closest_marker("anywhere")]
        items[:] = [item for item in items if item.get_closest_marker("anywhere")]
        config.hook.pytest_deselected(items=others)


@pytest.fixture(scope="package")
def started(request: pytest.FixtureRequest, thorough: bool) -> Iterator[AskedFleet]:
    """From `make up` to `make down`, which leaves no process; or the laboratory's, which runs on."""
    if lab := request.config.getoption("lab"):
        in_lab = LabFleet(Path(lab).resolve())
        in_lab.wait_until_whole()
        yield in_lab
        return
    with tempfile.TemporaryDirectory(prefix="fleet-") as folder:
        fleet = RunningFleet(Path(folder).resolve() / "home")
        try:
            fleet.up("sim" if thorough else "vllm")
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
def fleet(started: AskedFleet, request: pytest.FixtureRequest, thorough: bool) -> Iterator[AskedFleet]:
    """With vLLM for tests that are marked so, which run last; in a laboratory they have the simulator."""
    if thorough and request.node.get_closest_marker("vllm") and not request.config.getoption("lab"):
        request.getfixturevalue("second_start")
    yield started
    started.wait_until_whole()
