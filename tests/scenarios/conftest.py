"""One fleet for all scenarios: starting a real vLLM takes most of a minute. Each test leaves it whole."""

import logging
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.scenarios.running_fleet import RunningFleet

logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for every poll would bury what a failing test says


@pytest.fixture(scope="package")
def started() -> Iterator[RunningFleet]:
    with tempfile.TemporaryDirectory(prefix="switchyard-scenarios-") as folder:
        fleet = RunningFleet(Path(folder).resolve() / "home")
        with ended_with_this_session(fleet.home):
            try:
                fleet.up()
                yield fleet
            finally:
                fleet.down()
        assert fleet.processes() == [], "make down left processes"


@contextmanager
def ended_with_this_session(home: Path) -> Iterator[None]:
    """Whatever kills this process, the fleet in `home` ends soon after it."""
    command = [sys.executable, str(Path(__file__).with_name("ender.py")), str(home)]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, start_new_session=True) as ender:
        yield
        ender.kill()


@pytest.fixture
def fleet(started: RunningFleet) -> Iterator[RunningFleet]:
    started.wait_until_whole()
    yield started
    started.wait_until_whole()
