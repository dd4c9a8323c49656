"""The units of the control plane: systemd takes them, finds them confined, and they run what `make up` runs."""

import shlex
import subprocess
from configparser import ConfigParser
from pathlib import Path

import pytest

from controlplane.embedded import control_plane
from controlplane.embedded.configuration import CHECKOUT, read_configuration
from controlplane.embedded.state_directory import StateDirectory

UNITS = CHECKOUT / "deploy/systemd"
INSTALLED = "/opt/switchyard-control"
PROCESSES = ("web", "controller", "worker", "beat", "batch", "planner", "sender")
EXPOSED_MOST = 20
"""Of 100, by systemd's own judgement: a service without any of it has 96, sshd of Debian 96, systemd-resolved 21."""


def unit(process: str) -> ConfigParser:
    """One that has each key once, as ours do."""
    parser = ConfigParser(interpolation=None, strict=True, delimiters=("=",), comment_prefixes=("#",))
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(UNITS / f"switchyard-{process}.service")
    return parser


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The units as they are, but of this checkout: systemd looks whether what they start is there."""
    folder = tmp_path_factory.mktemp("units")
    for path in UNITS.iterdir():
        (folder / path.name).write_text(path.read_text().replace(INSTALLED, str(CHECKOUT)))
    return folder


def test_there_is_a_unit_for_each_process_and_a_target_of_all() -> None:
    wanted = {f"switchyard-{process}.service" for process in PROCESSES}
    assert {path.name for path in UNITS.iterdir()} == {*wanted, "switchyard-control.target"}
    target = (UNITS / "switchyard-control.target").read_text()
    assert set(target.partition("\nWants=")[2].partition("\n")[0].split()) == wanted
    for process in PROCESSES:
        assert unit(process)["Install"]["WantedBy"] == unit(process)["Unit"]["PartOf"] == "switchyard-control.target"


def test_systemd_takes_each_without_a_warning(installed: Path) -> None:
    """Needs `systemd-analyze` (apt-get install systemd)."""
    command = ["systemd-analyze", "verify", "--man=no", *map(str, sorted(installed.iterdir()))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_systemd_finds_each_confined(installed: Path) -> None:
    services = [str(path) for path in sorted(installed.glob("*.service"))]
    command = ["systemd-analyze", "security", "--offline=true", f"--threshold={EXPOSED_MOST}", "--no-pager", *services]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"{done.stdout[-3000:]}{done.stderr}"


@pytest.mark.parametrize("process", PROCESSES)
def test_each_runs_what_make_up_runs(process: str) -> None:
    """But for where it listens, which is another's choice there."""
    home = StateDirectory(Path("/var/lib/switchyard-control"))
    program = {
        "web": control_plane.web(read_configuration({}), {}),
        "controller": control_plane.controller({}),
        "worker": control_plane.worker({}),
        "beat": control_plane.beat(home, {}),
        "batch": control_plane.batch({}),
        "planner": control_plane.planner({}),
        "sender": control_plane.sender({}),
    }[process].program
    service = unit(process)["Service"]
    python, *arguments = shlex.split(service["ExecStart"].replace("%%", "%"))
    assert python == f"{INSTALLED}/.venv/bin/python"
    known = [part for part in program.arguments[1:] if part not in {"-W", "ignore:You're running the worker"}]
    assert arguments == known or (process == "web" and arguments[:2] == known[:2])
    assert int(service.get("Nice", "0")) == program.nice
