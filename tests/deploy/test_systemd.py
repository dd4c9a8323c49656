"""The units of the control plane: systemd takes them, finds them confined, and they run what `make up` runs."""

import shlex
import subprocess
from configparser import ConfigParser
from pathlib import Path

import pytest

from controlplane.embedded.configuration import CHECKOUT
from controlplane.processes import BY_NAME

UNITS = CHECKOUT / "deploy/systemd"
INSTALLED = "/opt/switchyard-control"
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
    wanted = {f"switchyard-{process}.service" for process in BY_NAME}
    assert {path.name for path in UNITS.iterdir()} == {*wanted, "switchyard-control.target"}
    target = (UNITS / "switchyard-control.target").read_text()
    assert set(target.partition("\nWants=")[2].partition("\n")[0].split()) == wanted
    for process in BY_NAME:
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


@pytest.mark.parametrize("process", BY_NAME)
def test_each_follows_the_table_of_processes(process: str) -> None:
    kind, parts = BY_NAME[process], unit(process)
    python, *arguments = shlex.split(parts["Service"]["ExecStart"])
    assert python == f"{INSTALLED}/.venv/bin/python"
    assert arguments[:3] == ["-m", "controlplane.processes", process]
    assert int(parts["Service"].get("Nice", "0")) == kind.nice
    assert parts["Unit"]["Description"] == f"Switchyard {process}: {kind.does}"
