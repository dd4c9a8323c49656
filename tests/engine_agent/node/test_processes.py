"""Processes of a node get their own session, are stopped with their children, and are adopted; their exit is noticed
immediately."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from engine_agent.engines.base import Launch
from engine_agent.node import procfs
from engine_agent.node.planning.node import Membership, ProcessKind
from engine_agent.node.processes import ENGINE_NICE, ProcessEnd, Processes, child_environment
from engine_agent.node.record import ProcessRecord
from tests.engine_agent.fake_control_plane import eventually
from tests.session_guard import holds_within

pytestmark = pytest.mark.processes

ENGINE = ProcessKind.ENGINE
MEMBER = Membership("c-1", 3, 0)
SLEEPS = "import time; print('up', flush=True); time.sleep(60)"
DEAF = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEPS}"
WITH_CHILD = "import subprocess; subprocess.Popen(['sleep', '60']); " + SLEEPS


class Node:
    """Supervision under test, and its callbacks."""

    def __init__(self, home: Path, node_id: str) -> None:
        self.ends: list[ProcessEnd] = []
        self.freed = 0
        self.node_id = node_id
        self.processes = Processes(node_id, home, on_end=self.ends.append, on_free=self._free)

    def _free(self) -> None:
        self.freed += 1

    def start(self, code: str) -> ProcessRecord:
        return self.processes.start(ENGINE, MEMBER, Launch(argv=(sys.executable, "-c", code), env={}))

    async def up(self) -> None:
        await eventually(lambda: "up" in self.processes.log_path(ENGINE).read_text())

    async def freed_after_end(self) -> ProcessEnd:
        await eventually(lambda: self.freed)
        (end,) = self.ends
        return end


@pytest_asyncio.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    node = Node(tmp_path, f"n-{os.getpid():08x}")
    yield node
    node.processes.stop(ENGINE, 0.0)
    await eventually(lambda: node.processes.running(ENGINE) is None)
    node.processes.close()


MAY_GO_FIRST = os.geteuid() == 0 and Path("/proc/self/autogroup").exists()


def nice_of_session(pid: int) -> int:
    """0 if the kernel does not schedule by session."""
    group = Path(f"/proc/{pid}/autogroup")
    return int(group.read_text().split()[-1]) if group.exists() else 0


def left_by(node: Node) -> list[procfs.ProcessStat]:
    return procfs.started_by_agents_of(node.node_id)


@pytest.mark.asyncio
async def test_a_process_runs_in_a_session_of_its_own_and_writes_to_its_log(node: Node) -> None:
    record = node.start(SLEEPS)
    await node.up()
    found = procfs.stat(record.pid)
    assert found == procfs.ProcessStat(record.pid, session=record.pid, started_ticks=record.started_ticks)
    assert procfs.belongs_to_node(record.pid, node.node_id)
    running = node.processes.running(ENGINE)
    assert running is not None
    assert (running.pid, running.membership, running.stopping) == (record.pid, MEMBER, False)


@pytest.mark.asyncio
async def test_an_end_is_told_with_its_status_and_leaves_no_zombie(node: Node) -> None:
    record = node.start("raise SystemExit(3)")
    end = await node.freed_after_end()
    assert (end.code, end.was_ordered, str(end)) == (3, False, "the engine exited with status 3")
    assert not os.access(f"/proc/{record.pid}", os.F_OK)


@pytest.mark.asyncio
async def test_a_killed_process_is_told_by_its_signal(node: Node) -> None:
    os.kill(node.start(SLEEPS).pid, signal.SIGKILL)
    assert str(await node.freed_after_end()) == "the engine was killed by SIGKILL"


@pytest.mark.asyncio
async def test_stop_asks_first(node: Node) -> None:
    node.start(SLEEPS)
    await node.up()
    node.processes.stop(ENGINE, 30.0)
    end = await node.freed_after_end()
    assert (end.code, end.was_ordered) == (-signal.SIGTERM, True)


@pytest.mark.asyncio
async def test_stop_forces_a_process_that_does_not_listen(node: Node) -> None:
    node.start(DEAF)
    await node.up()
    node.processes.stop(ENGINE, 0.05)
    assert (await node.freed_after_end()).code == -signal.SIGKILL


@pytest.mark.asyncio
async def test_what_a_dead_process_leaves_in_its_session_is_killed_before_its_slot_is_free(node: Node) -> None:
    record = node.start(WITH_CHILD)
    await node.up()
    assert len(procfs.in_session(record.pid, node.node_id)) == 2
    os.kill(record.pid, signal.SIGKILL)
    await node.freed_after_end()
    assert procfs.in_session(record.pid, node.node_id) == []


@pytest.mark.asyncio
async def test_a_taken_slot_starts_nothing(node: Node) -> None:
    record = node.start(SLEEPS)
    with pytest.raises(RuntimeError, match=f"the slot of the engine is taken by pid {record.pid}"):
        node.start(SLEEPS)
    assert [found.pid for found in left_by(node)] == [record.pid]


@pytest.mark.asyncio
async def test_a_program_that_does_not_exist_is_an_error_of_the_start(node: Node) -> None:
    with pytest.raises(FileNotFoundError, match="no-such-program"):
        node.processes.start(ENGINE, MEMBER, Launch(argv=("/no-such-program",), env={}))
    assert node.processes.running(ENGINE) is None


def started_by_an_earlier_agent(node: Node) -> ProcessRecord:
    """A process whose parent, the agent that started it, has exited."""
    env = child_environment(os.environ, {}, node.node_id, ENGINE)
    launcher = (
        "import subprocess, sys; code = sys.argv[1];"
        "null = subprocess.DEVNULL;"
        "child = subprocess.Popen([sys.executable, '-c', code], start_new_session=True, stdout=null, stderr=null);"
        "print(child.pid, flush=True);"
        "import os; os._exit(0)"
    )
    asked = [sys.executable, "-c", launcher, SLEEPS]
    pid = int(subprocess.run(asked, env=env, stdout=subprocess.PIPE, check=True, timeout=60).stdout)
    # Its environment can be read a moment after the program has replaced its parent's.
    assert holds_within(lambda: procfs.belongs_to_node(pid, node.node_id), 60.0)
    found = procfs.stat(pid)
    assert found is not None
    return ProcessRecord(pid, procfs.boot_id(), found.started_ticks, "c-1", 3, 0)


@pytest.mark.asyncio
async def test_a_process_of_an_earlier_agent_is_adopted_watched_and_ended(node: Node) -> None:
    record = await asyncio.to_thread(started_by_an_earlier_agent, node)
    assert node.processes.adopt(ENGINE, record)
    os.kill(record.pid, signal.SIGKILL)
    end = await node.freed_after_end()
    assert (end.record, end.code) == (record, None)
    assert "an earlier agent had started it" in str(end)


@pytest.mark.asyncio
async def test_an_adopted_process_is_stopped_like_any_other(node: Node) -> None:
    assert node.processes.adopt(ENGINE, await asyncio.to_thread(started_by_an_earlier_agent, node))
    node.processes.stop(ENGINE, 30.0)
    assert (await node.freed_after_end()).was_ordered


@pytest.mark.asyncio
@pytest.mark.parametrize("other", [{"started_ticks": 1}, {"boot": "another"}])
async def test_another_process_under_the_same_pid_is_not_adopted(node: Node, other: dict[str, str]) -> None:
    record = await asyncio.to_thread(started_by_an_earlier_agent, node)
    assert not node.processes.adopt(ENGINE, msgspec.structs.replace(record, **other))
    assert node.processes.kill_unknown() == 1
    await eventually(lambda: not left_by(node))


@pytest.mark.asyncio
async def test_a_process_of_another_node_is_not_adopted(node: Node, tmp_path: Path) -> None:
    record = node.start(SLEEPS)
    other = Node(tmp_path, "n-ffffffff")
    assert not other.processes.adopt(ENGINE, record)
    assert other.processes.kill_unknown() == 0


@pytest.mark.asyncio
async def test_what_no_journal_knows_of_is_killed_and_what_is_known_is_not(node: Node) -> None:
    record = node.start(WITH_CHILD)
    await node.up()
    await asyncio.to_thread(started_by_an_earlier_agent, node)
    assert node.processes.kill_unknown() == 1
    await eventually(lambda: len(left_by(node)) == 2)
    assert {found.session for found in left_by(node)} == {record.pid}


@pytest.mark.asyncio
async def test_looking_away_leaves_everything_running(node: Node) -> None:
    record = await asyncio.to_thread(started_by_an_earlier_agent, node)
    assert node.processes.adopt(ENGINE, record)
    node.processes.close()
    assert node.processes.running(ENGINE) is None
    assert procfs.stat(record.pid) is not None
    assert node.processes.adopt(ENGINE, record)


def test_a_process_gets_what_it_needs_and_none_of_the_agents_secrets() -> None:
    own = {"PATH": "/bin", "SWITCHYARD_JOIN_TOKEN": "secret", "SWITCHYARD_HOME": "/h"}
    assert child_environment(own, {"A": "1"}, "n-1", ENGINE) == {
        "PATH": "/bin",
        "SWITCHYARD_HOME": "/h",
        "A": "1",
        "SWITCHYARD_NODE_ID": "n-1",
        "SWITCHYARD_PROCESS": "engine",
        "SPT_NOENV": "1",
    }


@pytest.mark.asyncio
async def test_a_process_that_sets_its_title_is_still_known_as_ours(node: Node) -> None:
    record = node.start(f"import setproctitle; setproctitle.setproctitle('Engine::Core'); {SLEEPS}")
    await node.up()
    assert procfs.belongs_to_node(record.pid, node.node_id)


@pytest.mark.asyncio
async def test_an_engine_goes_ahead_until_it_serves_and_then_gives_way_with_all_its_threads(node: Node) -> None:
    threads = "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start(); "
    record = node.start(threads + WITH_CHILD)
    await node.up()
    await eventually(lambda: len(procfs.in_session(record.pid, node.node_id)) == 2)
    own = os.getpriority(os.PRIO_PROCESS, 0)

    def nice() -> set[int]:
        processes = procfs.in_session(record.pid, node.node_id)
        tasks = [int(task) for process in processes for task in os.listdir(f"/proc/{process.pid}/task")]
        assert len(tasks) == 3
        return {os.getpriority(os.PRIO_PROCESS, task) for task in tasks}

    assert nice() == {own}
    node.processes.lower_priority(ENGINE)
    assert nice() == {max(own, ENGINE_NICE)}


@pytest.mark.asyncio
async def test_where_the_kernel_shares_by_session_an_engine_starts_before_others(node: Node) -> None:
    record = node.start(SLEEPS)
    assert nice_of_session(record.pid) == (procfs.FIRST_NICE if MAY_GO_FIRST else 0)
    await node.up()
    node.processes.lower_priority(ENGINE)
    assert nice_of_session(record.pid) == 0
