"""A cell of real vLLM over two nodes heals, as those of the simulator do."""

import time

import pytest

from tests.load import Answer, agent_and_engine
from tests.scenarios.running_fleet import RunningFleet, eventually
from tests.scenarios.test_healing import REGION, under_load

pytestmark = [pytest.mark.scenario, pytest.mark.vllm, pytest.mark.timeout(900)]


def test_real_inference_over_two_nodes_heals_when_its_follower_is_killed(fleet: RunningFleet) -> None:
    cell = next(iter(fleet.cells(deployment="smollm2").values()))
    leader, follower = (node["id"] for node in cell["nodes"])
    started_again_at = 0.0

    def kill_follower(_: list[Answer]) -> None:
        nonlocal started_again_at
        for process in agent_and_engine(follower, home=fleet.home):
            process.kill()
        eventually(lambda: cell["id"] not in fleet.routed_cells(REGION))
        eventually(lambda: fleet.cells()[cell["id"]]["state"] == "ready", 400)
        eventually(lambda: cell["id"] in fleet.routed_cells(REGION))
        # A table is published before the ingress has it, and the ingress looks at a cell before it sends anybody there.
        eventually(lambda: fleet.api(f"ingresses/i-{REGION}")["cells"].get(cell["id"]) == "up")
        started_again_at = time.monotonic()

    answers = under_load(fleet, kill_follower, "smollm2", rate=1.0)
    assert [a for a in answers if a.error and a.began > started_again_at] == []
    assert [a for a in answers if not a.error and a.began > started_again_at and a.tokens]
    healed = fleet.cells()[cell["id"]]
    assert healed["generation"] > cell["generation"]
    assert follower not in {node["id"] for node in healed["nodes"]}
    assert leader in {node["id"] for node in healed["nodes"]}
