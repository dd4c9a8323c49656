"""Rollouts on the running fleet under load: no request fails, and a bad version touches one cell only."""

from typing import Any

import pytest

from tests.scenarios.running_fleet import RunningFleet, eventually
from tests.scenarios.test_healing import under_load

pytestmark = [pytest.mark.scenario, pytest.mark.timeout(900)]

NO_BAKE = {"canary_bake_s": 0, "bake_s": 0, "min_healthy_s": 2}
ENDED = {"succeeded", "rolled_back", "failed", "paused"}


def roll_out(fleet: RunningFleet, version: str) -> Any:
    """Start a rollout and wait for its end."""
    asked = {"deployment": "sim-70b", "version": f"sim-70b@{version}", "policy": NO_BAKE, "allow_unreleased": True}
    started = fleet.post("rollouts", asked)["id"]
    eventually(lambda: fleet.api(f"rollouts/{started}")["state"] in ENDED, 240)
    return fleet.api(f"rollouts/{started}")


def versions(fleet: RunningFleet) -> list[str]:
    return [cell["model_version"] for cell in fleet.cells(deployment="sim-70b", state="ready").values()]


def test_a_version_that_crashes_touches_one_cell_and_is_rolled_back(fleet: RunningFleet) -> None:
    before = fleet.cells(deployment="sim-70b")
    ended: list[Any] = []
    answers = under_load(fleet, lambda _: ended.append(roll_out(fleet, "bad-crash")))
    assert [answer for answer in answers if answer.error] == []
    assert ended[0]["state"] == "rolled_back", ended[0]["reason"]
    after = fleet.cells(deployment="sim-70b")
    assert sum(after[name]["generation"] != cell["generation"] for name, cell in before.items()) == 1
    assert len(ended[0]["failed"]) == 2


def test_a_good_version_reaches_every_cell_and_no_request_fails(fleet: RunningFleet) -> None:
    ended: list[Any] = []
    answers = under_load(fleet, lambda _: ended.append(roll_out(fleet, "2")))
    assert [answer for answer in answers if answer.error] == []
    assert ended[0]["state"] == "succeeded", ended[0]["reason"]
    eventually(lambda: versions(fleet) == ["sim-70b@2"] * 4, 60)
