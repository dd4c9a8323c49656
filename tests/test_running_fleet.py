"""Fleets of concurrent tests get different ports."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.scenarios.running_fleet import CHECKOUT

SESSION = """
import sys
from tests.scenarios.running_fleet import free_ports, node_ports
print(free_ports(2), node_ports(), flush=True)
sys.stdin.read()
"""


@contextmanager
def session() -> Iterator[tuple[int, ...]]:
    """The ports of another session's worker, which is there until this ends. It is none of this session's workers, all
    of whose ports fleets may have that run meanwhile."""
    environment = {**os.environ, "PYTEST_XDIST_WORKER": "gw6"}
    command = [sys.executable, "-c", SESSION]
    with subprocess.Popen(
        command, cwd=CHECKOUT, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        yield tuple(map(int, process.stdout.readline().split()))
        process.communicate()


@pytest.mark.processes
def test_another_session_gets_other_ports_before_anything_listens() -> None:
    with session() as ours, session() as theirs:
        assert len(ours) == len(theirs) == 2
        assert all(mine != other for mine, other in zip(ours, theirs, strict=True))
