"""A cell lives and dies whole: what the others do when one member is gone."""

import json
import signal
from pathlib import Path

import pytest

from tests.asking import CLIENT
from tests.engine_agent.engines.sim.cells import CHAT, ENDLESS, Member, running_cell, until

pytestmark = pytest.mark.processes


def is_unhealthy(leader: Member) -> bool:
    return CLIENT.get(f"{leader.url}/health").status_code == 503


def test_a_killed_follower_ends_the_cell_and_tells_every_client(tmp_path: Path) -> None:
    with running_cell(tmp_path, 2) as (leader, follower, other):
        with leader.streaming(ENDLESS) as lines:
            follower.process.kill()
            until(lambda: is_unhealthy(leader), leader.output)
            refused = leader.chat(CHAT)
            error = json.loads(list(lines)[-1].removeprefix("data: "))["error"]

        assert refused.status_code == 503
        assert follower.node_id in refused.json()["error"]["message"]
        assert f"follower rank 1 ({follower.node_id}) is gone" in error["message"]
        assert (leader.exit_status(), other.exit_status()) == (1, 1)
        assert f"the leader ends the cell: follower rank 1 ({follower.node_id}) is gone" in other.output()


def test_a_request_without_a_first_token_gets_a_clean_503_when_a_follower_dies(tmp_path: Path) -> None:
    with running_cell(tmp_path, 1, "--prefill-tokens-per-s", "0.1") as (leader, follower):
        follower.inject(kind="crash")
        answer = leader.chat({**CHAT, "stream": True})

        assert answer.status_code == 503
        assert follower.node_id in answer.json()["error"]["message"]
        assert leader.exit_status() == 1


def test_a_frozen_follower_counts_as_dead(tmp_path: Path) -> None:
    with running_cell(tmp_path, 1) as (leader, follower):
        follower.process.send_signal(signal.SIGSTOP)

        assert leader.exit_status() == 1
        assert f"follower rank 1 ({follower.node_id}) is silent for 2 s" in leader.output()


def test_followers_end_when_their_leader_is_killed(tmp_path: Path) -> None:
    with running_cell(tmp_path, 2) as (leader, *followers):
        leader.process.kill()

        assert [follower.exit_status() for follower in followers] == [1, 1]
        assert all("the leader is gone: its connection closed" in follower.output() for follower in followers)
