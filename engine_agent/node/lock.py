"""One agent per folder: a lock that the kernel gives back when its holder dies, with the holder's name in it."""

import fcntl
import os
from pathlib import Path
from types import TracebackType

import msgspec

from engine_agent.node import procfs

LOCK_FILE = "agent.lock"


class HomeInUse(Exception):
    """Another agent runs for this folder."""


class Holder(msgspec.Struct, frozen=True):
    """The agent that holds the lock, or last did."""

    node: str
    pid: int
    boot: str
    started_ticks: int

    def is_alive(self) -> bool:
        """Whether that very process still runs."""
        process = procfs.stat(self.pid) if self.boot == procfs.boot_id() else None
        return process is not None and process.started_ticks == self.started_ticks


class AgentLock:
    """Held from enter to exit.

    Raises (on entering):
        HomeInUse: another agent holds it.
    """

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
    """Who holds or last held the lock of this folder; None if no agent ever ran here."""
    try:
        return msgspec.json.decode((home / LOCK_FILE).read_bytes(), type=Holder)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
