"""The processes of one node: start, adopt and stop them, and notice their exit within milliseconds. Each gets its own
session, so that it outlives its agent and can be killed with all its children. No zombie and no process of an ended
session is left. The caller decides when. Exits and failed starts become evidence for faults here."""

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

from engine_agent.engines.base import NODE_ID_VARIABLE, Launch
from engine_agent.node import logs, procfs
from engine_agent.node.accounts import Account, confined
from engine_agent.node.planning.node import Membership, ProcessKind, RunningProcess
from engine_agent.node.record import ProcessRecord
from engine_agent.protocol.messages import Fault, JsonObject

log = logging.getLogger(__name__)

KILL_AGAIN_AFTER_S = 1.0
"""A session that still has members after this long may have started new ones meanwhile."""
KILL_TRIES = 10
LEFTOVER_POLL_S = 0.02
ENGINE_NICE = 5
"""Of a serving engine, which uses every core: its watcher and proxy must still get CPU time."""
PRIVATE_VARIABLES = ("SWITCHYARD_JOIN_TOKEN",)
"""The agent's own secrets, which its processes must not get."""


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """A process that exited. `code` as in `subprocess` (below 0: the signal), None if another agent started it."""

    kind: ProcessKind
    record: ProcessRecord
    code: int | None
    was_ordered: bool
    ran_s: float

    def __str__(self) -> str:
        if self.code is None:
            return f"the {self.kind} ended (status unknown: an earlier agent had started it)"
        if self.code < 0:
            return f"the {self.kind} was killed by {_signal_name(-self.code)}"
        return f"the {self.kind} exited with status {self.code}"


