"""What the command line leaves open, the machine decides."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from engine_agent.ingress import port_claim
from engine_agent.ingress.main import MAX_THREADS, default_threads
from engine_agent.ingress.port_claim import PortTaken, port_claimed
from tests.ports import free_port

pytestmark = pytest.mark.processes

PINNED = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from engine_agent.ingress.main import default_threads
print(default_threads())
"""


def test_haproxy_has_a_thread_for_each_processor_that_the_agent_may_run_on_up_to_a_limit() -> None:
    assert default_threads() == min(MAX_THREADS, len(os.sched_getaffinity(0)))
    pinned = subprocess.run([sys.executable, "-c", PINNED], capture_output=True, text=True, check=True)
    assert pinned.stdout == "1\n"


def test_a_port_that_a_haproxy_of_another_fleet_shares_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_claim, "RELEASED_WITHIN_S", 0.0)
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as other:
        port = other.getsockname()[1]
        with pytest.raises(PortTaken, match="something listens on it"), port_claimed("127.0.0.1", port, lambda: False):
            pass
        with port_claimed("127.0.0.1", port, lambda: True):  # it is our own, left by an agent that was killed
            pass


def test_of_two_ingresses_that_start_at_once_one_refuses(tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "engine_agent", "ingress", "--ingress-id", "i-east", "--region", "east"]
    command += ["--home", str(tmp_path), "--server", "http://127.0.0.1:9", "--port", str(port)]
    with port_claimed("127.0.0.1", port, lambda: False):
        second = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert second.returncode == 1
    assert f"i-east: 127.0.0.1:{port} is not free: another ingress of this host has it" in second.stderr
