"""Rollouts on the running fleet under load: no request fails, a bad version touches one cell only, and what is killed
or steered on the way ends where it should."""

from typing import Any

import psutil
import pytest

from lab.steady_load import Answer
from tests.scenarios.running_fleet import AskedFleet, RunningFleet, eventually
from tests.scenarios.test_healing import under_load

pytestmark = [pytest.mark.scenario, pytest.mark.timeout(900)]

PASSES_HELD = 3
"""That nothing moves is no event to wait for; that the reconciler has looked so many times is one."""

NO_BAKE = {"canary_bake_s": 0, "bake_s": 0, "min_healthy_s": 2}
GATED = {**NO_BAKE, "canary_bake_s": 10, "gate": {"min_samples": 20}}
ENDED = {"succeeded", "rolled_back", "failed", "paused"}


def start(fleet: AskedFleet, version: str, policy: dict[str, Any] = NO_BAKE) -> int:
    asked = {"deployment": "sim-70b", "version": f"sim-70b@{version}", "policy": policy, "allow_unreleased": True}
    return int(fleet.post("rollouts", asked)["id"])


def ended(fleet: AskedFleet, rollout: int) -> Any:
    eventually(lambda: fleet.api(f"rollouts/{rollout}")["state"] in ENDED)
    return fleet.api(f"rollouts/{rollout}")


def versions(fleet: AskedFleet, state: str = "ready") -> list[str]:
    return [cell["model_version"] for cell in fleet.cells(deployment="sim-70b", state=state).values()]


def failed(answers: list[Answer]) -> list[Answer]:
    return [answer for answer in answers if answer.error]


@pytest.mark.anywhere
@pytest.mark.parametrize(
    ("version", "policy", "words"),
    [
        pytest.param("bad-crash", NO_BAKE, "2 failures of updated cells", id="crashes", marks=pytest.mark.long),
        pytest.param("bad-answer", NO_BAKE, "golden prompt", id="answers wrong", marks=pytest.mark.long),
        pytest.param("bad-slow", GATED, "times the old version's", id="is slower"),
    ],
)
def test_a_bad_version_touches_one_cell_and_is_rolled_back(
    fleet: AskedFleet, version: str, policy: dict[str, Any], words: str
) -> None:
    before = fleet.cells(deployment="sim-70b")
    done: list[Any] = []
    answers = under_load(fleet, lambda _: done.append(ended(fleet, start(fleet, version, policy))), rate=8)
    assert failed(answers) == []
    assert done[0]["state"] == "rolled_back", done[0]["reason"]
    assert words in fleet.api("events", kind="rollout.rolling_back")["results"][0]["message"]
    after = fleet.cells(deployment="sim-70b")
    assert sum(after[name]["generation"] != cell["generation"] for name, cell in before.items()) == 1
    assert {cell["model_version"] for cell in after.values()} == {cell["model_version"] for cell in before.values()}


def test_a_good_version_waits_while_paused_and_reaches_every_cell_though_the_controller_is_killed(
    fleet: RunningFleet,
) -> None:
    _, goal = fleet.versions()
    done: list[Any] = []

    def roll_out(_: list[Answer]) -> None:
        rollout = start(fleet, goal.partition("@")[2])
        eventually(lambda: goal in versions(fleet))
        fleet.post(f"rollouts/{rollout}/pause", {"why": "lunch"})
        eventually(lambda: len(versions(fleet)) == 4)
        held = versions(fleet)
        fleet.wait_for_passes(PASSES_HELD)
        assert versions(fleet) == held
        fleet.post(f"rollouts/{rollout}/resume", {"why": "back"})
        eventually(lambda: goal in versions(fleet, "starting"))
        controller = fleet.service("controller")
        gone = [*controller.children(recursive=True), controller]
        for process in gone:
            process.kill()
        psutil.wait_procs(gone, timeout=60)
        done.append(ended(fleet, rollout))

    assert failed(under_load(fleet, roll_out)) == []
    assert done[0]["state"] == "succeeded", done[0]["reason"]
    eventually(lambda: versions(fleet) == [goal] * 4)


@pytest.mark.long
@pytest.mark.anywhere
def test_an_operator_takes_a_paused_rollout_back(fleet: AskedFleet) -> None:
    stable, goal = fleet.versions()
    cells = len(versions(fleet))
    rollout = start(fleet, goal.partition("@")[2])
    eventually(lambda: fleet.api(f"rollouts/{rollout}")["state"] == "running")
    fleet.post(f"rollouts/{rollout}/pause", {"why": "lunch"})
    fleet.post(f"rollouts/{rollout}/roll-back")
    eventually(lambda: fleet.api(f"rollouts/{rollout}")["state"] == "rolled_back")
    fleet.wait_until_whole()
    assert versions(fleet) == [stable] * cells
