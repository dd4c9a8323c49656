"""A machine agent runs what its order names, and keeps the order while it cannot be written."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_agent.node.enrolment import Enrolment, EnrolmentUnreachable
from engine_agent.node.imds import Metadata
from engine_agent.node.journal import Journal
from engine_agent.node.machine.agent import (
    JOURNAL_FILE,
    AgentState,
    MachineAgent,
    Step,
    may_leave,
    next_step,
    pause_s,
    phase_of,
)
from engine_agent.node.machine.paths import HostPaths
from engine_agent.node.machine.reboots import Reboots
from engine_agent.node.machine.release_change import ReleaseChange
from engine_agent.node.machine.tenant import Tenant
from engine_agent.protocol.machine_messages import (
    MachineNotice,
    MachineOrder,
    MachineReport,
    ReleaseOrder,
    RunAgent,
)
from engine_agent.protocol.messages import Hello
from engine_agent.protocol.states import AgentKind, MachineNoticeKind, MachinePhase
from tests.engine_agent.fake_control_plane import eventually

NODE = RunAgent(AgentKind.NODE, "n-1", "r", "10.0.0.7", 21000)
NONE = MachineOrder("m-1", 1)
RUN = MachineOrder("m-1", 2, NODE)
LEAVE = MachineOrder("m-1", 3, leave=True)


SHARED = MachineOrder("m-1", 4, nodes=(NODE, msgspec.structs.replace(NODE, id="n-2", port=21020)))


@pytest.mark.parametrize(
    ("order", "one", "step"),
    [
        (None, AgentState("n-1"), Step.NOTHING),
        (NONE, AgentState("n-1", alive=True), Step.WIPE),
        (NONE, AgentState("n-1", here=False), Step.NOTHING),
        (RUN, AgentState("n-1", here=False), Step.START),
        (RUN, AgentState("n-1", alive=True), Step.NOTHING),
        (RUN, AgentState("n-1"), Step.START),
        (RUN, AgentState("n-1", start_after_s=11.0), Step.NOTHING),
        (RUN, AgentState("n-2", alive=True), Step.WIPE),
        (SHARED, AgentState("n-2", here=False), Step.START),
        (SHARED, AgentState("n-3", alive=True), Step.WIPE),
        (LEAVE, AgentState("n-1", alive=True), Step.WIPE),
        (LEAVE, AgentState("n-1", here=False), Step.NOTHING),
    ],
)
def test_the_next_step(order: MachineOrder | None, one: AgentState, step: Step) -> None:
    assert next_step(order, one, (), 10.0) is step


@pytest.mark.parametrize(("port", "step"), [(21000, Step.NOTHING), (None, Step.NOTHING), (21020, Step.START)])
def test_an_agent_starts_after_the_one_that_had_its_ports_is_wiped(port: int | None, step: Step) -> None:
    former = AgentState("n-0", alive=True, port=port)
    assert next_step(RUN, AgentState("n-1", here=False), [former], 10.0) is step


def test_a_host_leaves_when_nothing_is_left_on_it() -> None:
    assert may_leave(LEAVE, [AgentState("n-1", here=False)])
    assert not may_leave(LEAVE, [AgentState("n-1"), AgentState("n-2", here=False)])
    assert not may_leave(NONE, [])


@pytest.mark.parametrize(
    ("order", "agents", "phase"),
    [
        (None, [], MachinePhase.IDLE),
        (RUN, [], MachinePhase.STARTING),
        (RUN, [AgentState("n-1", alive=True)], MachinePhase.RUNNING),
        (RUN, [AgentState("n-1")], MachinePhase.STARTING),  # it enrols
        (RUN, [AgentState("n-1", port=21000)], MachinePhase.AGENT_DEAD),
        (SHARED, [AgentState("n-1", alive=True), AgentState("n-2", port=21020)], MachinePhase.AGENT_DEAD),
    ],
)
def test_what_is_reported(order: MachineOrder | None, agents: list[AgentState], phase: MachinePhase) -> None:
    assert phase_of(order, agents) is phase
    assert phase_of(order, agents, left=True) is MachinePhase.LEFT


@given(st.booleans(), st.booleans(), st.floats(0, 100), st.floats(0, 100))
def test_what_an_order_names_is_never_wiped(leave: bool, alive: bool, start_after_s: float, now_s: float) -> None:
    one = AgentState("n-1", alive=alive, start_after_s=start_after_s)
    step = next_step(MachineOrder("m-1", 2, NODE, leave=leave), one, (), now_s)
    assert (step is Step.WIPE) == leave


def test_what_ends_at_once_is_started_ever_more_slowly() -> None:
    assert [pause_s(failures) for failures in (0, 1, 2, 10, 10_000)] == [1.0, 2.0, 4.0, 30.0, 30.0]


FIRST = MachineOrder("m-1", 1)
SECOND = MachineOrder("m-1", 2, RunAgent(AgentKind.NODE, "n-1", "r", "10.0.0.7", 21000))


class NoTenant:
    """Runs no agent and can start none."""

    is_here = False

    def __init__(self, name: str) -> None:
        self.name = name

    def pid(self) -> int | None:
        return None

    def started(self) -> None:
        return None

    def wipe(self) -> str:
        return ""

    @property
    def folder(self) -> Path:
        raise OSError(f"{self.name} cannot be started in a test")


async def nothing_else(*_: object) -> bool:
    return False


@pytest.fixture
def agent(tmp_path: Path) -> MachineAgent:
    return agent_in(tmp_path)


def agent_in(tmp_path: Path, metadata: Metadata | None = None) -> MachineAgent:
    paths = HostPaths(tmp_path)
    paths.home.mkdir(parents=True)
    enrolment = Enrolment("http://127.0.0.1:9", AgentKind.MACHINE, "m-1", paths.home)
    release = SimpleNamespace(tried=None, confirm=lambda: None, follow=nothing_else, give_up=lambda: None)
    return MachineAgent(
        paths=paths,
        tenant=lambda name: cast(Tenant, NoTenant(name)),
        enrolment=enrolment,
        hello=lambda: cast(Hello, None),
        release=cast(ReleaseChange, release),
        reboots=Reboots(paths, boot="first"),
        metadata=metadata,
    )


def reported(agent: MachineAgent) -> MachineReport:
    report = cast(Any, agent)._connection._report
    assert isinstance(report, MachineReport)
    return report


@pytest.mark.asyncio
async def test_a_notice_of_the_cloud_is_reported_immediately(tmp_path: Path) -> None:
    notices = (MachineNotice(MachineNoticeKind.INTERRUPTION, 1795489330.0),)
    agent = agent_in(tmp_path, cast(Metadata, SimpleNamespace(notices=lambda _: notices)))
    running = asyncio.create_task(agent.run())
    await eventually(lambda: getattr(cast(Any, agent)._connection._report, "notices", None) == notices)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


@pytest.mark.asyncio
async def test_an_order_on_a_full_disk_waits_is_said_and_is_followed_once_it_is_written(
    agent: MachineAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take, look = cast(Any, agent)._on_message, cast(Any, agent)._pass
    take(FIRST)
    await look()
    assert (reported(agent).version, reported(agent).reason) == (1, "")
    with monkeypatch.context() as full:
        full.setattr(Journal, "save", _refuse)
        take(SECOND)
        await look()
        assert reported(agent).version == 1, "what is not written is not in force"
        assert reported(agent).phase is MachinePhase.IDLE
        assert reported(agent).reason == "order 2 waits because it cannot be written: No space left on device"
        take(FIRST)
        await look()
    await look()
    assert reported(agent).version == 2
    assert reported(agent).reason.startswith("n-1 cannot be started")
    kept = Journal(HostPaths(tmp_path).home / JOURNAL_FILE, MachineOrder).load()
    assert kept == SECOND


def _refuse(*_: object) -> None:
    raise OSError("No space left on device")


@pytest.mark.asyncio
async def test_a_host_that_leaves_wants_no_other_release(
    agent: MachineAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted: list[object] = []

    async def follow(order: object, *_: object) -> bool:
        wanted.append(order)
        return False

    monkeypatch.setattr(cast(Any, agent)._release, "follow", follow)
    (tmp_path / "state/runs/n-1").mkdir(parents=True)  # which it wipes before it leaves
    release = ReleaseOrder("1" * 16, "e" * 64, 7)
    monkeypatch.setattr(NoTenant, "is_here", True)
    for order in (MachineOrder("m-1", 1, release=release), MachineOrder("m-1", 2, leave=True, release=release)):
        cast(Any, agent)._on_message(order)
        await cast(Any, agent)._pass()
    assert wanted == [release, None]


@pytest.mark.asyncio
@pytest.mark.parametrize("answers", [1, 0])
async def test_each_host_of_the_control_plane_is_asked_once_for_a_credential(
    agent: MachineAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: int
) -> None:
    asked: list[str] = []

    async def enrol(self: Enrolment, shown_by: object) -> str:
        asked.append(self.servers.current)
        if len(asked) == 2 and answers:
            return "credential"
        raise EnrolmentUnreachable("connection refused")

    monkeypatch.setattr(Enrolment, "enrol", enrol)
    hosts = ["https://10.0.0.1:8443", "https://10.0.0.2:8443"]
    own = Enrolment(",".join(hosts), AgentKind.NODE, "n-1", tmp_path, join_token="its own")
    if answers:
        await agent._enrol_anywhere(own)
    else:
        with pytest.raises(EnrolmentUnreachable):
            await agent._enrol_anywhere(own)
    assert sorted(asked) == hosts
