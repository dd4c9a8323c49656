"""Lets one process at a time fill a place in the cache. It only waits and holds; it never decides what is done."""

import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def exclusively(lock: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold the lock file `lock`; calls `on_wait` once if another process holds it, then waits for its end.

    There is no time limit: the kernel drops the lock with the process that holds it, however that ends, and whoever
    holds it limits its own work.
    """
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
