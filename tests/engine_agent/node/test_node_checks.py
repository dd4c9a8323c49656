"""A node runs each deep check once, reports the results, and turns failed ones into faults."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from engine_agent.node import node_checks
from engine_agent.node.checks.result import Result
from engine_agent.node.node_checks import LINK_PORT, NodeChecks
from engine_agent.protocol.messages import CheckRequest, Fault, Peer
from engine_agent.protocol.signatures import is_hard
from engine_agent.protocol.telemetry_messages import CheckReport

pytestmark = pytest.mark.processes

PEERS = (Peer("n-1", 0, "10.0.0.1", 9000), Peer("n-2", 1, "10.0.0.2", 9000))


class Node:
    def __init__(self, home: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
        self.home, self.faults, self.said = home, list[Fault](), list[CheckReport | None]()
        self.argv: list[Sequence[str]] = []
        self.checks = NodeChecks(home, tuple, self.faults.append, lambda: self.said.append(self.checks.report))
        real = asyncio.create_subprocess_exec

        async def start(*argv: str, **options: object) -> asyncio.subprocess.Process:
            self.argv.append(argv)
            return await real("/bin/sh", "-c", script, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(asyncio, "create_subprocess_exec", start)

    def request(self, request: CheckRequest | None, *, is_serving: bool = False) -> None:
        asyncio.run(self.checks.run_requested(request, is_serving=is_serving))


def test_devices_are_reset_before_the_checks_and_a_failed_reset_is_no_new_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Sequence[str]] = []

    async def reset(named: Sequence[str]) -> Result:
        asked.append(named)
        return Result("reset", False, "in use by another client")

    node = Node(tmp_path, monkeypatch, lines(Result("memory", True, "fine")))
    node.checks = NodeChecks(tmp_path, tuple, node.faults.append, lambda: None, reset=reset)
    node.request(CheckRequest("r1", reset=("GPU-1",)))
    assert asked == [("GPU-1",)]
    assert node.checks.report is not None
    assert [(one.check, one.ok) for one in node.checks.report.results] == [("reset", False), ("memory", True)]
    assert node.faults == []
    node.request(CheckRequest("r2", reset=()), is_serving=True)
    assert node.checks.report.results[0].found == "an engine runs on the node"
    node.request(CheckRequest("r3"))
    assert len(asked) == 1


def lines(*results: Result) -> str:
    return "cat > /dev/null; " + "; ".join(f"echo '{result.as_line()}'" for result in results)


def test_what_is_found_is_reported_as_it_comes_and_failures_are_faults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = Result("memory", False, "byte 3 is 0x45", "memory returns what was written to it")
    node = Node(tmp_path, monkeypatch, lines(Result("disk", True, "fine"), wrong, Result("links", False, "slow")))
    node.request(CheckRequest("r1"))
    report = node.checks.report
    assert report is not None
    assert report.ended_at is not None
    assert [(one.check, one.ok) for one in report.results] == [("disk", True), ("memory", False), ("links", False)]
    assert [len(said.results) for said in node.said if said] == [0, 1, 2, 3, 3]
    assert [(fault.signature, is_hard(fault.signature)) for fault in node.faults] == [
        ("deep_check_failed", True),
        ("link_check_failed", False),
    ]
    assert node.faults[0].summary == "memory: byte 3 is 0x45"


def test_a_request_is_made_once_also_by_an_agent_that_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(tmp_path, monkeypatch, "true")
    for request in (None, CheckRequest("r1"), CheckRequest("r1")):
        node.request(request)
    again = NodeChecks(tmp_path, tuple, node.faults.append, lambda: None)
    for request in (CheckRequest("r1"), CheckRequest("r2")):
        asyncio.run(again.run_requested(request, is_serving=False))
    assert len(node.argv) == 2
    assert NodeChecks(tmp_path, tuple, node.faults.append, lambda: None).report == again.report
    (tmp_path / node_checks.REPORT_FILE).write_text("torn")
    assert NodeChecks(tmp_path, tuple, node.faults.append, lambda: None).report is None


def test_links_are_checked_with_the_peers_unless_the_node_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(tmp_path, monkeypatch, f"cat > {tmp_path}/plan")
    node.request(CheckRequest("r1", 1, PEERS, "hush"))
    assert "--links" in node.argv[0]
    assert "--arriving" not in node.argv[0]
    plan = json.loads((tmp_path / "plan").read_text())
    assert plan["members"][1] == {"rank": 1, "address": "10.0.0.2", "port": 9000 + LINK_PORT}
    assert "hush" not in " ".join(node.argv[0])
    node.request(CheckRequest("r2", 1, PEERS, "hush"), is_serving=True)
    assert "--light" in node.argv[1]
    assert "--links" not in node.argv[1]


@pytest.mark.parametrize(
    ("script", "said"), [("exec sleep 60", "they did not finish within 0 s"), ("exit 9", "status 9")]
)
def test_checks_that_hang_or_crash_end_and_are_no_fault(
    script: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_checks, "LIMIT_S", 0.3)
    node = Node(tmp_path, monkeypatch, script)
    node.request(CheckRequest("r1"))
    report = node.checks.report
    assert report is not None
    assert said in report.results[-1].found
    assert node.faults == []


@pytest.mark.parametrize(("accelerators", "variable", "made"), [(0, "", 0), (8, "", 1), (8, "off", 0), (0, "on", 1)])
def test_a_machine_with_accelerators_is_checked_before_it_joins_once_in_a_boot(
    accelerators: int, variable: str, made: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(tmp_path, monkeypatch, "true")
    for _ in range(2):
        asyncio.run(node.checks.run_before_joining(accelerators, variable))
    assert len(node.argv) == made
    assert all("--arriving" in argv for argv in node.argv), "doctor was not asked"
