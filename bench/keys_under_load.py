"""How soon a new key opens, and a revoked one no longer does, at each ingress of a running fleet, beside busy loops
that take the processors and without.

    .venv/bin/python -m bench.keys_under_load [--keys 10] [--loops 40]

Needs a fleet from `make up` with engine `sim` (same SWITCHYARD_HOME, SWITCHYARD_PORT) that nobody else uses. Measured
from the moment before the order is sent to the control plane until the first answer of each ingress that says so. Every
probe is a whole request for one token over a new connection; the next one begins `PROBE_EVERY_S` after it has ended.
"""

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic, sleep
from typing import Any

import httpx

from bench.busy_loops import busy_loops
from bench.live_fleet import Fleet, wait_for

DEPLOYMENT = "sim-70b"
PROBE_EVERY_S = 0.05
GIVE_UP_S = 60.0
SETTLES_S = 15.0
"""The loops shall have taken their share before anything is measured."""
WANTED_S = 5.0
REFUSED = 401


@dataclass
class Times:
    """Seconds of every key and ingress; in `later` those of the slowest ingress of each key."""

    each: list[float] = field(default_factory=list)
    later: list[float] = field(default_factory=list)

    def add(self, of_one_key: Sequence[float]) -> None:
        self.each += of_one_key
        self.later.append(max(of_one_key))

    def row(self) -> dict[str, Any]:
        ordered = sorted(self.each)
        return {
            "median_s": round(ordered[len(ordered) // 2], 2),
            "slowest_s": round(ordered[-1], 2),
            "of_each_key_s": [round(seconds, 2) for seconds in self.later],
            "within_5_s": f"{sum(seconds <= WANTED_S for seconds in ordered)} of {len(ordered)}",
        }


async def status_of(url: str, key: str) -> int:
    """0: no answer."""
    body = {"model": DEPLOYMENT, "prompt": "hi", "max_tokens": 1}
    try:
        async with httpx.AsyncClient(timeout=GIVE_UP_S, trust_env=False) as client:
            said = await client.post(
                f"{url}/v1/completions", json=body, headers={"Authorization": f"Bearer {key}", "Connection": "close"}
            )
    except httpx.TransportError:
        return 0
    return said.status_code


async def first(url: str, key: str, is_right: Callable[[int], bool], since_s: float) -> float:
    """Seconds since then until the first right answer.

    Raises:
        SystemExit: none came.
    """
    while monotonic() < since_s + GIVE_UP_S:
        if is_right(await status_of(url, key)):
            return monotonic() - since_s
        await asyncio.sleep(PROBE_EVERY_S)
    raise SystemExit(f"{url} did not follow within {GIVE_UP_S:.0f} s")


async def everywhere(urls: Sequence[str], key: str, is_right: Callable[[int], bool], since_s: float) -> list[float]:
    return await asyncio.gather(*(first(url, key, is_right, since_s) for url in urls))


def is_served(status: int) -> bool:
    """By a cell: it got past the key."""
    return status == httpx.codes.OK


def is_refused(status: int) -> bool:
    return status == REFUSED


def measure(fleet: Fleet, urls: Sequence[str], keys: int) -> dict[str, Any]:
    opened, closed = Times(), Times()
    for number in range(keys):
        began_s = monotonic()
        made = fleet.post("keys", name=f"keys under load {number}", tenant="bench")
        opened.add(asyncio.run(everywhere(urls, made["key"], is_served, began_s)))
        began_s = monotonic()
        fleet.post(f"keys/{made['prefix']}/revoke", why="the measurement is over")
        closed.add(asyncio.run(everywhere(urls, made["key"], is_refused, began_s)))
    return {"opens": opened.row(), "closes": closed.row()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0] if __doc__ else None)
    parser.add_argument("--keys", type=int, default=10)
    parser.add_argument("--loops", type=int, default=40)
    options = parser.parse_args()
    fleet = Fleet(timeout_s=GIVE_UP_S)
    wait_for(lambda: fleet.is_whole(DEPLOYMENT), 120, "the fleet is whole")
    urls = fleet.ingresses(DEPLOYMENT)
    for loops in (0, options.loops):
        with busy_loops(loops):
            sleep(SETTLES_S)
            load = os.getloadavg()[0]
            row = {"loops": loops, "load_before": load, "ingresses": len(urls), **measure(fleet, urls, options.keys)}
        sys.stdout.write(json.dumps(row) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
