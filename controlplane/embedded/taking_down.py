"""`make down`: stops everything of a home from any state, and proves that nothing is left.

A living launcher does it itself, in order. Where there is none any more, the processes it left are ended directly:
first the agents, which would start engines again, then the rest.
"""

import signal
import time
from itertools import pairwise

import psutil

from controlplane.embedded.attachment import is_alive
from controlplane.embedded.belonging import describe_all, end_all, processes_of
from controlplane.embedded.console import Console
from controlplane.embedded.home import Home
from controlplane.embedded.sockets import remove_socket_folder, socket_folder

_LAUNCHER_STOPS_WITHIN_S = 150.0
_PROCESSES_END_WITHIN_S = 10.0
_POLL_S = 0.1


def take_down(home: Home, console: Console) -> int:
    """Stop everything of `home`; 0 when nothing is left."""
    if home.is_locked():
        _ask_the_launcher(home, console)
    survivors = _end_what_is_left(home, console)
    if survivors:
        console.own(f"{survivors} processes cannot be ended: {describe_all(processes_of(home.path))}")
        return 1
    if not home.is_locked():
        remove_socket_folder(socket_folder(home.path))
    console.own(f"nothing of {home.path} runs")
    return 0


def _ask_the_launcher(home: Home, console: Console) -> None:
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


def _end_what_is_left(home: Home, console: Console) -> int:
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
