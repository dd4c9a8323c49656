"""Fleets of tests that run side by side get ports of their own."""

import subprocess
import sys

import pytest

from tests.scenarios.running_fleet import CHECKOUT, free_ports, node_ports

ANOTHER_SESSION = "from tests.scenarios.running_fleet import free_ports, node_ports; print(free_ports(2), node_ports())"


@pytest.mark.processes
def test_another_session_gets_other_ports_before_anything_listens() -> None:
    ours = (free_ports(2), node_ports())
    said = subprocess.run([sys.executable, "-c", ANOTHER_SESSION], cwd=CHECKOUT, capture_output=True, check=True)
    theirs = tuple(map(int, said.stdout.split()))
    assert all(mine != other for mine, other in zip(ours, theirs, strict=True))
