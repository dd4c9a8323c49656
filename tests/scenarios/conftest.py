"""One fleet for all scenarios: starting a real vLLM takes most of a minute. Each test leaves it whole."""

import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.scenarios.running_fleet import RunningFleet

logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for every poll would bury what a failing test says


@pytest.fixture(scope="package")
def started() -> Iterator[RunningFleet]:
    with tempfile.TemporaryDirectory(prefix="switchyard-scenarios-") as folder:
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
