"""A folder has one agent at a time, and says which."""

import os
from pathlib import Path

import pytest

from engine_agent.node.lock import AgentLock, HomeInUse, read_holder


def test_a_second_agent_is_told_who_holds_the_folder(tmp_path: Path) -> None:
    with (
        AgentLock(tmp_path, "n-1"),
        pytest.raises(HomeInUse, match=f"agent {os.getpid()} runs for {tmp_path}"),
        AgentLock(tmp_path, "n-1"),
    ):
        pass


def test_a_folder_is_free_again_and_remembers_its_last_holder(tmp_path: Path) -> None:
    assert read_holder(tmp_path) is None
    for _ in range(2):
        with AgentLock(tmp_path, "n-1"):
            pass
    holder = read_holder(tmp_path)
    assert holder is not None
    assert (holder.node, holder.pid, holder.is_alive()) == ("n-1", os.getpid(), True)
