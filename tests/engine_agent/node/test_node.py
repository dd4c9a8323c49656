"""One node without its agent's loops: orders that it accepts, state that it stores, and reports of failed starts."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from engine_agent.node import watch
from engine_agent.node.compile_caches import NodeCaches
from engine_agent.node.devices import DeviceTurn
from engine_agent.node.downloads import Downloads
from engine_agent.node.enrolment import Enrolment
from engine_agent.node.journal import Journal
from engine_agent.node.launch import NodePlace
from engine_agent.node.node import LocalNode
from engine_agent.node.planning.node import MarkFailed, Membership, StartEngine, StopEngine
from engine_agent.node.record import JOURNAL_FILE, NodeRecord, ProcessRecord
from engine_agent.protocol.machine_messages import NodeResources
from engine_agent.protocol.messages import EnginePlan, Fault
from engine_agent.protocol.states import AgentKind, Phase
from engine_agent.protocol.telemetry_messages import Accelerator
from tests.engine_agent.fake_control_plane import eventually
from tests.engine_agent.orders import assignment, order

GONE = ProcessRecord(pid=2**22 + 1, boot="b", started_ticks=1, cell="c-1", generation=1, rank=0)
MEMBER = Membership("c-1", 1, 0)


class Rig:
    """A node under test and what it reported to its agent."""

    def __init__(self, home: Path, owns: NodeResources | None = None) -> None:
        self.faults: list[Fault] = []
        self.changes = 0
        self.home = home
        self.devices: list[Accelerator] = []
        place = NodePlace(
            "n-1", home, "127.0.0.1", 19990, home, home / "fetched", lambda: {"vllm": home / "not-installed"}, owns=owns
        )
        enrolment = Enrolment("http://127.0.0.1:9", AgentKind.NODE, "n-1", home)
        self.node = LocalNode(
            place,
            stack=lambda: {"kernel": "6"},
            on_change=self._changed,
            on_fault=self.faults.append,
            downloads=Downloads(enrolment, self._changed),
            caches=NodeCaches(home / "compiled", "n-1", Downloads(enrolment, self._changed), self._changed),
            devices=lambda: self.devices,
        )

    def _changed(self) -> None:
        self.changes += 1

    @property
    def journalled(self) -> NodeRecord | None:
        return Journal(self.home / JOURNAL_FILE, NodeRecord).load()


@pytest_asyncio.fixture
async def held(tmp_path: Path) -> AsyncIterator[Rig]:
    held = Rig(tmp_path)
    yield held
    held.node.close()


@pytest.mark.asyncio
async def test_an_order_is_on_disk_before_anybody_acts_on_it(held: Rig) -> None:
    held.node.resume()
    given = order(1, assignment())
    held.node.take_order(given)
    assert held.journalled == NodeRecord("n-1", desired=given)
    assert (held.node.desired, held.changes) == (given.assignment, 1)


@pytest.mark.asyncio
async def test_a_repeated_order_is_no_change_and_a_refused_one_is_told(held: Rig) -> None:
    held.node.take_order(order(5, assignment(generation=2)))
    held.node.take_order(order(5, assignment(generation=2)))
    held.node.take_order(order(6, assignment(generation=1)))
    assert held.changes == 1
    assert held.node.desired == assignment(generation=2)
    assert held.node.refused_order == "generation 1 of c-1 is older than 2"


@pytest.mark.asyncio
async def test_what_was_told_is_known_again_after_a_restart(held: Rig, tmp_path: Path) -> None:
    held.node.take_order(order(1, assignment(phase=Phase.DRAIN)))
    again = Rig(tmp_path)
    again.node.resume()
    assert again.node.desired == assignment(phase=Phase.DRAIN)


@pytest.mark.asyncio
async def test_an_engine_that_ended_while_no_agent_watched_is_a_failure_of_its_generation(held: Rig) -> None:
    Journal(held.home / JOURNAL_FILE, NodeRecord).save(NodeRecord("n-1", order(1, assignment()), engine=GONE))
    held.node.resume()
    failure = held.node.snapshot(None).failure
    assert failure is not None
    assert (failure.membership, failure.reason) == (MEMBER, "the engine ended while no agent watched it")
    assert held.journalled is not None
    assert held.journalled.failure is not None


@pytest.mark.asyncio
async def test_a_failure_is_known_again_after_a_restart_and_the_next_one_counts_up(held: Rig, tmp_path: Path) -> None:
    held.node.take_order(order(1, assignment()))
    held.node.apply(MarkFailed(MEMBER, "late"))
    again = Rig(tmp_path)
    again.node.resume()
    again.node.apply(MarkFailed(MEMBER, "late again"))
    failure = again.node.snapshot(None).failure
    assert failure is not None
    assert (failure.reason, failure.in_a_row) == ("late again", 2)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("engine", "reason"), [("nope", "unknown engine 'nope'"), ("vllm", "vLLM is not installed on this node")]
)
async def test_an_engine_that_this_node_cannot_run_fails_with_the_reason(held: Rig, engine: str, reason: str) -> None:
    given = assignment(plan=EnginePlan(engine, "m", max_concurrency=1, ready_timeout_s=1.0))
    held.node.take_order(order(1, given))
    held.node.apply(StartEngine(given, "test"))
    snapshot = held.node.snapshot(None)
    assert snapshot.engine is None
    assert snapshot.failure is not None
    assert snapshot.failure.reason.startswith(reason)
    (fault,) = held.faults
    assert (fault.signature, fault.summary) == ("engine_not_started", snapshot.failure.reason)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "stored",
    [
        {"args": ("--middleware", "os.system")},
        {"env": {"PYTHONWARNINGS": "all:0:antigravity.x:0:0", "BROWSER": "touch broken-out #%s"}},
        {"env": {"PYTHONPATH": "/tmp"}, "widened": ("PYTHONPATH",)},
    ],
)
async def test_an_order_of_before_the_lists_starts_no_engine(held: Rig, stored: dict[str, Any]) -> None:
    given = assignment(plan=EnginePlan("sim", "m", max_concurrency=1, ready_timeout_s=1.0, **stored))
    held.node.take_order(order(1, given))
    held.node.apply(StartEngine(given, "test"))
    snapshot = held.node.snapshot(None)
    assert snapshot.engine is None
    assert snapshot.failure is not None
    assert snapshot.failure.reason.startswith("engine sim may not be given the ")


@pytest.mark.asyncio
async def test_a_damaged_journal_is_set_aside_and_the_node_waits_for_orders(held: Rig) -> None:
    await asyncio.to_thread((held.home / JOURNAL_FILE).write_text, "{")
    held.node.resume()
    assert held.node.desired is None


@pytest.mark.asyncio
async def test_a_disk_that_refuses_does_not_keep_a_node_from_obeying(held: Rig) -> None:
    (held.home / JOURNAL_FILE).mkdir()  # nothing can be renamed over a folder
    held.node.take_order(order(1, assignment()))
    assert held.node.desired == assignment()
    assert "journal.json" in held.node.journal_error


@pytest.mark.asyncio
async def test_an_engine_on_a_shared_device_waits_for_its_turn(tmp_path: Path) -> None:
    given = assignment(plan=EnginePlan("vllm", "m", max_concurrency=1, ready_timeout_s=1.0))
    half = NodeResources("nvidia", (0,), ("GPU-0",), share=0.5)
    held, other = Rig(tmp_path, half), DeviceTurn(tmp_path / "fetched" / "device-turns", half)
    try:
        assert other.take()
        held.node.take_order(order(1, given))
        step = StartEngine(given, "it is ordered")
        held.node.apply(step)
        assert held.node.snapshot(None).before_start == "it waits until another engine on its device has started"
        assert held.faults == []
        other.leave()
        held.node.apply(step)
        assert held.node.snapshot(None).before_start == ""
        assert held.faults, "its engine is not installed, and its start was tried"
        assert other.take(), "a start that failed gives the turn back"
    finally:
        other.leave()
        held.node.close()


@pytest.mark.asyncio
async def test_an_engine_that_is_not_on_its_mig_instance_is_given_up_once(tmp_path: Path) -> None:
    held = Rig(tmp_path, NodeResources("nvidia", (1002,), ("MIG-02",)))
    held.devices = [Accelerator(1002, "nvidia", "H100 MIG 1g.10gb", memory_used_bytes=0, uuid="MIG-02")]
    try:
        held.node.take_order(order(1, assignment()))
        held.node.apply(StartEngine(assignment(), "it is ordered"))
        held.node.seen = watch.ProbeResults(was_ready=True)
        await held.node.poll()
        assert held.node.snapshot(None).failure is None, "what was read before is no evidence"
        held.devices = [Accelerator(1002, "nvidia", "H100 MIG 1g.10gb", memory_used_bytes=1, uuid="MIG-02")]
        for _ in range(2):
            held.node.seen = watch.ProbeResults(was_ready=True)
            await held.node.poll()
        failure = held.node.snapshot(None).failure
        assert failure is not None
        assert failure.reason.startswith("the engine is not on its MIG instance MIG-02")
        assert len(held.faults) == 1
    finally:
        held.node.apply(StopEngine(0.0, "the test ends"))
        await eventually(lambda: not held.node.is_serving)
        held.node.close()
