import stat
import subprocess
import sys
from pathlib import Path

import pytest

from controlplane.embedded.configuration import CannotStart
from controlplane.embedded.state_directory import LauncherPhase, LauncherState, StateDirectory

STATE = LauncherState(
    pid=7,
    started_s=1.5,
    port=8000,
    ingress_port=8080,
    ingresses=1,
    engine="sim",
    phase=LauncherPhase.READY,
    sessions={"web": 8},
)


@pytest.fixture
def home(tmp_path: Path) -> StateDirectory:
    home = StateDirectory(tmp_path / "home")
    home.prepare()
    return home


def test_secrets_are_generated_once_and_private(home: StateDirectory) -> None:
    first = home.secrets()
    assert home.secrets() == first
    assert len(first.secret_key) >= 50
    assert stat.S_IMODE(home.settings.stat().st_mode) == 0o600


def test_damaged_secrets_are_named_not_replaced(home: StateDirectory) -> None:
    home.settings.write_text("{")
    with pytest.raises(CannotStart, match=r"settings\.json is damaged"):
        home.secrets()


def test_what_the_launcher_publishes_is_read_back(home: StateDirectory) -> None:
    home.write_state(STATE)
    assert home.read_state() == STATE


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": 1}', '{"phase": "gone"}'])
def test_a_damaged_state_counts_as_none(home: StateDirectory, content: str) -> None:
    home.state.write_text(content)
    assert home.read_state() is None


def test_one_launcher_holds_the_lock(home: StateDirectory) -> None:
    with home.locked() as ours:
        assert ours
        assert home.is_locked()
        with home.locked() as second:
            assert not second
    assert not home.is_locked()


def test_the_lock_of_a_killed_launcher_is_free(home: StateDirectory) -> None:
    program = (
        "import sys, time; from pathlib import Path; from controlplane.embedded.state_directory import StateDirectory\n"
        "with StateDirectory(Path(sys.argv[1])).locked() as ours: print(ours, flush=True); time.sleep(600)"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", program, str(home.path)], stdout=subprocess.PIPE, text=True, cwd=Path.cwd()
    )
    assert launcher.stdout is not None
    with launcher:
        assert launcher.stdout.readline() == "True\n"
        assert home.is_locked()
        launcher.kill()
    assert not home.is_locked()


def test_a_home_that_cannot_be_written_is_one_clear_sentence() -> None:
    nobody_may_write_here = Path("/proc/self/home")
    with pytest.raises(CannotStart, match="set SWITCHYARD_HOME to a folder that you may write"):
        StateDirectory(nobody_may_write_here).prepare()


def test_a_home_that_is_a_file_is_one_clear_sentence(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("")
    with pytest.raises(CannotStart, match="Cannot write in"):
        StateDirectory(tmp_path / "home").prepare()
