"""Reports the exit of processes that are no children, so that nothing has to poll whether they still run."""

import asyncio
import os
from collections.abc import Callable, Collection


class ExitWatch:
    """Calls `on_exit` when one of the followed processes exits. Belongs to one event loop."""

    def __init__(self, on_exit: Callable[[], None]) -> None:
        self._on_exit = on_exit
        self._descriptors: dict[int, int | None] = {}

    def follow(self, pids: Collection[int]) -> bool:
        """Follows exactly these processes from now on, or those that have exited no longer. Returns whether the exit of
        each is reported; otherwise the caller has to poll, because the kernel or a sandbox has no pidfd."""
        for pid in self._descriptors.keys() - set(pids):
            self._close(pid)
            del self._descriptors[pid]
        for pid in pids:
            if pid not in self._descriptors:
                self._descriptors[pid] = self._open(pid)
        return None not in self._descriptors.values()

    def close(self) -> None:
        self.follow(())

    def _open(self, pid: int) -> int | None:
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:
            return None
        asyncio.get_running_loop().add_reader(descriptor, self._exited, pid)
        return descriptor

    def _exited(self, pid: int) -> None:
        self._close(pid)
        self._descriptors[pid] = None  # if it is still followed, its follower polls
        self._on_exit()

    def _close(self, pid: int) -> None:
        descriptor = self._descriptors[pid]
        if descriptor is not None:
            asyncio.get_running_loop().remove_reader(descriptor)
            os.close(descriptor)
