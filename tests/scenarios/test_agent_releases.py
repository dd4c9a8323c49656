"""Agents of the running fleet move to another release and back under load: no request fails, and no engine, cell proxy
or HAProxy restarts. A release whose agents do not start is rolled back automatically.
"""

import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lab.steady_load import Answer
from tests.scenarios.running_fleet import CHECKOUT, RunningFleet, eventually
from tests.scenarios.test_healing import under_load

pytestmark = [pytest.mark.long, pytest.mark.scenario, pytest.mark.timeout(900)]

STATED = "engine_agent/node/telemetry/fingerprint.py"
UPGRADE_LIMIT_S = 300.0


def carried(fleet: RunningFleet, folder: Path, *, broken: bool = False) -> str:
    """Register another release of this checkout's agent; returns its ID."""
    shutil.copytree(CHECKOUT / "engine_agent", folder / "engine_agent")
    stated = folder / STATED
    text = stated.read_text().replace('AGENT_VERSION = "0.1.0"', 'AGENT_VERSION = "0.2.0"')
    stated.write_text(text + ('\nraise ImportError("this release is broken")\n' if broken else ""))
    state = json.loads((fleet.home / "up.json").read_text())
    environment = {
        **os.environ,
        "SWITCHYARD_HOME": str(fleet.home),
        "DATABASE_URL": state["database_url"],
        "SECRET_KEY": "of-a-test-that-signs-nothing-0123456789-abcdefghijkl",
    }
    done = subprocess.run(
        [sys.executable, "manage.py", "agent_release", str(folder)],
        cwd=CHECKOUT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def pids(fleet: RunningFleet) -> dict[str, int]:
    haproxies = {row["id"]: row["haproxy_pid"] for row in fleet.api("ingresses")["results"]}
    return {**fleet.engine_pids(), **haproxies}


def upgraded(fleet: RunningFleet, release: str) -> dict[str, Any]:
    number = fleet.post("agents/rollouts", {"release": release, "soak_s": 2})["id"]
    eventually(lambda: fleet.api(f"agents/rollouts/{number}")["ended_at"], UPGRADE_LIMIT_S)
    return dict(fleet.api(f"agents/rollouts/{number}"))


def running(fleet: RunningFleet, release: str) -> list[str]:
    return list(fleet.api(f"agents/releases/{release}")["agents"])


def _go(fleet: RunningFleet, release: str, ended: list[dict[str, Any]], _: list[Answer]) -> None:
    ended.append(upgraded(fleet, release))


def test_all_agents_go_to_another_release_and_back_and_nobody_notices(fleet: RunningFleet, tmp_path: Path) -> None:
    home = next(row["id"] for row in fleet.api("agents/releases")["results"] if row["is_current"])
    other = carried(fleet, tmp_path)
    before = pids(fleet)
    surplus = {node["id"] for node in fleet.api("nodes")["results"] if not node["cell"]}  # one may be rolled back
    everybody = set(running(fleet, home)) - surplus
    assert everybody >= before.keys()
    for release, left in ((other, home), (home, other)):
        done: list[dict[str, Any]] = []
        answers = under_load(fleet, partial(_go, fleet, release, done), rate=8)
        assert done[0]["state"] == "succeeded", done[0]["reason"]
        assert [answer for answer in answers if answer.error] == []
        assert set(running(fleet, release)) >= everybody
        assert running(fleet, left) == []
        assert pids(fleet) == before


def test_a_release_whose_agents_do_not_come_up_is_left_again(fleet: RunningFleet, tmp_path: Path) -> None:
    home = next(row["id"] for row in fleet.api("agents/releases")["results"] if row["is_current"])
    other = carried(fleet, tmp_path, broken=True)
    before = pids(fleet)
    done: list[dict[str, Any]] = []
    answers = under_load(fleet, partial(_go, fleet, other, done), rate=8)
    assert done[0]["state"] == "rolled_back"
    assert f"healthy with {other}" in done[0]["reason"]
    assert [answer for answer in answers if answer.error] == []
    assert pids(fleet).items() >= before.items()
    assert done[0]["ring"] < 2  # the others were never upgraded
    eventually(lambda: running(fleet, other) == [])
    current = next(row["id"] for row in fleet.api("agents/releases")["results"] if row["is_current"])
    assert current == home
