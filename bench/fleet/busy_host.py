"""Time until killed nodes are noticed and healed while busy loops take the CPU.

    .venv/bin/python -m bench busy_host --loops 40 --kills 3

Needs a fleet of `sim-70b` from `make up` (same SWITCHYARD_HOME) without other users. Each loop runs in its own session,
because the kernel shares processors by session."""

import argparse
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from bench.fleet.live_fleet import HOME, Fleet, Row, last_pass_age_s, wait_for
from lab.steady_load import agent_and_engine

DEPLOYMENT = "sim-70b"
HEALED_WITHIN_S = 300.0
SETTLES_S = 8.0
"""Before the first kill, and between two: the loops shall have taken their share."""


class PassAges(threading.Thread):
    """How old the last pass of the reconciler is, each second, as web says it."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.oldest_s = 0.0
        self.unanswered = 0
        self.ends = threading.Event()

    def run(self) -> None:
        while not self.ends.wait(1):
            try:
                self.oldest_s = max(self.oldest_s, last_pass_age_s())
            except httpx.HTTPError:
                self.unanswered += 1


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Runs `count` busy loops, each in its own session, because the kernel shares processors by session."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def kill_one(fleet: Fleet, number: int) -> tuple[str, float, float]:
    cells = sorted(fleet.cells(DEPLOYMENT).values(), key=lambda row: str(row["id"]))
    cell: Row = cells[number % len(cells)]
    node = cell["nodes"][number % len(cell["nodes"])]["id"]
    for process in agent_and_engine(node, home=HOME):
        process.kill()
    began = time.monotonic()

    def now() -> Row:
        row: Row = fleet.get(f"cells/{cell['id']}")
        return row

    def is_noticed() -> bool:
        row = now()
        return bool(row["state"] != "ready" or row["generation"] > cell["generation"])

    wait_for(is_noticed, HEALED_WITHIN_S, f"the death of {node} is noticed")
    noticed = time.monotonic() - began
    wait_for(lambda: now()["state"] == "ready", HEALED_WITHIN_S, f"{cell['id']} serves again")
    return f"{node} of {cell['id']}", noticed, time.monotonic() - began


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--loops", type=int, default=40)
    parser.add_argument("--kills", type=int, default=3)
    options = parser.parse_args()
    fleet, ages = Fleet(), PassAges()
    wait_for(lambda: fleet.is_whole(DEPLOYMENT), 120, "the fleet is whole before the first kill")
    with busy_loops(options.loops):
        ages.start()
        for number in range(options.kills):
            time.sleep(SETTLES_S)
            node, noticed, healed = kill_one(fleet, number)
            print(f"{node}: noticed after {noticed:.1f} s, healed after {healed:.1f} s", flush=True)
        ages.ends.set()
    print(f"oldest pass {ages.oldest_s:.1f} s, {ages.unanswered} looks without an answer")
    wait_for(lambda: not fleet.rows("incidents", state="open"), 120, "every incident is closed")
