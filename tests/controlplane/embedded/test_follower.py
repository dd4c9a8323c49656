import io
import os
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from controlplane.embedded.configuration import CannotStart, Configuration, read_configuration
from controlplane.embedded.console import Console
from controlplane.embedded.follower import OWN_LOG, Follower, is_alive, require_same_settings
from controlplane.embedded.state_directory import LauncherPhase, LauncherState, StateDirectory
from tests.controlplane.embedded.processes import prepared_home


@pytest.fixture
def home(tmp_path: Path) -> StateDirectory:
    return prepared_home(tmp_path)


def _configuration(home: StateDirectory, **environment: str) -> Configuration:
    return read_configuration({"SWITCHYARD_HOME": str(home.path), "ENGINE": "sim", **environment})


def _state(phase: LauncherPhase = LauncherPhase.STARTING, reason: str = "") -> LauncherState:
    """What a launcher that lives says: this process stands for it."""
    return LauncherState(
        pid=os.getpid(),
        started_s=psutil.Process().create_time(),
        port=8000,
        ingress_port=8080,
        ingresses=1,
        engine="sim",
        phase=phase,
        reason=reason,
    )


def _dead(state: LauncherState) -> LauncherState:
    return replace(state, started_s=state.started_s - 1000.0)


def test_a_number_that_another_process_has_by_now_is_no_living_launcher() -> None:
    assert is_alive(_state())
    assert not is_alive(_dead(_state()))


@pytest.mark.parametrize(
    ("state", "status", "expected"),
    [
        (_state(LauncherPhase.READY), 0, ""),
        (_state(LauncherPhase.NOT_READY, "cell 7 waits"), 1, "Not up: cell 7 waits"),
        (_state(LauncherPhase.STOPPING), 1, "Not up: it is being stopped; wait a moment, then try again."),
        (_dead(_state(LauncherPhase.FAILED, "no room")), 1, "Not up: no room"),
    ],
)
def test_it_tells_how_the_launcher_ended_up(
    home: StateDirectory, state: LauncherState, status: int, expected: str
) -> None:
    screen = io.StringIO()
    follower = Follower(_configuration(home), home, Console(screen))
    home.write_state(state)
    assert follower.wait_until_ready(lambda: None) == status
    assert screen.getvalue().strip() == expected


def test_a_failure_of_an_earlier_launcher_is_not_taken_for_this_ones(home: StateDirectory) -> None:
    home.write_state(_dead(_state(LauncherPhase.FAILED, "long ago")))
    screen = io.StringIO()
    assert Follower(_configuration(home), home, Console(screen)).wait_until_ready(lambda: 1) == 1
    assert screen.getvalue() == f"Not up: the launcher ended; see {home.logs / OWN_LOG}.\n"


def test_the_wait_ends_when_it_was_promised_to(home: StateDirectory) -> None:
    home.write_state(_state())
    screen = io.StringIO()
    follower = Follower(_configuration(home, WAIT_S="0.01"), home, Console(screen))
    assert follower.wait_until_ready(lambda: None) == 1
    assert "and still trying" in screen.getvalue()


def test_only_what_the_launcher_logs_from_now_on_is_shown(home: StateDirectory) -> None:
    log = home.logs / OWN_LOG
    log.write_text("up       | yesterday\n")
    screen = io.StringIO()
    follower = Follower(_configuration(home), home, Console(screen))
    with log.open("a") as file:
        file.write("up       | today\n")
    home.write_state(_state(LauncherPhase.READY))
    follower.wait_until_ready(lambda: None)
    assert screen.getvalue() == "up       | today\n"


@pytest.mark.parametrize(
    ("requested", "different"),
    [
        ({"SWITCHYARD_PORT": "9000"}, "SWITCHYARD_PORT 8000 (requested: 9000)"),
        ({"ENGINE": "vllm"}, "ENGINE sim (requested: vllm)"),
    ],
)
def test_asking_for_something_else_than_what_runs_is_refused(
    home: StateDirectory, requested: dict[str, str], different: str
) -> None:
    with pytest.raises(CannotStart) as refusal:
        require_same_settings(_configuration(home, **requested), _state())
    assert str(refusal.value) == f"Switchyard already runs in {home.path} with {different}: `make down` first."


def test_asking_for_what_runs_is_fine(home: StateDirectory) -> None:
    require_same_settings(_configuration(home), _state())
