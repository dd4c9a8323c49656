"""The autoscaler acting on a live fleet: an hour of Azure's trace at twelve times its speed, by real ingresses, on
cells that start and end as the load wants. Whether anybody was refused for want of cells, and how often it turned.

    .venv/bin/python bench/autoscaling_live.py

Needs a fleet from `make up ENGINE=sim` with the same SWITCHYARD_HOME that nobody else uses, and takes 6 minutes. What a
policy counts in seconds is scaled like the trace, and so are answers: one takes a twelfth of its tokens. `--share` of
the requests is sent, evenly drawn, where the computer is small; cells are then as much smaller.
"""

import argparse
import asyncio
import os
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.live_fleet import Fleet, at, wait_for
from bench.traffic.arrivals import Arrival, azure
from tests.load import Answer, one_request

TARGET = 0.7
DOWN_AFTER_S = 600.0
MOST_TURNS = 2
BUCKET_S = 10.0
SEED = 11
LACK = ("no_ready_cell", "queue_full", "no_free_cell", "too_many_held", "no_cell_in_time")
"""Codes of refusals for lack of cells."""
SETTLE_S = 90.0


@dataclass
class Seen:
    """What was seen, by seconds since the trace began: how many cells were wanted, and how many served."""

    looks: list[tuple[float, int, int]] = field(default_factory=list)

    def at(self, second: float) -> tuple[int, int]:
        before = [(wanted, ready) for when, wanted, ready in self.looks if when <= second]
        return before[-1] if before else (0, 0)


async def replay(arrivals: list[Arrival], url: str, model: str, speed: float) -> list[Answer]:
    """Send every request at its time; the answers, in no order, once all have ended."""
    answers: list[Answer] = []
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=20)
    began = time.monotonic()
    async with httpx.AsyncClient(timeout=120, limits=limits) as client, asyncio.TaskGroup() as group:
        for one in arrivals:
            await asyncio.sleep(max(0.0, began + one.at_s / speed - time.monotonic()))
            tokens = max(1, round(one.output_tokens / speed))
            group.create_task(one_request(client, url, model, tokens, answers))
    return answers


async def watch(fleet: Fleet, deployment: str, region: str, seen: Seen) -> None:
    began = time.monotonic()
    while True:
        wanted = (await asyncio.to_thread(fleet.wanted, deployment))[region]
        cells = await asyncio.to_thread(fleet.cells, deployment)
        ready = sum(one["state"] == "ready" and one["region"] == region for one in cells.values())
        seen.looks.append((time.monotonic() - began, wanted, ready))
        await asyncio.sleep(1.0)


async def run(
    fleet: Fleet, arrivals: list[Arrival], url: str, options: argparse.Namespace
) -> tuple[list[Answer], Seen]:
    seen = Seen()
    watcher = asyncio.create_task(watch(fleet, options.deployment, options.region, seen))
    try:
        return await replay(arrivals, url, options.deployment, options.speed), seen
    finally:
        watcher.cancel()


def prepare(fleet: Fleet, options: argparse.Namespace) -> None:
    """A range in one region, and the policy of an hour, in seconds of this run."""
    places = [{"region": place, "cells": 0} for place in fleet.wanted(options.deployment) if place != options.region]
    places.append({"region": options.region, "cells": {"min": options.least, "max": options.most}})
    policy = {"mode": "act", "target_utilisation": TARGET, "down_after_s": max(10.0, DOWN_AFTER_S / options.speed)}
    policy |= {"start_up_s": options.start_up_s, "slo_burn": None, "idle_s": max(10.0, 900 / options.speed)}
    fleet.ask("PATCH", f"deployments/{options.deployment}", {"regions": places, "scaling": policy})
    fleet.ask("PATCH", f"traffic/policies/{options.deployment}", {"tested_concurrency": options.per_cell})
    wait_for(lambda: fleet.is_whole(options.deployment), SETTLE_S, "the cells that the range begins with")


def turns(wanted: list[int]) -> int:
    """How often a course changes its direction."""
    steps = [after - before for before, after in pairwise(wanted) if after != before]
    return sum((one > 0) != (other > 0) for one, other in pairwise(steps))


def report(answers: list[Answer], seen: Seen, decisions: list[str], seconds: float) -> None:
    began = min(one.began for one in answers)
    print("| second | requests/s | at once | cells wanted | ready | late or refused |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: |")
    for number in range(int(seconds / BUCKET_S) + 1):
        start = number * BUCKET_S
        here = [one for one in answers if start <= one.began - began < start + BUCKET_S]
        middle = began + start + BUCKET_S / 2
        at_once = sum(one.began <= middle < one.ended for one in answers)
        wanted, ready = seen.at(start + BUCKET_S)
        bad = sum(bool(one.error) for one in here)
        print(f"| {start:.0f} | {len(here) / BUCKET_S:.1f} | {at_once} | {wanted} | {ready} | {bad} |")
    print("\n".join(decisions))


def judge(answers: list[Answer], seen: Seen, options: argparse.Namespace, hours: float) -> int:
    """1 where a goal is missed."""
    began = min(one.began for one in answers)
    lacking = [one for one in answers if any(code in one.error for code in LACK)]
    late = [one for one in lacking if one.began - began > options.start_up_s]
    turned = turns([wanted for _, wanted, _ in seen.looks])
    kinds = Counter(one.error[:100] for one in answers if one.error)
    print(f"\nload {os.getloadavg()[0]:.1f}; {len(answers)} requests, {len(lacking)} refused for lack of cells,"
          f" {len(late)} of them after the first start-up time ({options.start_up_s:g} s)")  # fmt: skip
    print(f"{turned} changes of direction in {hours:.2f} h of the trace")
    for kind, count in kinds.most_common(5):
        print(f"{count} times: {kind}")
    return int(bool(late) or turned > MOST_TURNS * hours)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deployment", default="sim-70b")
    parser.add_argument("--region", default="us-east-1")
    parser.add_argument("--speed", type=float, default=12.0)
    parser.add_argument("--share", type=float, default=0.25, help="of the trace's requests that are sent")
    parser.add_argument("--hours", type=float, default=1.0, help="of the trace")
    parser.add_argument("--per-cell", type=int, default=2, help="requests at once that a cell counts as tested for")
    parser.add_argument("--least", type=int, default=1)
    parser.add_argument("--most", type=int, default=5)
    parser.add_argument("--start-up-s", type=float, default=15.0, help="as measured on this computer")
    options = parser.parse_args()
    drawn = random.Random(SEED)
    arrivals = [one for one in azure() if one.at_s < options.hours * 3600 and drawn.random() < options.share]
    fleet = Fleet()
    url = next(row["ingress_url"] for row in fleet.rows("regions") if row["name"] == options.region)
    before = fleet.get(f"deployments/{options.deployment}")
    try:
        prepare(fleet, options)
        since, began_at = fleet.last_event(), time.time()
        answers, seen = asyncio.run(run(fleet, arrivals, url, options))
        scaled = fleet.events(since, kind="deployment.scaled", deployment=options.deployment)
        decisions = [f"{at(event) - began_at:6.1f} s  {event['message']}" for event in scaled]
        report(answers, seen, decisions, options.hours * 3600 / options.speed)
        return judge(answers, seen, options, options.hours)
    finally:
        places = [{"region": one["region"], "cells": one["cells"]} for one in before["regions"]]
        fleet.ask("PATCH", f"deployments/{options.deployment}", {"regions": places, "scaling": {"mode": "shadow"}})
        fleet.ask("PATCH", f"traffic/policies/{options.deployment}", {"tested_concurrency": None})


if __name__ == "__main__":
    raise SystemExit(main())
