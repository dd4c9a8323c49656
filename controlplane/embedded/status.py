"""`make status`: what runs of a home, read from outside; and the last block that `make up` prints: where the dashboard
is, how to log in, what to try. Changes nothing."""

import json
import os
import shlex
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import psutil

from controlplane.embedded.configuration import CHECKOUT, Configuration, Provider
from controlplane.embedded.console import Console
from controlplane.embedded.follower import is_alive
from controlplane.embedded.preflight import HOST
from controlplane.embedded.process_ownership import describe, processes_of
from controlplane.embedded.processes import control_plane_environment
from controlplane.embedded.state_directory import OPERATOR, LauncherPhase, StateDirectory
from controlplane.processes import BY_NAME
from engine_agent.protocol.ports import DEMO_REGIONS

_PROBE_ONCE_S = 0.1
"""Above 0, because only a command that waits also judges."""
_COMMAND_MARGIN_S = 30.0
_MIB = 1024 * 1024


def show_status(configuration: Configuration, home: StateDirectory, console: Console) -> int:
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
        does = f"; {BY_NAME[name].does}" if name in BY_NAME else ""
        console.plain(f"  {name:<10} {_process_line(pid)}{does}")
    resident = sum(_resident_bytes(process) for process in running) // _MIB
    console.plain(f"  {len(running)} processes in all, {resident} MiB resident")
    return 1 if state.phase is LauncherPhase.STOPPING else wait_for_cells(configuration, home, _PROBE_ONCE_S)


def wait_for_cells(configuration: Configuration, home: StateDirectory, wait_s: float) -> int:
    """Print how far the cells are, for up to `wait_s`; 0 when every one is ready, else 1."""
    state = home.read_state()
    if state is None:
        return 1
    environment = control_plane_environment(
        os.environ, configuration, home.secrets(), database_url=state.database_url, redis_url=state.redis_url
    )
    command = [sys.executable, "manage.py", "fleet_status", "--wait-s", f"{max(wait_s, _PROBE_ONCE_S):.1f}"]
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


_API_TIMEOUT_S = 5.0
_TRIAL = {
    "model": "smollm2",
    "stream": True,
    "max_tokens": 64,
    "messages": [{"role": "user", "content": "Write one sentence about trains."}],
}


def read_ingresses(configuration: Configuration, home: StateDirectory) -> dict[str, str]:
    """Region -> URL of its first ingress, from the API or as configured; and name -> URL of further ingresses."""
    urls = {name.removeprefix("i-"): f"http://{HOST}:{port}" for name, port in configuration.ingress_ports.items()}
    request = urllib.request.Request(
        f"http://{HOST}:{configuration.port}/api/v1/regions/",
        headers={"Authorization": f"Bearer {_token(home)}", "Accept": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=_API_TIMEOUT_S) as response:  # noqa: S310 - always http to this machine
            answer = json.load(response)
        regions = answer["results"] if isinstance(answer, dict) else answer
        stated = {str(region["name"]): str(region["ingress_url"]) for region in regions}
    except (OSError, urllib.error.URLError, ValueError, KeyError, TypeError):
        return urls
    further = list(urls)[len(DEMO_REGIONS) :] if configuration.provider is Provider.LOCAL else []
    return stated | {name: urls[name] for name in further}


def _token(home: StateDirectory) -> str:
    try:
        return home.token.read_text().strip()
    except OSError:
        return ""


def final_block(
    *, port: int, token: Path, password: str, ingresses: dict[str, str], took_s: float | None, foreground: bool
) -> str:
    """The last thing that `make up` prints."""
    how_long = f" after {took_s:.0f} s" if took_s is not None else ""
    width = max(map(len, ingresses), default=0)
    first = next(iter(ingresses.values()), "")
    command = (
        f"curl -N {first}/v1/chat/completions -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(_TRIAL))}"
    )
    lines = [
        "",
        f"Switchyard is up: every cell is ready{how_long}.",
        "",
        f"  Dashboard  http://{HOST}:{port}/",
        f"  Login      user {OPERATOR}, password {password}",
        f"  API        http://{HOST}:{port}/api/v1/  (bearer token in {token})",
        *(f"  Ingress    {region:<{width}}  {url}/v1" for region, url in ingresses.items()),
        "",
        "Try:",
        f"  {command}",
        "",
        "Ctrl-C stops everything." if foreground else "`make down` stops everything; `make status` shows it.",
    ]
    return "\n".join(lines)


def print_final_block(
    configuration: Configuration, home: StateDirectory, console: Console, *, took_s: float | None, foreground: bool
) -> None:
    """Print it for this home. Asks the API for the ingresses, so it may block for a few seconds."""
    console.plain(
        final_block(
            port=configuration.port,
            token=home.token,
            password=home.secrets().operator_password,
            ingresses=read_ingresses(configuration, home),
            took_s=took_s,
            foreground=foreground,
        )
    )
