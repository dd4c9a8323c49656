"""`make status`: what runs of a home, read from outside; changes nothing."""

import os
import subprocess
import sys

import psutil

from controlplane.embedded.attachment import is_alive
from controlplane.embedded.belonging import describe, processes_of
from controlplane.embedded.configuration import CHECKOUT, Configuration
from controlplane.embedded.console import Console
from controlplane.embedded.home import Home, LauncherPhase
from controlplane.embedded.process_environment import control_plane_environment

_LOOK_ONCE_S = 0.1
"""Above 0, because only a command that waits also judges."""
_COMMAND_MARGIN_S = 30.0
_MIB = 1024 * 1024


def show_status(configuration: Configuration, home: Home, console: Console) -> int:
    """Print it; 0 when every cell is ready, 1 when not, 3 when nothing runs (as init scripts do)."""
    state = home.read_state()
    running = processes_of(home.path)
    if state is None or not is_alive(state):
        if not running:
            console.plain(f"Nothing of {home.path} runs. `make up` starts it.")
            return 3
        console.plain(f"No launcher runs, but {len(running)} processes of {home.path} do: `make up` adopts them.")
        for process in running:
            console.plain(f"  {describe(process)}")
        return 1
    console.plain(f"Launcher {state.pid}: {state.phase}{f' ({state.reason})' if state.reason else ''}")
    console.plain(f"Dashboard http://127.0.0.1:{state.port}/")
    for name, pid in state.sessions.items():
        console.plain(f"  {name:<9} {_process_line(pid)}")
    resident = sum(_resident_bytes(process) for process in running) // _MIB
    console.plain(f"  {len(running)} processes in all, {resident} MiB resident")
    return 1 if state.phase is LauncherPhase.STOPPING else wait_for_cells(configuration, home, _LOOK_ONCE_S)


def wait_for_cells(configuration: Configuration, home: Home, wait_s: float) -> int:
    """Print how far the cells are, for up to `wait_s`; 0 when every one is ready, else 1."""
    state = home.read_state()
    if state is None:
        return 1
    environment = control_plane_environment(
        os.environ, configuration, home.secrets(), database_url=state.database_url, redis_url=state.redis_url
    )
    command = [sys.executable, "manage.py", "fleet_status", "--wait-s", f"{max(wait_s, _LOOK_ONCE_S):.1f}"]
    deadline_s = wait_s + _COMMAND_MARGIN_S
    try:
        return subprocess.run(command, cwd=CHECKOUT, env=environment, timeout=deadline_s, check=False).returncode
    except subprocess.TimeoutExpired:
        return 1


def _process_line(pid: int) -> str:
    try:
        process = psutil.Process(pid)
        return f"pid {pid}, {_resident_bytes(process) // _MIB} MiB"
    except psutil.NoSuchProcess:
        return "not running"


def _resident_bytes(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0
