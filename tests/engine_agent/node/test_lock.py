"""One agent runs per folder, and its command line says in one sentence why it does not start."""

import os
from pathlib import Path

import pytest

from engine_agent.node import main
from engine_agent.node.lock import AgentLock, HomeInUse, read_holder, stop_node


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


def start(home: Path, server: str = "http://127.0.0.1:9") -> int:
    given = ["--node-id", "n-1", "--home", str(home), "--server", server, "--instance-type", "cpu", "--region", "r"]
    return main.run([*given, "--host", "127.0.0.1", "--port-base", "19980"])


def test_a_second_agent_for_a_folder_does_not_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with AgentLock(tmp_path, "n-1"):
        assert start(tmp_path) == 1
    said = capsys.readouterr().err
    assert f"the agent of n-1 does not start: agent {os.getpid()} runs for {tmp_path}" in said


def test_a_server_that_is_no_address_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert start(tmp_path, server="localhost:8000") == 1
    assert "http://HOST:PORT" in capsys.readouterr().err


def test_stop_node_needs_a_folder_where_an_agent_ran(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert stop_node(["--home", str(tmp_path)]) == 1
    assert caplog.messages == [f"no agent ever ran for {tmp_path}"]
