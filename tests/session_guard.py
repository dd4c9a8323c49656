"""Ends everything that a process of the test session started, once that process is gone, however it went.

    python -I -S tests/session_guard.py PID FOLDER SESSION_PID

FOLDER is where that process (pytest, or one worker of pytest-xdist) keeps all its files; SESSION_PID is pytest itself,
without which a worker is of no use. Fleets, agents and engines are
made to outlive their parents, and leave process group and session. A process belongs to the session if FOLDER is in its
command line or environment. Standard library only: one guard runs for each of pytest's processes and ignores the
signals that end those.
"""

import contextlib
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator

WORKER_GRACE_S = 10.0
"""How long a worker may outlive its session: it takes a moment to notice."""
STOP_GRACE_S = 3.0
"""How long processes have to stop in order; servers remove their sockets meanwhile."""
KILL_LIMIT_S = 60.0
"""How long killed processes may take to be gone; one that the disk holds up takes seconds."""
POLL_S = 0.05
"""Between two looks of `holds_within`."""


def main(pid: int, folder: str, session_pid: int) -> None:
    """Wait for the end of `pid`; then end what belongs to `folder`, and remove it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _wait_for_end(pid, session_pid)
    _end_all(folder, signal.SIGTERM, STOP_GRACE_S)
    _end_all(folder, signal.SIGKILL, KILL_LIMIT_S)
    shutil.rmtree(folder, ignore_errors=True)


def _wait_for_end(pid: int, session_pid: int) -> None:
    try:
        process, session = os.pidfd_open(pid), os.pidfd_open(session_pid)
    except ProcessLookupError:
        return
    select.select([process, session], [], [])
    if not select.select([process], [], [], WORKER_GRACE_S)[0]:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, signal.SIGKILL)
        select.select([process], [], [])


def _end_all(folder: str, how: signal.Signals, limit_s: float) -> None:
    signalled: set[int] = set()

    def all_gone() -> bool:
        alive = set(processes_of(folder))
        for each in alive - signalled:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(each, how)
        signalled.update(alive)
        return not alive

    holds_within(all_gone, limit_s)


def holds_within(condition: Callable[[], bool], limit_s: float) -> bool:
    """Whether the condition comes to hold within `limit_s`. For what sends no event: which processes name a folder, and
    the end of processes that another parent has yet to reap."""
    deadline = time.monotonic() + limit_s
    while not (holds := condition()) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return holds


def processes_of(folder: str) -> Iterator[int]:
    """Pids of live processes, but for this one, whose command line or environment names the folder."""
    mark = folder.encode()
    for name in os.listdir("/proc"):
        if not name.isdecimal() or int(name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if any(mark in _read(f"/proc/{name}/{part}") for part in ("cmdline", "environ")):
                yield int(name)


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
