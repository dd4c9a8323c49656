"""SIGTERM: no new requests, requests in flight are finished, and no process is left."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from tests.asking import CLIENT
from tests.engine_agent.engines.sim.cells import CHAT, ENDLESS, Cell, Member, running_cell, until

pytestmark = pytest.mark.processes

HALF_A_SECOND = {**ENDLESS, "max_tokens": 250}
STARTER = "from subprocess import *; import sys; print(Popen(sys.argv[1:], stdout=DEVNULL, stderr=DEVNULL).pid)"
"""Starts an engine as an agent would, prints its process id, and exits."""


def is_healthy(port: int) -> bool:
    try:
        return CLIENT.get(f"http://127.0.0.1:{port}/health").status_code == 200
    except httpx.TransportError:
        return False


def accepts(leader: Member) -> bool:
    try:
        CLIENT.get(f"{leader.url}/health")
    except httpx.TransportError:
        return False
    return True


@pytest.mark.parametrize("told", [0, 1], ids=["leader", "follower"])
def test_whoever_is_stopped_the_cell_finishes_what_is_in_flight(tmp_path: Path, told: int) -> None:
    with running_cell(tmp_path, 1) as members:
        with members[0].streaming(HALF_A_SECOND) as lines:
            members[told].process.terminate()
            until(lambda: not accepts(members[0]), members[0].output)
            rest = list(lines)

        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert [member.exit_status() for member in members] == [0, 0]


def test_what_is_not_finished_within_the_grace_is_told_so(tmp_path: Path) -> None:
    with running_cell(tmp_path, 0, "--grace-s", "0.2") as (leader,):
        with leader.streaming(ENDLESS) as lines:
            leader.process.terminate()
            last = list(lines)[-1]

        assert "SIGTERM" in json.loads(last.removeprefix("data: "))["error"]["message"]
        assert leader.exit_status() == 0
        assert "1 requests are not finished after 0.2 s" in leader.output()


def test_a_hung_engine_stops_all_the_same(tmp_path: Path) -> None:
    with running_cell(tmp_path, 0, "--grace-s", "0.2") as (leader,):
        leader.inject(kind="hang")
        with pytest.raises(httpx.ReadTimeout):
            leader.chat(CHAT, timeout_s=0.1)

        leader.process.terminate()

        assert leader.exit_status() == 0


@pytest.mark.parametrize("rank", [0, 1], ids=["leader", "follower"])
def test_a_member_that_is_stopped_before_its_cell_is_whole_ends_at_once(tmp_path: Path, rank: int) -> None:
    cell = Cell(tmp_path, followers=1)
    try:
        alone = cell.start(rank, "--grace-s", "60")
        until(lambda: alone.health()[0] == 503, alone.output)
        alone.process.terminate()
        assert alone.exit_status() == 0
    finally:
        cell.stop()


def test_an_engine_outlives_the_process_that_started_it(tmp_path: Path) -> None:
    cell = Cell(tmp_path, followers=0)
    arguments = [sys.executable, "-c", STARTER, *cell.command(0)]
    started = subprocess.run(arguments, stdout=subprocess.PIPE, timeout=60, check=True)
    engine = psutil.Process(int(started.stdout))
    try:
        until(lambda: is_healthy(cell.ports(0)[0]), engine.status)
        assert cell.node_id(0) in engine.cmdline()
    finally:
        engine.send_signal(signal.SIGTERM)
        engine.wait(60)
