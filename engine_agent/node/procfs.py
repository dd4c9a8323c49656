"""Processes in /proc: identity, start time, session, and the node that they belong to. It reads, and signals groups or
sessions of its caller. A process is identified by its pid *and* its start in clock ticks since boot, because pids are
reused and clocks are set."""

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine_agent.engines.base import NODE_ID_VARIABLE

PROCESS_KIND_VARIABLE = "SWITCHYARD_PROCESS"
"""Set in all processes that an agent starts, to distinguish them from the agent."""

_MOST_READ_BYTES = 64 * 1024
_SESSION, _STARTED = 3, 19
"""Places in /proc/<pid>/stat counted from the state, which is field 3 of proc_pid_stat(5)."""


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """A live process. `started_ticks` is the kernel's start time, in clock ticks since boot."""

    pid: int
    session: int
    started_ticks: int


def boot_id() -> str:
    """Identity of this boot of the machine: ticks since boot cannot be compared across boots."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def stat(pid: int) -> ProcessStat | None:
    """The process, or None if it has ended (a zombie has)."""
    try:
        content = _read(pid, "stat")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = content[content.rindex(b")") + 2 :].split()
    if fields[0] in (b"Z", b"X"):
        return None
    return ProcessStat(pid=pid, session=int(fields[_SESSION]), started_ticks=int(fields[_STARTED]))


def environment(pid: int) -> dict[str, str]:
    try:
        content = _read(pid, "environ")
    except OSError:
        return {}
    pairs = (entry.partition("=") for entry in content.decode(errors="replace").split("\0"))
    return {name: value for name, equals, value in pairs if equals}


def command(pid: int) -> list[str]:
    try:
        return _read(pid, "cmdline").decode(errors="replace").split("\0")[:-1]
    except OSError:
        return []


def belongs_to_node(pid: int, node_id: str) -> bool:
    return environment(pid).get(NODE_ID_VARIABLE) == node_id


def in_session(session: int, node_id: str) -> list[ProcessStat]:
    return [process for process in _all() if process.session == session and belongs_to_node(process.pid, node_id)]


def started_by_agents_of(node_id: str) -> list[ProcessStat]:
    """Live processes that agents of this node started, directly or indirectly."""
    return [
        process
        for process in _all()
        if (has := environment(process.pid)).get(NODE_ID_VARIABLE) == node_id and PROCESS_KIND_VARIABLE in has
    ]


def kill(processes: list[ProcessStat]) -> None:
    """Sends SIGKILL to each process that still is the same."""
    for process in processes:
        if stat(process.pid) == process:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)


FIRST_NICE = -5
"""Of the session of a process through which requests pass. Only root may use negative values."""


def session_nice(pid: int, nice: int) -> None:
    """Sets the priority of the process's session, where the kernel schedules by session."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/autogroup").write_text(str(nice), encoding="ascii")


def threads_nice(pid: int, nice: int) -> None:
    """Lowers the priority of every thread of the process to at least `nice`."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/task"):
            thread = int(entry.name)
            os.setpriority(os.PRIO_PROCESS, thread, max(nice, os.getpriority(os.PRIO_PROCESS, thread)))


def terminate_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGTERM)


def _read(pid: int, name: str) -> bytes:
    """Without `Path` and `open`, which take longer than the kernel: agents read their processes several times a second,
    and searching for one process reads all of them."""
    descriptor = os.open(f"/proc/{pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        content = os.read(descriptor, _MOST_READ_BYTES)
        while content and (more := os.read(descriptor, _MOST_READ_BYTES)):
            content += more
        return content
    finally:
        os.close(descriptor)


def _all() -> Iterator[ProcessStat]:
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and (process := stat(int(entry.name))) is not None:
            yield process


def of_node(node_id: str) -> list[ProcessStat]:
    """Live processes of a node, including its agent, without this process."""
    return [process for process in _all() if process.pid != os.getpid() and belongs_to_node(process.pid, node_id)]
