"""A region dies while the light client works: how many of its callers see an error?

Needs a fleet: `make up ENGINE=sim DETACH=1`. Callers send requests to the first region, half of them as streams; when a
third is done, every process of that region is killed. Streams that a killed cell had begun break off, as they must.

    .venv/bin/python -m bench.client_failover --requests 1000 --callers 16
"""

import argparse
import asyncio
import collections
import contextlib
import signal
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[1] / "client")]

import psutil

from bench.live_fleet import HOME, Fleet
from fleet.providers.local.processes import processes_by_node
from switchyard_client import AsyncSwitchyard, BrokenOff, SwitchyardError

MODEL = "sim-70b"


@dataclass
class Outcome:
    """What callers saw."""

    answered: collections.Counter[str] = field(default_factory=collections.Counter)
    broken: int = 0
    errors: list[str] = field(default_factory=list)
    took_s: list[float] = field(default_factory=list)


async def caller(
    client: AsyncSwitchyard, turns: "asyncio.Queue[int]", outcome: Outcome, left: int, is_time: asyncio.Event
) -> None:
    """Send one request after another; say when only so many are left."""
    while not turns.empty():
        turn = turns.get_nowait()
        if turns.qsize() <= left:
            is_time.set()
        began = time.monotonic()
        try:
            if turn % 2:
                async with client.stream_chat(MODEL, "Count to ten.", max_tokens=24) as events:
                    async for _ in events:
                        pass
                outcome.answered["streams"] += 1
            else:
                outcome.answered[(await client.chat(MODEL, "Count to ten.", max_tokens=24)).region] += 1
        except BrokenOff:
            outcome.broken += 1
        except SwitchyardError as error:
            outcome.errors.append(f"{type(error).__name__}: {error}")
        outcome.took_s.append(time.monotonic() - began)


def kill_region(fleet: Fleet, region: str) -> int:
    """Every process of the region's nodes and ingresses. Returns how many."""
    nodes = {row["id"] for row in fleet.rows("nodes", region=region)}
    ingresses = {row["id"] for row in fleet.rows("ingresses", region=region)}
    found = [
        each for node, processes in processes_by_node(HOME).items() if node in nodes | ingresses for each in processes
    ]
    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    return len(found)


async def run(requests: int, callers: int) -> None:
    fleet = Fleet()
    regions = {row["name"]: row["ingress_url"] for row in fleet.rows("regions")}
    served = [name for name in regions if name in fleet.wanted(MODEL)]
    turns: asyncio.Queue[int] = asyncio.Queue()
    for turn in range(requests):
        turns.put_nowait(turn)
    outcome = Outcome()
    async with AsyncSwitchyard([f"{regions[name]}/v1" for name in served]) as client:
        is_time, left = asyncio.Event(), requests * 2 // 3
        working = [asyncio.create_task(caller(client, turns, outcome, left, is_time)) for _ in range(callers)]
        await is_time.wait()
        killed = await asyncio.to_thread(kill_region, fleet, served[0])
        print(f"{served[0]}: {killed} processes killed after {len(outcome.took_s)} requests")
        await asyncio.gather(*working)
    took = sorted(outcome.took_s)
    print(f"answered by {dict(outcome.answered)}; streams cut {outcome.broken}; errors {len(outcome.errors)}")
    print(f"took {statistics.median(took):.2f} s at the median, {took[-1]:.2f} s at most")
    for each, count in collections.Counter(outcome.errors).most_common(5):
        print(f"  {count} x {each[:200]}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--callers", type=int, default=16)
    given = parser.parse_args()
    asyncio.run(run(given.requests, given.callers))
