"""One fleet for all scenarios, as `make up` starts it: `smollm2` on real vLLM, `sim-70b` on the simulator. Each test
leaves it whole; browsers look at it when it has something to show."""

import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.scenarios.running_fleet import RunningFleet

logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for every poll would bury what a failing test says


@pytest.fixture(scope="package")
def started() -> Iterator[RunningFleet]:
    """From `make up` to `make down`, which leaves no process."""
    with tempfile.TemporaryDirectory(prefix="fleet-") as folder:
        fleet = RunningFleet(Path(folder).resolve() / "home")
        try:
            fleet.up()
            yield fleet
        finally:
            fleet.down()
        assert fleet.processes() == [], "make down left processes"


@pytest.fixture
def fleet(started: RunningFleet) -> Iterator[RunningFleet]:
    started.wait_until_whole()
    yield started
    started.wait_until_whole()
