"""Prefill and decode apart on a live fleet, under a load whose mix changes: cells are told apart by hand, then by the
planner of roles, and each request is counted.

`python -m bench.roles_live DEPLOYMENT REGION`: a Markdown table of the phases, and what changed when; some sixteen
minutes. It needs a deployment of four ready cells of one node each whose steps were fitted (`switchyard get
deployments`, the page Cost), on a fleet from `make up` with the same SWITCHYARD_HOME. Exit status 1 if a request failed
or the planner kept one ratio for both loads.
"""

import argparse
import asyncio
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime

import httpx

from bench.live_fleet import SERVER, Fleet, Row, at
from models_registry.planning.point_figures import quantile

CELLS = 4
LOOK_S = 300.0
"""Between two decisions of the planner."""
POLL_S = 2.0
REQUEST_LIMIT_S = 120.0
VOCABULARY = 30_000
TTFT_MS, ITL_MS = 4000, 120


@dataclass(frozen=True)
class Load:
    """Requests a second of one length, in tokens. They come as a Poisson process."""

    per_s: float
    prompt: int
    output: int

    def __str__(self) -> str:
        return f"{self.prompt}+{self.output} at {self.per_s:g}/s"


LONG_PROMPTS, LONG_ANSWERS = Load(1.0, 1500, 30), Load(0.4, 300, 300)


@dataclass
class Phase:
    """What requests felt that were sent in it, in seconds; `failed`: reason -> requests."""

    name: str
    load: Load
    sent: int = 0
    whole: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    first_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)


class Client:
    """Sends what a phase has, and reads each answer to its end."""

    def __init__(self, url: str, model: str, seed: int) -> None:
        self._url, self._model, self._chance = f"{url}/v1/completions", model, random.Random(seed)
        self._http = httpx.AsyncClient(timeout=REQUEST_LIMIT_S, limits=httpx.Limits(max_connections=None))
        self._asking: set[asyncio.Task[None]] = set()

    async def send(self, phase: Phase, until: asyncio.Event) -> None:
        """Requests of this phase until the event is set; those that are under way go on."""
        while not until.is_set():
            task = asyncio.create_task(self._one(phase))
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)
            await asyncio.sleep(self._chance.expovariate(phase.load.per_s))

    async def end(self) -> None:
        """Wait for all answers."""
        await asyncio.gather(*self._asking)
        await self._http.aclose()

    async def _one(self, phase: Phase) -> None:
        phase.sent += 1
        prompt = [self._chance.randrange(1, VOCABULARY) for _ in range(phase.load.prompt)]
        body = {"model": self._model, "prompt": prompt, "max_tokens": phase.load.output, "ignore_eos": True}
        began = last = time.monotonic()
        error, tokens = "the stream ended without [DONE]", 0
        try:
            async with self._http.stream("POST", self._url, json={**body, "stream": True}) as answer:
                if answer.status_code != 200:
                    error = f"status {answer.status_code}: {(await answer.aread())[:120]!r}"
                async for line in answer.aiter_lines():
                    now = time.monotonic()
                    if line == "data: [DONE]":
                        error = ""
                    elif line.startswith('data: {"error"'):
                        error = line[:120]
                        break
                    elif line.startswith("data: {"):
                        (phase.gaps_s if tokens else phase.first_s).append(now - last)
                        tokens, last = tokens + 1, now
        except httpx.HTTPError as failed:
            error = f"{type(failed).__name__} after {time.monotonic() - began:.0f} s and {tokens} tokens"
        if error:
            phase.failed[error] += 1
        phase.whole += not error


@dataclass
class Place:
    """The deployment in its region, as its API shows it."""

    fleet: Fleet
    deployment: str
    region: str

    def row(self) -> Row:
        rows: list[Row] = self.fleet.get(f"deployments/{self.deployment}")["regions"]
        return next(row for row in rows if row["region"] == self.region)

    def ready(self) -> str:
        """Its ready cells by role."""
        cells = self.fleet.rows("cells", deployment=self.deployment, region=self.region, state="ready")
        roles = Counter(cell["role"] for cell in cells)
        return ", ".join(f"{roles[role]} {role}" for role in ("prefill", "decode", "mixed") if roles[role])

    async def settles(self, ready: str, limit_s: float = 600.0) -> float:
        """Seconds until the ready cells are these."""
        began = time.monotonic()
        while (there := await asyncio.to_thread(self.ready)) != ready:
            if time.monotonic() - began > limit_s:
                raise SystemExit(f"not within {limit_s:.0f} s: {ready}; there are {there}")
            await asyncio.sleep(POLL_S)
        return time.monotonic() - began

    async def decided(self) -> Row:
        """What the planner says of requests that came from now on alone."""
        began, limit_s = time.time(), 2 * LOOK_S + 60.0
        while True:
            plan: Row | None = (await asyncio.to_thread(self.row))["role_plan"]
            if plan and datetime.fromisoformat(plan["looked_at"]).timestamp() >= began + LOOK_S:
                return plan
            if time.time() - began > limit_s:
                raise SystemExit(f"no decision within {limit_s:.0f} s; the last look: {plan}")
            await asyncio.sleep(POLL_S)


