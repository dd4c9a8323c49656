"""One agent per folder: the lock that its agent holds, and `python -m engine_agent stop-node --home DIR`, which stops
that agent and then everything that it started. In this order nothing is restarted. The kernel releases the lock when
its holder exits. The journal stays: a later agent of the folder reports that its engine has ended, and the control
plane decides."""

import argparse
import fcntl
import logging
import os
import select
import signal
from pathlib import Path
from types import TracebackType

import msgspec

from engine_agent.node import procfs
from engine_agent.node.journal import CorruptJournal, Journal
from engine_agent.node.planning.node import LIMITS
from engine_agent.node.record import JOURNAL_FILE, NodeRecord, ProcessRecord

LOCK_FILE = "agent.lock"


class HomeInUse(Exception):
    pass


class Holder(msgspec.Struct, frozen=True):
    node: str
    pid: int
    boot: str
    started_ticks: int

    def is_alive(self) -> bool:
        """Whether exactly that process still runs."""
        process = procfs.stat(self.pid) if self.boot == procfs.boot_id() else None
        return process is not None and process.started_ticks == self.started_ticks


class AgentLock:
    """Held from enter to exit. Raises HomeInUse on entering if another agent holds it."""

    def __init__(self, home: Path, node_id: str) -> None:
        self._path = home / LOCK_FILE
        self._node_id = node_id
        self._descriptor = -1

    def __enter__(self) -> "AgentLock":
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._descriptor)
            holder = read_holder(self._path.parent)
            raise HomeInUse(f"agent {holder.pid if holder else '?'} runs for {self._path.parent}") from error
        me = procfs.stat(os.getpid())
        started_ticks = me.started_ticks if me is not None else 0
        holder = Holder(self._node_id, os.getpid(), procfs.boot_id(), started_ticks)
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, msgspec.json.encode(holder), 0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self._descriptor)


def read_holder(home: Path) -> Holder | None:
    """The current or last holder of the lock of this folder; None if no agent ever ran here."""
    try:
        return msgspec.json.decode((home / LOCK_FILE).read_bytes(), type=Holder)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


log = logging.getLogger(__name__)

AGENT_GRACE_S = 5.0
KILLED_WITHIN_S = 5.0
SWEEPS = 5


def stop_node(argv: list[str]) -> int:
    """Stops the node of a folder; returns 0 if none of its processes is left."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(prog="python -m engine_agent stop-node", description=__doc__)
    parser.add_argument("--home", required=True, type=Path, help="the folder of the node's agent")
    home: Path = parser.parse_args(argv).home.resolve()
    holder = read_holder(home)
    if holder is None:
        log.error("no agent ever ran for %s", home)
        return 1
    if holder.is_alive():
        _stop_process(holder.pid, AGENT_GRACE_S, is_group=False)
    record = _record(home)
    if record is not None:
        _stop_recorded(record.proxy, LIMITS.proxy_stop_grace_s)
        _stop_recorded(record.engine, LIMITS.engine_stop_grace_s)
    return _sweep(holder.node)


def _record(home: Path) -> NodeRecord | None:
    try:
        return Journal(home / JOURNAL_FILE, NodeRecord).load()
    except CorruptJournal as error:
        log.warning("%s", error)
        return None


def _stop_recorded(started: ProcessRecord | None, grace_s: float) -> None:
    if started is None or started.boot != procfs.boot_id():
        return
    process = procfs.stat(started.pid)
    if process is not None and process.started_ticks == started.started_ticks:
        _stop_process(started.pid, grace_s, is_group=True)


def _stop_process(pid: int, grace_s: float, *, is_group: bool) -> None:
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if is_group:
            procfs.terminate_group(pid)
        else:
            signal.pidfd_send_signal(pidfd, signal.SIGTERM)
        if not select.select([pidfd], [], [], grace_s)[0]:
            log.warning("pid %d did not exit within %g s of SIGTERM; killing it", pid, grace_s)
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            select.select([pidfd], [], [], KILLED_WITHIN_S)
    except ProcessLookupError:
        return
    finally:
        os.close(pidfd)


def _sweep(node_id: str) -> int:
    for _ in range(SWEEPS):
        left = procfs.started_by_agents_of(node_id)
        if not left:
            return 0
        procfs.kill(left)
        for process in left:
            _stop_process(process.pid, KILLED_WITHIN_S, is_group=False)
    log.error("still running: %s", ", ".join(str(process.pid) for process in procfs.started_by_agents_of(node_id)))
    return 1
