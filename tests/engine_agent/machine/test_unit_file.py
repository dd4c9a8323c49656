"""The unit that keeps the machine agent running is one that systemd takes, without a warning."""

import shutil
import subprocess
from pathlib import Path

import pytest

from engine_agent.machine import service


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze here")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / service.UNIT
    unit.write_text(
        service._UNIT.format(code="/opt/switchyard", log="/var/lib/switchyard/machine.log", left=service.LEFT),
        encoding="utf-8",
    )
    command = ["systemd-analyze", "verify", "--man=no", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