async def _during(client: Client, phase: Phase, work: "asyncio.Task[None]") -> None:
    until = asyncio.Event()
    work.add_done_callback(lambda _: until.set())
    await client.send(phase, until)
    await work


async def run(place: Place, phases: Sequence[Phase]) -> list[str]:
    """All phases; the ratios that the planner chose."""
    regions = place.fleet.rows("regions")
    url = next(row["ingress_url"] for row in regions if row["name"] == place.region)
    client, chosen = Client(url, place.deployment, 0), list[str]()
    by_hand, long_prompts, long_answers = phases

    def state(**fields: object) -> None:
        place.fleet.ask("PATCH", f"deployments/{place.deployment}", fields)

    async def scale() -> None:
        await asyncio.sleep(20)
        pools = {"region": place.region, "cells": {"prefill": 1, "decode": 3}}
        await asyncio.to_thread(state, regions=[pools])
        took_s = await place.settles("1 prefill, 3 decode")
        print(f"1p+3d by hand: all cells ready after {took_s:.0f} s", flush=True)
        await asyncio.sleep(20)

    async def plan() -> None:
        found = await place.decided()
        split = {role: found[role] for role in ("prefill", "decode", "mixed") if found[role]}
        chosen.append(", ".join(f"{count} {role}" for role, count in split.items()))
        print(f"planned {chosen[-1]}, handed over from {found['from_tokens']} tokens on: {found['reason']}", flush=True)
        took_s = await place.settles(chosen[-1])
        print(f"all cells ready after {took_s:.0f} s", flush=True)
        await asyncio.sleep(30)

    await _during(client, by_hand, asyncio.create_task(scale()))
    state(scaling={"mode": "act", "roles": "planned", "itl_p99_ms": ITL_MS}, slo={"ttft_ms": TTFT_MS})
    await _during(client, long_prompts, asyncio.create_task(plan()))
    await _during(client, long_answers, asyncio.create_task(plan()))
    await client.end()
    return chosen


def _print(phases: Sequence[Phase]) -> None:
    print("\n| phase | load | requests | whole | failed | TTFT p50 / p99 ms | ITL p50 / p99 ms |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for phase in phases:
        first, gaps = sorted(phase.first_s), sorted(phase.gaps_s)
        told = [
            f"{1000 * quantile(of, 0.5):.0f} / {1000 * quantile(of, 0.99):.0f}" if of else "-" for of in (first, gaps)
        ]
        failed = sum(phase.failed.values())
        print(f"| {phase.name} | {phase.load} | {phase.sent} | {phase.whole} | {failed} | {' | '.join(told)} |")
        for reason, count in phase.failed.items():
            print(f"{count} times {reason}", file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("deployment")
    parser.add_argument("region")
    options = parser.parse_args()
    place = Place(Fleet(), options.deployment, options.region)
    if place.row()["cells"] != CELLS:
        raise SystemExit(
            f"{options.deployment} has {place.row()['cells']} cells in {options.region}; {CELLS} are told apart"
        )
    since = place.fleet.last_event()
    phases = [
        Phase("1p+3d by hand, from 4 mixed", LONG_PROMPTS),
        Phase("planned, long prompts", LONG_PROMPTS),
        Phase("planned, long answers", LONG_ANSWERS),
    ]
    chosen = asyncio.run(run(place, phases))
    _print(phases)
    print("\nWhat the fleet says:\n")
    for event in place.fleet.events(since, deployment=options.deployment):
        if event["kind"] in ("deployment.roles", "deployment.scaled"):
            print(f"- {time.strftime('%H:%M:%S', time.gmtime(at(event)))} {event['message']}")
    print(f"\n{SERVER}, load average {os.getloadavg()[0]:.1f}")
    return 0 if not any(phase.failed for phase in phases) and len(set(chosen)) == 2 else 1


if __name__ == "__main__":
    sys.exit(main())
