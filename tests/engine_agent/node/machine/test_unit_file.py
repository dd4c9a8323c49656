"""The unit that keeps the machine agent running is one that systemd takes, without a warning."""

import subprocess
from pathlib import Path

from engine_agent.node.machine import service


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    """Needs `systemd-analyze` (apt-get install systemd)."""
    unit = tmp_path / service.UNIT
    unit.write_text(
        service._UNIT.format(code="/opt/switchyard", log="/var/lib/switchyard/machine.log", left=service.LEFT),
        encoding="utf-8",
    )
    command = ["systemd-analyze", "verify", "--man=no", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
