"""The processes of one node: start, adopt, notice their end within milliseconds, end them for sure.

Each gets a session of its own, so that it outlives its agent and can be ended with all that it started. It never
decides when to do any of this, and leaves no zombie and nothing of an ended session behind. What went
wrong becomes evidence here, for reports and fault messages; sending it is for others.
"""

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
"""SIGKILL needs no grace; a session that still has members after this long may have grown new ones meanwhile."""
KILL_TRIES = 10
LEFTOVER_POLL_S = 0.02
ENGINE_NICE = 5
"""Of an engine that serves: it takes every core it gets; what watches it and proxies for it must still get its turn."""
FIRST_NICE = -5
"""Of the session of a proxy, and of an engine until it serves: its cell is down. Only root may go before others."""
PRIVATE_VARIABLES = ("SWITCHYARD_JOIN_TOKEN",)
"""The agent's own secrets, which nothing that it starts may see."""


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """A process that ended. `code` as `subprocess` has it (below 0: the signal), None if another agent started it."""

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
    """A process in its slot. The slot stays taken until everything in the process's session has ended."""

    record: ProcessRecord
    pidfd: int
    since_s: float
    child: subprocess.Popen[bytes] | None
    stopping: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Processes:
    """At most one process of each kind, under the account of its kind if it has one.

    `on_end` is called once for each end, at once; `on_free` when nothing of the process is left and its slot is free.
    """

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
        """The process in the slot of this kind, if there is one."""
        held = self._slots.get(kind)
        if held is None:
            return None
        return RunningProcess(held.record.membership, held.record.pid, held.since_s, held.stopping)

    def log_path(self, kind: ProcessKind) -> Path:
        """Where the output of processes of this kind goes."""
        return self._home / f"{kind}.log"

    def start(self, kind: ProcessKind, membership: Membership, launch: Launch) -> ProcessRecord:
        """Start a process in the free slot of its kind.

        Raises:
            OSError: it could not be started.
        """
        if kind in self._slots:
            raise RuntimeError(f"the slot of the {kind} is taken by pid {self._slots[kind].record.pid}")
        if account := self._accounts.get(kind):
            launch = confined(launch, account, self._home / kind)
        path = self.log_path(kind)
        logs.set_aside(path)  # so that what is quoted of a log is of this process
        with path.open("ab") as output:
            child = subprocess.Popen(
                launch.argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self._home,
                env=child_environment(os.environ, launch.env, self._node_id, kind),
                start_new_session=True,
            )
        procfs.session_nice(child.pid, FIRST_NICE)
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

    def step_back(self, kind: ProcessKind) -> None:
        """It serves: from now on all that is in its session gives way to what watches it."""
        if held := self._slots.get(kind):
            procfs.session_nice(held.record.pid, 0)
            for process in procfs.in_session(held.record.pid, self._node_id):
                procfs.threads_nice(process.pid, ENGINE_NICE)

    def adopt(self, kind: ProcessKind, record: ProcessRecord) -> bool:
        """Take over a process that an earlier agent started; False if it has ended."""
        try:
            pidfd = os.pidfd_open(record.pid)
        except ProcessLookupError:
            return False
        # Looked at after the pidfd is held, so that it cannot be another process that took the pid meanwhile.
        stat = procfs.stat(record.pid) if record.boot == self._boot else None
        is_ours = stat is not None and stat.started_ticks == record.started_ticks
        if not is_ours or not procfs.belongs_to_node(record.pid, self._node_id):
            os.close(pidfd)
            return False
        self._supervise(kind, record, pidfd, None)
        return True

    def kill_unknown(self) -> int:
        """Kill what earlier agents of this node started and nobody knows of; return how many processes that were.

        An agent that died between starting a process and recording it leaves such a one, and so does an engine that
        died while no agent watched it.
        """
        known = {held.record.pid for held in self._slots.values()}
        unknown = [process for process in procfs.started_by_agents_of(self._node_id) if process.session not in known]
        procfs.kill(unknown)
        return len(unknown)

    def stop(self, kind: ProcessKind, grace_s: float) -> None:
        """Begin to end the process: SIGTERM to its group and, after `grace_s`, SIGKILL to its session."""
        held = self._slots.get(kind)
        if held is not None and not held.stopping:
            held.stopping = True
            self._spawn_task(self._end(kind, held, grace_s))

    def close(self) -> None:
        """Look away: everything that runs goes on running."""
        for task in self._tasks:
            task.cancel()
        for held in self._slots.values():
            self._unwatch(held)
        self._slots.clear()

    def _supervise(
        self, kind: ProcessKind, record: ProcessRecord, pidfd: int, child: subprocess.Popen[bytes] | None
    ) -> None:
        loop = asyncio.get_running_loop()
        held = _Supervised(record, pidfd, self._now_s(), child)
        self._slots[kind] = held
        loop.add_reader(pidfd, self._ended, kind, held)

    def _unwatch(self, held: _Supervised) -> None:
        if not held.ended.is_set():
            asyncio.get_running_loop().remove_reader(held.pidfd)
            os.close(held.pidfd)

    def _ended(self, kind: ProcessKind, held: _Supervised) -> None:
        """The pidfd became readable: the process has ended."""
        self._unwatch(held)
        held.ended.set()
        code = held.child.wait() if held.child is not None else None
        was_ordered, held.stopping = held.stopping, True
        ran_s = self._now_s() - held.since_s
        self._on_end(ProcessEnd(kind, held.record, code, was_ordered, ran_s))
        self._spawn_task(self._clear_session(kind, held))

    async def _end(self, kind: ProcessKind, held: _Supervised, grace_s: float) -> None:
        procfs.terminate_group(held.record.pid)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await held.ended.wait()
                return
        if held.ended.is_set():
            return
        log.warning("the %s (pid %d) did not end within %g s of SIGTERM; killing it", kind, held.record.pid, grace_s)
        with contextlib.suppress(ProcessLookupError, OSError):
            signal.pidfd_send_signal(held.pidfd, signal.SIGKILL)

    async def _clear_session(self, kind: ProcessKind, held: _Supervised) -> None:
        """Kill what the process left in its session, and free its slot when that is gone."""
        for _ in range(KILL_TRIES):
            left = procfs.in_session(held.record.pid, self._node_id)
            if not left:
                break
            procfs.kill(left)
            await _gone(left)
        else:
            log.error("cannot end what is left of the %s (pid %d)", kind, held.record.pid)
        self._slots.pop(kind, None)
        self._on_free()

    def _spawn_task(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def child_environment(
    own: Mapping[str, str], extra: Mapping[str, str], node_id: str, kind: ProcessKind
) -> dict[str, str]:
    """Environment of a process: the agent's without its secrets, what the process needs, and whose it is."""
    kept = {name: value for name, value in own.items() if name not in PRIVATE_VARIABLES}
    # A process that sets its title writes over its environment, by which it is recognised, unless told not to.
    marks = {NODE_ID_VARIABLE: node_id, procfs.PROCESS_KIND_VARIABLE: kind.value, "SPT_NOENV": "1"}
    return {**kept, **extra, **marks}


async def _gone(processes: list[procfs.ProcessStat]) -> None:
    """Return when all have ended, or after `KILL_AGAIN_AFTER_S`."""
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
    """An end as text, with the last line of the log, unless it was killed: then that line says nothing of why."""
    return f"{end}: {lines[-1]}" if lines and end.code != -signal.SIGKILL else str(end)


def ended_fault(end: ProcessEnd, reason: str, lines: list[str]) -> Fault:
    """Evidence of a process that ended by itself; `reason` is what the node reports."""
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
