"""How a member's process ends: its reason is the last line of its log, whatever its other threads still say."""

import subprocess
import sys

from engine_agent.engines.vllm.cell.member import EXIT_CELL_ENDED

MEMBER = """
import sys, threading, traceback
from engine_agent.engines.vllm.cell.member import Shutdown

def collective():
    while True:
        try:
            raise ConnectionError("the leader is gone")
        except ConnectionError:
            traceback.print_exc()

shutdown = Shutdown()
shutdown.hooks.append(lambda _: print("late words", file=sys.stderr))
threading.Thread(target=collective, daemon=True).start()
shutdown.end("rank 1 hangs")
"""


def test_the_reason_is_the_last_line_of_the_log() -> None:
    ended = subprocess.run([sys.executable, "-c", MEMBER], stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert ended.returncode == EXIT_CELL_ENDED
    assert ended.stderr.splitlines()[-1] == "the cell has ended: rank 1 hangs"
