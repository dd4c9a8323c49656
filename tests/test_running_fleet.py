"""Fleets of concurrent tests get different ports."""

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
    """The ports of another session's worker of this number, which is there until this ends."""
    command = [sys.executable, "-c", SESSION]
    with subprocess.Popen(command, cwd=CHECKOUT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield tuple(map(int, process.stdout.readline().split()))
        process.communicate()


@pytest.mark.processes
def test_another_session_gets_other_ports_before_anything_listens() -> None:
    with session() as ours, session() as theirs:
        assert len(ours) == len(theirs) == 2
        assert all(mine != other for mine, other in zip(ours, theirs, strict=True))
