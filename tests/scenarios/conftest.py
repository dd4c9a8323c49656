"""Two fleets, each for all scenarios that use it: on the simulator, and with real vLLM, whose start takes most of a
minute. Each test leaves its fleet whole; browsers look at the first one last, when it has something to show."""

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.scenarios.running_fleet import RunningFleet

logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for every poll would bury what a failing test says


@contextmanager
def running_fleet(engine: str) -> Iterator[RunningFleet]:
    """A fleet from `make up` to `make down`, which leaves no process."""
    with tempfile.TemporaryDirectory(prefix="fleet-") as folder:
        fleet = RunningFleet(Path(folder).resolve() / "home", engine)
        try:
            fleet.up()
            yield fleet
        finally:
            fleet.down()
        assert fleet.processes() == [], "make down left processes"


@pytest.fixture(scope="package")
def started() -> Iterator[RunningFleet]:
    with running_fleet("sim") as fleet:
        yield fleet


@pytest.fixture(scope="package")
def vllm_started() -> Iterator[RunningFleet]:
    with running_fleet("vllm") as fleet:
        yield fleet


@pytest.fixture
def fleet(started: RunningFleet) -> Iterator[RunningFleet]:
    started.wait_until_whole()
    yield started
    started.wait_until_whole()


@pytest.fixture
def vllm_fleet(vllm_started: RunningFleet) -> Iterator[RunningFleet]:
    vllm_started.wait_until_whole(400)
    yield vllm_started
    vllm_started.wait_until_whole(400)
