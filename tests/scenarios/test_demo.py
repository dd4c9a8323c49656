"""`make demo` on the running fleet: each fault heals, and only streams of killed cells may fail."""

import re
import subprocess
import sys

import pytest

from tests.scenarios.running_fleet import CHECKOUT, RunningFleet

pytestmark = [pytest.mark.long, pytest.mark.scenario, pytest.mark.timeout(900)]

CHAPTERS = ("A node dies", "A bad version is rolled out", "A region is lost")


def test_the_demo_tells_three_faults_and_leaves_the_fleet_whole(fleet: RunningFleet) -> None:
    before = fleet.versions()
    done = subprocess.run(
        [sys.executable, "-m", "bench", "demo"],
        cwd=CHECKOUT, env=fleet.environment, capture_output=True, text=True, timeout=800, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert [title for title in CHAPTERS if re.search(rf"^\| {title} \|", done.stdout, re.M)] == list(CHAPTERS)
    assert re.search(r"rollout \d+ of sim-70b is rolled_back", done.stdout)
    assert "/incidents/" in done.stdout
    failed = re.findall(r"failed, from (\S+ ?\S*): (.*)", done.stdout)
    assert all(cell != "no cell" for cell, _ in failed), failed
    assert fleet.versions() == before
