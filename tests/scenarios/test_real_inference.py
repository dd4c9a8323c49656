"""The second start of a fleet, with real vLLM: it continues from the stored state, and a cell of vLLM over two nodes
heals like those of the simulator.
"""

import time

import pytest

from lab.steady_load import Answer, agent_and_engine
from tests.scenarios.conftest import SecondStart
from tests.scenarios.running_fleet import RunningFleet, eventually
from tests.scenarios.test_healing import REGION, under_load

pytestmark = [pytest.mark.long, pytest.mark.scenario, pytest.mark.vllm, pytest.mark.timeout(900)]


def test_a_second_start_continues_from_the_stored_state(second_start: SecondStart) -> None:
    assert second_start.left == []
    before, after = second_start.before, second_start.after
    assert {name: [node["id"] for node in cell["nodes"]] for name, cell in after.items()} == {
        name: [node["id"] for node in cell["nodes"]] for name, cell in before.items()
    }
    assert len(before) == 4
    assert all(after[name]["generation"] == cell["generation"] + 1 for name, cell in before.items())


def test_real_inference_over_two_nodes_heals_when_its_follower_is_killed(fleet: RunningFleet) -> None:
    cell = next(iter(fleet.cells(deployment="smollm2").values()))
    assert cell["model_version"].startswith("smollm2@135m-")
    leader, follower = (node["id"] for node in cell["nodes"])
    started_again_at = 0.0

    def kill_follower(_: list[Answer]) -> None:
        nonlocal started_again_at
        for process in agent_and_engine(follower, home=fleet.home):
            process.kill()
        eventually(lambda: cell["id"] not in fleet.routed_cells(REGION))
        eventually(lambda: fleet.cells()[cell["id"]]["state"] == "ready", 400)
        eventually(lambda: cell["id"] in fleet.routed_cells(REGION))
        # A table is published before the ingress has it, and the ingress checks a cell before it sends requests there.
        eventually(lambda: fleet.api(f"ingresses/i-{REGION}")["cells"].get(cell["id"]) == "up")
        started_again_at = time.monotonic()

    answers = under_load(fleet, kill_follower, "smollm2", rate=1.0)
    assert [a for a in answers if a.error and a.began > started_again_at] == []
    assert [a for a in answers if not a.error and a.began > started_again_at and a.tokens]
    healed = fleet.cells()[cell["id"]]
    assert healed["generation"] > cell["generation"]
    assert follower not in {node["id"] for node in healed["nodes"]}
    assert leader in {node["id"] for node in healed["nodes"]}
