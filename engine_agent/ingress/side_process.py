"""Keeps one process of an ingress running next to HAProxy: the gRPC gateway, or a relay. Like HAProxy it outlives the
agent, and a new agent adopts it. An agent of another release starts its own, which takes the socket over while the old
one finishes its requests."""

import asyncio
import contextlib
import logging
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

from engine_agent.engines.base import Launch
from engine_agent.ingress.settings import IngressSettings
from engine_agent.ingress.supervisor import RestartBackoff
from engine_agent.node import procfs
from engine_agent.node.accounts import Account, Service, confined, open_way
from engine_agent.node.logs import bound, last_lines

log = logging.getLogger(__name__)

KILL_WITHIN_S: Final = 2.0
POLL_S: Final = 0.05
BOUND_EVERY_S: Final = 10.0
"""Of its log."""


class SideProcess:
    """At most one process. `module`: what Python runs; `name`: what the log calls it; `place`: the argument by which it
    is found again; `folder`: where it may write. `problem`: why it does not run although it should. `exits`: how often
    it exited."""

    def __init__(
        self, settings: IngressSettings, *, module: str, name: str, folder: Path, place: Path, log_file: str
    ) -> None:
        self.folder = folder
        self.problem = ""
        self.exits = 0
        self.pid: int | None = None
        self._settings = settings
        self._module, self._name, self._place = module, name, str(place)
        self._log_file = settings.state_dir / log_file
        self._children: list[subprocess.Popen[bytes]] = []
        self._restarts = RestartBackoff()
        self._arguments: tuple[str, ...] | None = None
        self._bound_due_s = 0.0

    def make_folder(self) -> None:
        """Creates the folder of the sockets, which HAProxy's workers and the process use. Raises OSError."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._settings.worker_account is not None:
            os.chown(self.folder, *self._settings.worker_account)
            open_way(self._settings.state_dir, has_accounts=True)

    def reconcile(self, arguments: tuple[str, ...]) -> None:
        """One pass: adopts, starts or stops the process. Without arguments none should run."""
        if arguments != self._arguments:
            self._replace(arguments)
        is_alive = self._is_alive()
        if not arguments:
            self.problem = ""
        elif not is_alive:
            self._start(arguments)
        elif (now_s := asyncio.get_running_loop().time()) >= self._bound_due_s:
            self._bound_due_s = now_s + BOUND_EVERY_S
            bound(self._log_file)

    def kill(self, why: str) -> None:
        """Kills a process that hangs; the next pass starts another."""
        if self.pid is not None:
            log.error("%s %d: %s: killed", self._name, self.pid, why)
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    async def stop(self, within_s: float) -> None:
        """Ends the process and waits `within_s` for its requests."""
        for pid in self._running():
            await _stop(pid, within_s)
        for child in self._children:  # the main thread can end before the others, which delays the exit status
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(child.wait, KILL_WITHIN_S)
        self._is_alive()

    def _replace(self, arguments: tuple[str, ...]) -> None:
        """Adopts a process with these arguments, and ends those with others."""
        self._arguments, self.pid = arguments, None
        for pid, its in self._running().items():
            if arguments and its == arguments:
                self.pid = pid
                log.info("adopted %s %d", self._name, pid)
            else:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)

    def _is_alive(self) -> bool:
        self._children = [child for child in self._children if child.poll() is None]  # reaps the others
        if self.pid is not None and procfs.stat(self.pid) is None:
            self.pid = None
            self.exits += 1
        return self.pid is not None

    def _start(self, arguments: tuple[str, ...]) -> None:
        now_s = asyncio.get_running_loop().time()
        if self._restarts.note_exit(now_s, random.random()):
            lines = last_lines(self._log_file, 1)
            self.problem = f"{self._name} exited: {lines[-1] if lines else 'it printed nothing'}"
            log.error("%s", self.problem)
        if not self._restarts.may_start(now_s):
            return
        self._restarts.note_start(now_s)
        try:
            self.make_folder()
            launch = self._launch(arguments)
            with self._log_file.open("ab") as output:
                child = subprocess.Popen(
                    launch.argv,
                    cwd=self.folder,
                    env={**os.environ, **launch.env},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
        except OSError as error:
            self.problem = f"{self._name} cannot start: {error}"
            return
        procfs.session_nice(child.pid, procfs.FIRST_NICE)
        self._children.append(child)
        self.pid, self.problem = child.pid, ""
        log.info("%s %d starts", self._name, self.pid)

    def _launch(self, arguments: tuple[str, ...]) -> Launch:
        root, account = str(Path(__file__).resolve().parents[2]), self._settings.worker_account
        launch = Launch(argv=(sys.executable, "-m", self._module, *arguments), env={"PYTHONPATH": root})
        return confined(launch, Account(Service.INGRESS, *account), self.folder) if account else launch

    def _running(self) -> dict[int, tuple[str, ...]]:
        """Processes of this place: their arguments by pid."""
        found = dict[int, tuple[str, ...]]()
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            command = procfs.command(pid)
            if self._module in command and self._place in command and procfs.stat(pid) is not None:
                found[pid] = tuple(command[command.index(self._module) + 1 :])
        return found


async def _stop(pid: int, within_s: float) -> None:
    for number, wait_s in ((signal.SIGTERM, within_s), (signal.SIGKILL, KILL_WITHIN_S)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while procfs.stat(pid) is not None:  # noqa: ASYNC110 - an adopted process is no child
                    await asyncio.sleep(POLL_S)
                return
