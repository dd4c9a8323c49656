"""Workers of pytest-xdist that collect a file only when they run it.

With xdist alone each worker imports and collects all files, which takes 20 CPU seconds, and no test starts before all
workers have finished. Here each worker only lists the files, and xdist gives it a single item (`Files`). While that
item runs, the worker takes one file or lane after another from a queue that all workers share, collects it and runs its
tests. xdist starts the workers and carries their reports.

The order of the queue is the same in each worker, so that the shared state is one number, how many have been taken:
the length of a file, which is appended to under a lock.
"""

import fcntl
import gc
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from xdist.scheduler import EachScheduling

from tests.layers import ROOT, rank_of_file, unit_of

PARENTS = pytest.StashKey[dict[Path, pytest.Collector]]()
CRASHED_AMONG = "its test is one of those that ran then:"


class Queue:
    """Counts the files or lanes that workers have taken."""

    def __init__(self, path: str) -> None:
        self._path = path

    def take(self, units: int) -> int | None:
        """Returns the index of the next of so many units, None if all have been taken."""
        with open(self._path, "ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            index = os.fstat(file.fileno()).st_size
            if index >= units:
                return None
            file.write(b".")
            file.flush()
            return index

    def close(self, units: int) -> None:
        """Takes all that is left, because a worker has reached `--maxfail`."""
        while self.take(units) is not None:
            pass


class Postponed(pytest.File):
    """A file of tests that has not been imported."""

    def collect(self) -> list[pytest.Item]:
        """Only files that were asked for are collected: pytest also makes their neighbours, and leaves them."""
        assert isinstance(self.parent, pytest.Collector)
        self.config.stash[PARENTS][self.path] = self.parent
        return []


class Files(pytest.Item):
    """The only item of a worker: it runs all files that the worker takes."""

    def runtest(self) -> None:
        raise AssertionError("the plugin runs its files instead")


class WorkerOnDemand:
    """The plugin of a worker."""

    def __init__(self, config: pytest.Config) -> None:
        self._seed = getattr(config.option, "randomly_seed", 0)
        self._queue = Queue(config.workerinput["queue"])  # type: ignore[attr-defined]  # of xdist
        self._parents = config.stash[PARENTS] = {}
        self._units: list[list[Path]] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_pycollect_makemodule(self, module_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
        if self._units:
            return None
        return Postponed.from_parent(parent, path=module_path)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, session: pytest.Session, items: list[pytest.Item]) -> None:
        """The first call is for the list of files, and has no items."""
        if self._units:
            return
        units: dict[str, list[Path]] = {}
        for path in sorted(self._parents):
            units.setdefault(unit_of(path), []).append(path)
        self._units = sorted(units.values(), key=self._place_in_queue)
        files = Files.from_parent(session, name="files")
        files.add_marker(pytest.mark.timeout(0))
        items[:] = [files]

    def _place_in_queue(self, unit: list[Path]) -> tuple[int, int]:
        shuffled = crc32(f"{self._seed}::{os.path.relpath(unit[0], ROOT)}".encode())
        return min(rank_of_file(path) for path in unit), shuffled

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        if not isinstance(item, Files):
            return None
        session = item.session
        tests = self._tests(session)
        test = next(tests, None)
        while test is not None and not (session.shouldfail or session.shouldstop):
            following = next(tests, None)
            session.items[0] = test  # xdist compares each report with the item that it has sent
            item.config.hook.pytest_runtest_protocol(item=test, nextitem=following)
            test = following
        if session.shouldfail or session.shouldstop:
            self._queue.close(len(self._units))
        session.items[0] = item
        return True

    def _tests(self, session: pytest.Session) -> Iterator[pytest.Item]:
        while (index := self._queue.take(len(self._units))) is not None:
            modules = [pytest.Module.from_parent(self._parents[path], path=path) for path in self._units[index]]
            items = [item for module in modules for item in session.genitems(module)]
            session.config.hook.pytest_collection_modifyitems(session=session, config=session.config, items=items)
            freeze()
            yield from items


def freeze() -> None:
    """What was imported lives until the end: a full collection that walks it again takes longer than most tests."""
    gc.collect()
    gc.freeze()


class Distribution:
    """The plugin of the process that starts the workers."""

    def __init__(self) -> None:
        self._taken = tempfile.NamedTemporaryFile(prefix="sy-tests-queue-")  # noqa: SIM115  # removed with this object
        self._running: set[str] = set()
        self._reports = 0

    @pytest.hookimpl(trylast=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """The number of tests is unknown until the end, so no line may end with a percentage."""
        if reporter := session.config.pluginmanager.getplugin("terminalreporter"):
            reporter._show_progress_info = False

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["queue"] = self._taken.name

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> EachScheduling:
        return EachScheduling(config, log)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._running.add(nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._running.discard(nodeid)

    def pytest_runtest_logreport(self) -> None:
        self._reports += 1

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, report: pytest.TestReport) -> None:
        """xdist only knows that the worker ran files."""
        report.longrepr = f"{report.longrepr}; {CRASHED_AMONG} {', '.join(sorted(self._running))}"

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not self._reports and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
