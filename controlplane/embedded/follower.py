"""Follows the log of a launcher in another process until the fleet is ready: for `DETACH=1`, which starts the launcher
in the background, and for a second `make up`."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from controlplane.embedded.configuration import CHECKOUT, CannotStart, Configuration
from controlplane.embedded.console import Console
from controlplane.embedded.processes import HOME_MARK
from controlplane.embedded.state_directory import LauncherPhase, LauncherState, StateDirectory

OWN_LOG = "up.log"
BACKGROUND_OPTION = "--background"

_POLL_S = 0.1
_APPEARS_WITHIN_S = 10.0


def start_in_background(home: StateDirectory) -> Callable[[], int | None]:
    """Start the launcher in a new session, its log in up.log. Returns a function that polls its exit status."""
    with (home.logs / OWN_LOG).open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "controlplane.embedded", "up", BACKGROUND_OPTION],
            cwd=CHECKOUT,
            env={**os.environ, HOME_MARK: str(home.path)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return process.poll


def is_alive(state: LauncherState) -> bool:
    """Whether the launcher that published `state` still runs, and its number is not that of another process by now."""
    try:
        return abs(psutil.Process(state.pid).create_time() - state.started_s) < 1.0
    except psutil.NoSuchProcess:
        return False


class Follower:
    def __init__(self, configuration: Configuration, home: StateDirectory, console: Console) -> None:
        self._configuration = configuration
        self._home = home
        self._console = console
        self._log = home.logs / OWN_LOG
        self._seen_bytes = _size(self._log)
        self._before = home.read_state()

    def wait_until_ready(self, ended: Callable[[], int | None]) -> int:
        """Show its log until it has seen every cell ready; 0 then, else 1 with the reason printed."""
        reason = self._wait(ended)
        self._show_log()
        if reason:
            self._console.plain(reason)
            return 1
        return 0

    def _wait(self, ended: Callable[[], int | None]) -> str:
        """Why the fleet is not ready, or nothing."""
        while True:
            self._show_log()
            state = self._state()
            if state and state.phase is LauncherPhase.READY:
                return ""
            if state and state.phase in {LauncherPhase.FAILED, LauncherPhase.NOT_READY}:
                return f"Not up: {state.reason}"
            if state and state.phase is LauncherPhase.STOPPING:
                return "Not up: it is being stopped; wait a moment, then try again."
            if ended() is not None or (state is None and self._console.elapsed_s > _APPEARS_WITHIN_S):
                return f"Not up: the launcher ended; see {self._log}."
            if self._console.elapsed_s > self._configuration.wait_s:
                return f"Not up after {self._configuration.wait_s:.0f} s, and still trying; see {self._log}."
            time.sleep(_POLL_S)

    def _state(self) -> LauncherState | None:
        """What the running launcher printed; also the last lines of one that failed meanwhile."""
        state = self._home.read_state()
        if state and (is_alive(state) or (state.phase is LauncherPhase.FAILED and state != self._before)):
            return state
        return None

    def _show_log(self) -> None:
        size = _size(self._log)
        if size <= self._seen_bytes:
            return
        with self._log.open("rb") as file:
            file.seek(self._seen_bytes)
            fresh = file.read(size - self._seen_bytes)
        self._seen_bytes = size
        for line in fresh.decode(errors="replace").splitlines():
            self._console.plain(line)


def require_same_settings(configuration: Configuration, state: LauncherState) -> None:
    """Raises CannotStart if the running launcher uses other ports, ingresses or another engine than requested now."""
    settings = {
        "SWITCHYARD_PORT": (configuration.port, state.port),
        "SWITCHYARD_INGRESS_PORT": (configuration.ingress_port, state.ingress_port),
        "SWITCHYARD_INGRESSES": (configuration.ingresses, state.ingresses),
        "ENGINE": (str(configuration.engine), state.engine),
    }
    different = [f"{name} {runs} (requested: {wish})" for name, (wish, runs) in settings.items() if wish != runs]
    if different:
        raise CannotStart(
            f"Switchyard already runs in {configuration.home} with {', '.join(different)}: `make down` first."
        )


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
