"""What the command line leaves open, the machine decides."""

import os
import subprocess
import sys

import pytest

from engine_agent.ingress.main import MAX_THREADS, default_threads

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