@dataclass(slots=True)
class _Supervised:
    """A process in its slot. The slot stays in use until everything in the process's session has ended."""

    record: ProcessRecord
    pidfd: int
    since_s: float
    child: subprocess.Popen[bytes] | None
    stopping: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Processes:
    """At most one process of each kind, under the account of its kind if it has one. `on_end` is called immediately,
    once per exit; `on_free` when all processes of the session are gone and the slot is free."""

    def __init__(
        self,
        node_id: str,
        home: Path,
        *,
        on_end: Callable[[ProcessEnd], None],
        on_free: Callable[[], None],
        accounts: Mapping[ProcessKind, Account | None] | None = None,
        now_s: Callable[[], float] = monotonic,
    ) -> None:
        self._now_s = now_s
        self._node_id = node_id
        self._home = home
        self._accounts = accounts or {}
        self._on_end = on_end
        self._on_free = on_free
        self._slots: dict[ProcessKind, _Supervised] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._boot = procfs.boot_id()

    def running(self, kind: ProcessKind) -> RunningProcess | None:
        slot = self._slots.get(kind)
        if slot is None:
            return None
        return RunningProcess(slot.record.membership, slot.record.pid, slot.since_s, slot.stopping)

    def log_path(self, kind: ProcessKind) -> Path:
        return self._home / f"{kind}.log"

    def start(
        self, kind: ProcessKind, membership: Membership, launch: Launch, inherited: tuple[int, ...] = ()
    ) -> ProcessRecord:
        """Starts a process in the free slot of its kind. `inherited`: descriptors that it keeps open. Raises OSError if
        it could not be started."""
        if kind in self._slots:
            raise RuntimeError(f"the slot of the {kind} is taken by pid {self._slots[kind].record.pid}")
        if account := self._accounts.get(kind):
            launch = confined(launch, account, self._home / kind)
        path = self.log_path(kind)
        logs.set_aside(path)  # so that quoted lines are of this process
        with path.open("ab") as output:
            child = subprocess.Popen(
                launch.argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self._home,
                env=child_environment(os.environ, launch.env, self._node_id, kind),
                start_new_session=True,
                pass_fds=inherited,
            )
        procfs.session_nice(child.pid, procfs.FIRST_NICE)  # an engine until it serves: its cell is down
        started = procfs.stat(child.pid)
        record = ProcessRecord(
            pid=child.pid,
            boot=self._boot,
            started_ticks=started.started_ticks if started is not None else 0,
            cell=membership.cell,
            generation=membership.generation,
            rank=membership.rank,
        )
        self._supervise(kind, record, os.pidfd_open(child.pid), child)
        return record

    def lower_priority(self, kind: ProcessKind) -> None:
        """Call when it serves: its session then yields CPU time to its watchers."""
        if slot := self._slots.get(kind):
            procfs.session_nice(slot.record.pid, 0)
            for process in procfs.in_session(slot.record.pid, self._node_id):
                procfs.threads_nice(process.pid, ENGINE_NICE)

    def adopt(self, kind: ProcessKind, record: ProcessRecord) -> bool:
        """Takes over a process that an earlier agent started; False if it has ended."""
        try:
            pidfd = os.pidfd_open(record.pid)
        except ProcessLookupError:
            return False
        # Read after the pidfd is open, so that it cannot be another process with a reused pid.
        stat = procfs.stat(record.pid) if record.boot == self._boot else None
        is_ours = stat is not None and stat.started_ticks == record.started_ticks
        if not is_ours or not procfs.belongs_to_node(record.pid, self._node_id):
            os.close(pidfd)
            return False
        self._supervise(kind, record, pidfd, None)
        return True

    def kill_unknown(self) -> int:
        """Kills unrecorded processes of earlier agents of this node; returns how many there were. Such processes are
        left by an agent that died between starting and recording one, and by an engine that died while no agent watched
        it."""
        known = {slot.record.pid for slot in self._slots.values()}
        unknown = [process for process in procfs.started_by_agents_of(self._node_id) if process.session not in known]
        procfs.kill(unknown)
        return len(unknown)

    def stop(self, kind: ProcessKind, grace_s: float) -> None:
        """Starts to stop the process: SIGTERM to its group and, after `grace_s`, SIGKILL to its session."""
        slot = self._slots.get(kind)
        if slot is not None and not slot.stopping:
            slot.stopping = True
            self._spawn_task(self._stop_group(kind, slot, grace_s))

    def close(self) -> None:
        """Stops watching; all processes keep running."""
        for task in self._tasks:
            task.cancel()
        for slot in self._slots.values():
            self._unwatch(slot)
        self._slots.clear()

    def _supervise(
        self, kind: ProcessKind, record: ProcessRecord, pidfd: int, child: subprocess.Popen[bytes] | None
    ) -> None:
        loop = asyncio.get_running_loop()
        slot = _Supervised(record, pidfd, self._now_s(), child)
        self._slots[kind] = slot
        loop.add_reader(pidfd, self._ended, kind, slot)

    def _unwatch(self, slot: _Supervised) -> None:
        if not slot.ended.is_set():
            asyncio.get_running_loop().remove_reader(slot.pidfd)
            os.close(slot.pidfd)

    def _ended(self, kind: ProcessKind, slot: _Supervised) -> None:
        self._unwatch(slot)
        slot.ended.set()
        code = slot.child.wait() if slot.child is not None else None
        was_ordered, slot.stopping = slot.stopping, True
        ran_s = self._now_s() - slot.since_s
        self._on_end(ProcessEnd(kind, slot.record, code, was_ordered, ran_s))
        self._spawn_task(self._clear_session(kind, slot))

    async def _stop_group(self, kind: ProcessKind, slot: _Supervised, grace_s: float) -> None:
        procfs.terminate_group(slot.record.pid)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await slot.ended.wait()
                return
        if slot.ended.is_set():
            return
        log.warning("the %s (pid %d) did not exit within %g s of SIGTERM; killing it", kind, slot.record.pid, grace_s)
        with contextlib.suppress(ProcessLookupError, OSError):
            signal.pidfd_send_signal(slot.pidfd, signal.SIGKILL)

    async def _clear_session(self, kind: ProcessKind, slot: _Supervised) -> None:
        for _ in range(KILL_TRIES):
            left = procfs.in_session(slot.record.pid, self._node_id)
            if not left:
                break
            procfs.kill(left)
            await _gone(left)
        else:
            log.error("cannot kill the remaining processes of the %s (pid %d)", kind, slot.record.pid)
        self._slots.pop(kind, None)
        self._on_free()

    def _spawn_task(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def child_environment(
    own: Mapping[str, str], extra: Mapping[str, str], node_id: str, kind: ProcessKind
) -> dict[str, str]:
    """Environment of a process: the agent's without its secrets, the process's own, and marks of its node and kind."""
    kept = {name: value for name, value in own.items() if name not in PRIVATE_VARIABLES}
    # A process that sets its title would overwrite its environment, which identifies it; SPT_NOENV prevents that.
    marks = {NODE_ID_VARIABLE: node_id, procfs.PROCESS_KIND_VARIABLE: kind.value, "SPT_NOENV": "1"}
    return {**kept, **extra, **marks}


async def _gone(processes: list[procfs.ProcessStat]) -> None:
    deadline_s = asyncio.get_running_loop().time() + KILL_AGAIN_AFTER_S
    while any(procfs.stat(process.pid) == process for process in processes):
        if asyncio.get_running_loop().time() >= deadline_s:
            return
        await asyncio.sleep(LEFTOVER_POLL_S)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def end_reason(end: ProcessEnd, lines: list[str]) -> str:
    """An exit as text, with the last line of the log. A killed process has no such line about the cause."""
    return f"{end}: {lines[-1]}" if lines and end.code != -signal.SIGKILL else str(end)


def ended_fault(end: ProcessEnd, reason: str, lines: list[str]) -> Fault:
    """Evidence of a process that exited without being stopped; `reason` is what the node reports."""
    record = end.record
    evidence: JsonObject = {
        **_member_fields(record.membership),
        "pid": record.pid,
        "exit_code": end.code,
        "ran_s": round(end.ran_s, 3),
        "last_log_lines": lines,
    }
    return Fault(signature=f"{end.kind}_ended", summary=reason, evidence=evidence)


def not_started_fault(member: Membership, reason: str, lines: list[str]) -> Fault:
    """Evidence of an engine that could not be started or was not ready in time."""
    return Fault("engine_not_started", reason, {**_member_fields(member), "last_log_lines": lines})


def _member_fields(member: Membership) -> JsonObject:
    return {"cell": member.cell, "generation": member.generation, "rank": member.rank}
