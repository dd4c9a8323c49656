"""`make status`: what runs of a home, read from outside; changes nothing."""

import subprocess
import sys

import psutil

from controlplane.embedded.attachment import is_alive
from controlplane.embedded.belonging import describe, processes_of
from controlplane.embedded.configuration import CHECKOUT, Configuration
from controlplane.embedded.console import Console
from controlplane.embedded.home import Home, LauncherPhase
from controlplane.embedded.process_environment import control_plane_environment
from controlplane.embedded.servers import choose_servers

_FLEET_WITHIN_S = 30.0
_MIB = 1024 * 1024


def show_status(configuration: Configuration, home: Home, console: Console, inherited: dict[str, str]) -> int:
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
    return 1 if state.phase is LauncherPhase.STOPPING else _show_fleet(configuration, home, inherited)


def _show_fleet(configuration: Configuration, home: Home, inherited: dict[str, str]) -> int:
    servers = choose_servers(configuration, home)
    environment = control_plane_environment(
        inherited,
        configuration,
        home.secrets(),
        database_url=servers.database_url,
        redis_url=servers.redis_url,
    )
    command = [sys.executable, "manage.py", "fleet_status", "--wait-s", "0"]
    try:
        return subprocess.run(command, cwd=CHECKOUT, env=environment, timeout=_FLEET_WITHIN_S, check=False).returncode
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
