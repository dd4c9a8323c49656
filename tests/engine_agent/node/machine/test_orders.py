"""An order that cannot be written is not lost: the control plane does not send it again."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine_agent.node.enrolment import Enrolment, EnrolmentUnreachable
from engine_agent.node.journal import Journal
from engine_agent.node.machine.agent import JOURNAL_FILE, MachineAgent
from engine_agent.node.machine.paths import HostPaths
from engine_agent.node.machine.release_change import ReleaseChange
from engine_agent.node.machine.tenant import Tenant
from engine_agent.protocol.machine_messages import MachineOrder, MachineReport, ReleaseOrder, RunAgent
from engine_agent.protocol.messages import Hello
from engine_agent.protocol.states import AgentKind, MachinePhase

pytestmark = pytest.mark.asyncio
FIRST = MachineOrder("m-1", 1)
SECOND = MachineOrder("m-1", 2, RunAgent(AgentKind.NODE, "n-1", "r", "10.0.0.7", 21000))


class Nobody:
    """Nothing runs, and nothing can be started."""

    id = ""

    def pid(self) -> int | None:
        return None

    def started(self) -> None:
        return None

    def wipe(self) -> str:
        return ""

    def folder(self, name: str) -> Path:
        raise OSError(f"{name} cannot be started in a test")


async def nothing_else(*_: object) -> bool:
    return False


@pytest.fixture
def agent(tmp_path: Path) -> MachineAgent:
    paths = HostPaths(tmp_path)
    paths.home.mkdir(parents=True)
    enrolment = Enrolment("http://127.0.0.1:9", AgentKind.MACHINE, "m-1", paths.home)
    release = SimpleNamespace(tried=None, confirm=lambda: None, follow=nothing_else)
    return MachineAgent(
        paths=paths,
        tenant=cast(Tenant, Nobody()),
        enrolment=enrolment,
        hello=lambda: cast(Hello, None),
        release=cast(ReleaseChange, release),
    )


def reported(agent: MachineAgent) -> MachineReport:
    report = cast(Any, agent)._connection._report
    assert isinstance(report, MachineReport)
    return report


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
        assert reported(agent).reason == "order 2 waits, because it cannot be written: No space left on device"
        take(FIRST)
        await look()
    await look()
    assert reported(agent).version == 2
    assert reported(agent).reason.startswith("n-1 cannot be started")
    kept = Journal(HostPaths(tmp_path).home / JOURNAL_FILE, MachineOrder).load()
    assert kept == SECOND


def _refuse(*_: object) -> None:
    raise OSError("No space left on device")


async def test_a_host_that_leaves_wants_no_other_release(agent: MachineAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: list[object] = []

    async def follow(order: object, *_: object) -> bool:
        wanted.append(order)
        return False

    monkeypatch.setattr(cast(Any, agent)._release, "follow", follow)
    monkeypatch.setattr(Nobody, "id", "n-1")  # which it wipes before it leaves
    release = ReleaseOrder("1" * 16, "e" * 64, 7)
    for order in (MachineOrder("m-1", 1, release=release), MachineOrder("m-1", 2, leave=True, release=release)):
        cast(Any, agent)._on_message(order)
        await cast(Any, agent)._pass()
    assert wanted == [release, None]


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
