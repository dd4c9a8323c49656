"""Failures heal automatically, and clients see no more errors than unavoidable."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from lab.steady_load import Answer, agent_and_engine, steady_load
from tests.scenarios.running_fleet import AskedFleet, RunningFleet, eventually

pytestmark = [pytest.mark.scenario, pytest.mark.timeout(900)]

CHECKOUT = Path(__file__).resolve().parents[2]
REGION = "us-east-1"
RATE = 5.0


def under_load(
    fleet: AskedFleet, act: Callable[[list[Answer]], None], model: str = "sim-70b", rate: float = RATE
) -> list[Answer]:
    """Run `act` while a client sends `rate` requests per second, and return the results of all."""

    async def both() -> list[Answer]:
        stop, answers = asyncio.Event(), list[Answer]()
        load = asyncio.create_task(steady_load(fleet.ingress(REGION), model, rate, stop, answers))
        try:
            await asyncio.to_thread(eventually, lambda: len([a for a in answers if a.ended]) >= rate)
            await asyncio.to_thread(act, answers)
            reached = len(answers)
            await asyncio.to_thread(eventually, lambda: len(answers) >= reached + rate)
        finally:
            stop.set()
            await load
        return answers

    return asyncio.run(both())


@pytest.mark.parametrize(
    "rank",
    [pytest.param(0, id="leader", marks=pytest.mark.long), pytest.param(1, id="follower", marks=pytest.mark.anywhere)],
)
def test_a_killed_node_is_replaced_and_only_its_own_streams_notice(fleet: AskedFleet, rank: int) -> None:
    cell = next(iter(fleet.cells(deployment="sim-70b", region=REGION).values()))
    victim = cell["nodes"][rank]["id"]
    left_at = 0.0

    def kill_and_watch(answers: list[Answer]) -> None:
        nonlocal left_at
        fleet.take_down(victim)
        eventually(lambda: cell["id"] not in fleet.routed_cells(REGION))
        left_at = max(answer.began for answer in answers)
        eventually(lambda: fleet.cells()[cell["id"]]["state"] == "ready")

    answers = under_load(fleet, kill_and_watch)
    failed = [a for a in answers if a.error]
    assert all(a.cell == cell["id"] and a.began <= left_at for a in failed), failed
    healed = fleet.cells()[cell["id"]]
    assert healed["generation"] == cell["generation"] + 1
    assert victim not in {node["id"] for node in healed["nodes"]}
    kept = {node["id"] for node in cell["nodes"]} - {victim}
    assert kept <= {node["id"] for node in healed["nodes"]}
    (incident,) = eventually(lambda: fleet.api("incidents", node=victim, state="closed")["results"])
    assert incident["kind"] == "node-lost"
    assert {part["name"] for part in incident["parts"]} == {victim, cell["id"]}


@pytest.mark.long
def test_a_killed_agent_comes_back_and_adopts_its_engine(fleet: RunningFleet) -> None:
    before = fleet.engine_pids()
    cell = next(iter(fleet.cells(deployment="sim-70b", region=REGION).values()))
    leader = cell["nodes"][0]["id"]

    def kill_agent(_: list[Answer]) -> None:
        for process in agent_and_engine(leader, home=fleet.home):
            if process.pid != before[leader]:
                process.kill()
                process.wait(60)
        eventually(lambda: any(p.pid != before[leader] for p in agent_and_engine(leader, home=fleet.home)))
        eventually(lambda: fleet.api(f"nodes/{leader}")["connected"])

    assert [a for a in under_load(fleet, kill_agent) if a.error] == []
    assert fleet.engine_pids() == before
    assert fleet.cells()[cell["id"]]["generation"] == cell["generation"]


@pytest.mark.long
def test_without_the_control_plane_inference_goes_on_and_state_survives(fleet: RunningFleet) -> None:
    engines, cells = fleet.engine_pids(), fleet.cells()

    def kill_control_plane(answers: list[Answer]) -> None:
        gone = [fleet.service(name) for name in ("web", "controller", "worker", "jobs", "valkey")]
        for process in gone:
            for child in (*process.children(recursive=True), process):
                child.kill()
        psutil.wait_procs(gone, timeout=60)
        reached = len(answers)
        eventually(lambda: len(answers) >= reached + 2 * RATE)
        fleet.up("sim")
        eventually(lambda: all(node["connected"] for node in fleet.api("nodes")["results"]))

    assert [a for a in under_load(fleet, kill_control_plane) if a.error] == []
    assert fleet.engine_pids() == engines
    after = fleet.cells()
    assert {name: cell["generation"] for name, cell in after.items()} == {
        name: cell["generation"] for name, cell in cells.items()
    }


BREAK = """
from fleet.nodes.services.reports import fault_record
from kernel import clock
evidence = {"xid": 79, "device": 0, "hard": True}
fault_record(node="%s", signature="nvidia_xid_fatal", summary="XID 79 on nvidia 0", evidence=evidence, now=clock.now())
"""


@pytest.mark.long
def test_a_node_that_a_reboot_cures_is_a_spare_again_while_another_serves(fleet: RunningFleet) -> None:
    cell = next(iter(fleet.cells(deployment="sim-70b", region=REGION).values()))
    victim = cell["nodes"][1]["id"]
    pids = {process.pid for process in agent_and_engine(victim, home=fleet.home)}
    fleet.run_in_shell(BREAK % victim)
    eventually(lambda: victim not in {node["id"] for node in fleet.cells()[cell["id"]]["nodes"]})
    eventually(lambda: fleet.cells()[cell["id"]]["state"] == "ready")
    eventually(lambda: fleet.api(f"nodes/{victim}")["state"] == "ready")
    assert fleet.api(f"nodes/{victim}")["reason"].startswith("repaired by a reboot of its machine: ")
    assert pids.isdisjoint({process.pid for process in agent_and_engine(victim, home=fleet.home)})
    (incident,) = fleet.api("incidents", node=victim, kind="hardware-fault", state="closed")["results"]
    assert [(step["rung"], step["state"]) for step in incident["evidence"]["ladder"]][1:3] == [
        ("reset_device", "skipped"),
        ("reboot_machine", "cured"),
    ]
