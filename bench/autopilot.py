"""Lets a running fleet lose, flap, evacuate and miss its control plane under load, and says what the autopilot did.

    .venv/bin/python bench/autopilot.py loss flap override evacuation silence --silence-s 600

Needs a fleet from `make up ENGINE=sim` (same SWITCHYARD_HOME) that nobody else uses: it scales the deployment to three
cells a region, lays down what a cell was tested for, and kills processes. Clients send steady requests to both regions;
a scenario is a list of what is done to the fleet, and every figure comes from the API or from the clients.
"""

import argparse
import asyncio
import itertools
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import psutil

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(CHECKOUT))

from tests.load import Answer, agent_and_engine, steady_load

HOME = Path(os.environ.get("SWITCHYARD_HOME", ".switchyard")).resolve()
EAST, WEST = "us-east-1", "us-west-2"
CELLS = 3
TESTED = 4
"""Requests at once that a cell counts as tested for: small, so that a laptop can fill a region."""
MAX_TOKENS = 60
RATE = 4.0
"""Requests a second in each region: about a third of what its three cells count as tested for, so that either region
can take the other's requests below 80 %."""
ENGINE_ADMIN = 4
"""Offset of the simulator's admin port (engine_agent.protocol.ports)."""
POLL_S = 0.2


class Fleet:
    """The control plane's API, as automation sees it."""

    def __init__(self, server: str, deployment: str) -> None:
        token = (HOME / "operator-token").read_text().strip()
        self.deployment = deployment
        self._client = httpx.AsyncClient(
            base_url=f"{server}/api/v1", headers={"Authorization": f"Bearer {token}"}, timeout=10
        )

    async def ask(self, method: str, path: str, **arguments: Any) -> Any:
        response = await self._client.request(method, path, **arguments)
        if response.is_error:
            raise httpx.HTTPError(f"{method} {path}: {response.status_code} {response.text[:300]}")
        return response.json()

    async def ready_cells(self, region: str) -> list[Any]:
        query = {"deployment": self.deployment, "region": region, "state": "ready"}
        found: list[Any] = (await self.ask("GET", "/cells", params=query))["results"]
        return found

    async def matrix(self) -> Any:
        return await self.ask("GET", f"/traffic/matrices/{self.deployment}")

    async def in_force(self, region: str) -> dict[str, float]:
        """The shares that a region's ingress has acknowledged."""
        ingress = await self.ask("GET", f"/ingresses/i-{region}")
        table = await self.ask("GET", f"/routing-tables/{region}@{ingress['revision']}")
        pools = {pool["name"]: pool["fractions"] for pool in table["body"]["pools"]}
        fractions: dict[str, float] = pools[self.deployment]
        return fractions

    async def newest_shift(self) -> int:
        shifts = (await self.ask("GET", "/traffic/history", params={"deployment": self.deployment}))["results"]
        return int(shifts[0]["id"]) if shifts else 0

    async def shifts_after(self, last: int) -> list[Any]:
        """Oldest first."""
        shifts = (await self.ask("GET", "/traffic/history", params={"deployment": self.deployment}))["results"]
        return [shift for shift in reversed(shifts) if shift["id"] > last]

    async def wait(self, condition: Callable[[], Awaitable[Any]], limit_s: float, what: str) -> float:
        """Seconds until the condition holds."""
        began = time.monotonic()
        while time.monotonic() - began < limit_s:
            try:
                if await condition():
                    return time.monotonic() - began
            except httpx.HTTPError:
                pass  # a control plane that starts again is waited for like everything else
            await asyncio.sleep(POLL_S)
        raise SystemExit(f"{what}: not within {limit_s:.0f} s")


class Load:
    """Steady clients in both regions, and what became of their requests."""

    def __init__(self, urls: dict[str, str], model: str, rate: float) -> None:
        self.answers: dict[str, list[Answer]] = {region: [] for region in urls}
        self._stop = asyncio.Event()
        self._tasks = [
            asyncio.create_task(steady_load(url, model, rate, self._stop, self.answers[region], max_tokens=MAX_TOKENS))
            for region, url in urls.items()
        ]

    async def end(self) -> None:
        self._stop.set()
        await asyncio.gather(*self._tasks)

    def failed(self, since: float = 0.0) -> list[Answer]:
        return [a for answers in self.answers.values() for a in answers if a.error and a.began >= since]

    def sent(self, since: float = 0.0) -> int:
        return sum(a.began >= since for answers in self.answers.values() for a in answers)

    def served_by(self, region: str, since: float) -> int:
        """Answers that began in this time and came from cells of a region, whose names carry it."""
        return sum(f"-{region}-" in a.cell for answers in self.answers.values() for a in answers if a.began >= since)

    def request_s(self) -> float:
        done = [a.ended - a.began for answers in self.answers.values() for a in answers if a.ended and not a.error]
        return statistics.mean(done) if done else 0.0


class Watch:
    """Looks at the fleet all the time: the fullest that each region was planned to be, of what it had that moment."""

    def __init__(self, fleet: Fleet) -> None:
        self.fullest: Counter[str] = Counter()
        self._fleet = fleet
        self._task = asyncio.create_task(self._look())

    async def _look(self) -> None:
        while True:
            try:
                for region in (await self._fleet.matrix())["regions"]:
                    if region["capacity_now"]:
                        used = region["load"] / region["capacity_now"]
                        self.fullest[region["region"]] = max(self.fullest[region["region"]], used)
            except httpx.HTTPError:
                pass  # a control plane that is away is what some scenarios are about
            await asyncio.sleep(0.5)

    def end(self) -> None:
        self._task.cancel()


def movement(shifts: list[Any], before: dict[str, dict[str, float]]) -> tuple[float, float]:
    """Summed over shifts: total variation of the row that moved most, and the share of all requests."""
    rows = [before, *(shift["shares"] for shift in shifts)]
    greatest = sum(max(_distance(was[o], now[o]) for o in now) for was, now in itertools.pairwise(rows))
    return greatest, sum(shift["moved"] for shift in shifts)


def _distance(row: dict[str, float], other: dict[str, float]) -> float:
    return sum(abs(row.get(region, 0) - other.get(region, 0)) for region in {*row, *other}) / 2


async def prepare(fleet: Fleet) -> None:
    """Three cells in each region, a policy of small cells, and a minute of quiet samples."""
    places = [{"region": region, "cells": CELLS} for region in (EAST, WEST)]
    await fleet.ask("PATCH", f"/deployments/{fleet.deployment}", json={"regions": places})
    await fleet.ask("PATCH", f"/traffic/policies/{fleet.deployment}", json={"tested_concurrency": TESTED})

    async def is_whole() -> bool:
        return all([len(await fleet.ready_cells(region)) == CELLS for region in (EAST, WEST)])

    await fleet.wait(is_whole, 180, "three ready cells in each region")

    async def is_counted() -> bool:
        seen = (await fleet.matrix())["regions"]
        return all(region["capacity"] == CELLS * TESTED for region in seen)

    waited = await fleet.wait(is_counted, 120, "a minute of whole capacity")
    print(f"prepared: {CELLS} cells of {TESTED} requests at once in each region, counted on after {waited:.0f} s")


async def until_home(fleet: Fleet, limit_s: float) -> float:
    async def is_home() -> bool:
        return bool((await fleet.matrix())["shares"] == {EAST: {EAST: 1.0}, WEST: {WEST: 1.0}})

    return await fleet.wait(is_home, limit_s, "all requests home again")


async def loss(fleet: Fleet, load: Load, options: argparse.Namespace) -> None:
    """kill -9 two of three cells of a region, all their nodes."""
    watch, began = Watch(fleet), time.monotonic()
    await asyncio.sleep(5)
    cells = (await fleet.ready_cells(EAST))[:2]
    last, before = await fleet.newest_shift(), (await fleet.matrix())["shares"]
    victims = [
        process for cell in cells for node in cell["nodes"] for process in agent_and_engine(node["id"], home=HOME)
    ]
    killed_at = time.monotonic()
    for process in victims:
        process.kill()

    async def is_relieved() -> bool:
        return (await fleet.in_force(EAST)).get(WEST, 0.0) > 0

    ratio_s = await fleet.wait(is_relieved, 60, "another ratio in force")
    shares = await fleet.in_force(EAST)
    watch.fullest.clear()
    await asyncio.sleep(20)
    watch.end()
    cut = [a for a in load.failed(began) if a.cell in {cell["id"] for cell in cells} and a.began <= killed_at]
    others = [a for a in load.failed(began) if a not in cut]
    shifts = await fleet.shifts_after(last)
    print(f"loss: new ratio in force {ratio_s:.1f} s after the kill: {shares}; because {shifts[0]['reason']}")
    print(f"loss: the receiver was planned at most {watch.fullest[WEST]:.0%} full, the rest of its region {EAST} "
          f"{watch.fullest[EAST]:.0%}; moved {movement(shifts, before)[0]:.2f} of the row")  # fmt: skip
    report_failures("loss", load.sent(began), others, len(cut), killed_at)


async def flap(fleet: Fleet, load: Load, options: argparse.Namespace) -> None:
    """Two of three cells become unready for 4 s of every 12 s."""
    watch, began = Watch(fleet), time.monotonic()
    last, before = await fleet.newest_shift(), (await fleet.matrix())["shares"]
    nodes = [cell["nodes"][0]["id"] for cell in (await fleet.ready_cells(EAST))[:2]]
    ports = [(await fleet.ask("GET", f"/nodes/{node}"))["port_base"] + ENGINE_ADMIN for node in nodes]
    async with httpx.AsyncClient() as engine:
        while time.monotonic() - began < options.flap_s:
            for port in ports:
                await engine.post(f"http://127.0.0.1:{port}/fault", json={"kind": "unready"})
            await asyncio.sleep(4)
            for port in ports:
                await engine.delete(f"http://127.0.0.1:{port}/fault")
            await asyncio.sleep(8)
    watch.end()
    shifts = await fleet.shifts_after(last)
    greatest, of_all = movement(shifts, before)
    print(f"flap: {options.flap_s:.0f} s, {len(shifts)} shifts: {[shift['kind'] for shift in shifts]}; "
          f"movement {greatest:.2f} of the row that moved most, {of_all:.2f} of all requests")  # fmt: skip
    print(f"flap: fullest as planned: {_percents(watch.fullest)}")
    report_failures("flap", load.sent(began), load.failed(began), 0, began)


async def override(fleet: Fleet, load: Load, options: argparse.Namespace) -> None:
    """Half of a region's requests are sent away by order, for 15 s."""
    began = time.monotonic()
    order = await fleet.ask(
        "POST", "/traffic/overrides",
        json={"deployment": fleet.deployment, "origin": WEST, "shares": {WEST: 0.5, EAST: 0.5}, "duration_s": 15,
              "why": "bench"},
    )  # fmt: skip

    async def holds() -> bool:
        return (await fleet.in_force(WEST)).get(EAST, 0.0) >= 0.5

    in_force_s = await fleet.wait(holds, 30, "the ordered shares")

    async def has_ended() -> bool:
        return not (await fleet.ask("GET", f"/traffic/overrides/{order['id']}"))["active"]

    await fleet.wait(has_ended, 40, "the order's end")
    ended_s = time.monotonic() - began
    print(f"override: in force after {in_force_s:.1f} s, ended by itself after {ended_s:.1f} s (15 s were ordered)")
    report_failures("override", load.sent(began), load.failed(began), 0, began)


async def evacuation(fleet: Fleet, load: Load, options: argparse.Namespace) -> None:
    """A region is evacuated for real, and comes back."""
    began = time.monotonic()
    request = {"region": EAST, "mode": "real", "duration_s": 600, "why": "bench", "deployment": fleet.deployment}
    (effect,) = (await fleet.ask("POST", "/traffic/evacuations/preview", json=request))["effects"]
    predicted = {one["region"]: one["utilisation_after"] for one in effect["regions"]}
    order = await fleet.ask("POST", "/traffic/evacuations", json={**request, "confirm": EAST})

    async def is_empty() -> bool:
        return EAST not in {**await fleet.in_force(EAST), **await fleet.in_force(WEST)}

    empty_s = await fleet.wait(is_empty, 60, "a table without the region")
    empty_at = time.monotonic()
    await asyncio.sleep(options.evacuation_s)
    seen = {one["region"]: one["load"] / one["capacity_now"] for one in (await fleet.matrix())["regions"]}
    served = load.served_by(EAST, empty_at + 1)
    await fleet.ask("POST", f"/traffic/overrides/{order['id']}/end", json={"why": "bench"})
    print(f"evacuation: no table sends anything to {EAST} after {empty_s:.1f} s; it answered {served} later requests")
    print(f"evacuation: predicted {_percents(predicted)}, was {_percents(seen)}")
    report_failures("evacuation", load.sent(began), load.failed(began), 0, began)


async def silence(fleet: Fleet, load: Load, options: argparse.Namespace) -> None:
    """The launcher and with it web, worker, beat and both servers die; later `make up` starts them again."""
    began = time.monotonic()
    me = os.getpid()
    gone = [p for p in psutil.process_iter() if p.pid != me and _is_control_plane(p)]
    names = sorted({_name(p) for p in gone})
    for process in gone:
        process.kill()
    psutil.wait_procs(gone, timeout=10)
    killed_at = time.monotonic()
    await asyncio.sleep(options.silence_s)
    during = (load.sent(killed_at), load.failed(killed_at))
    await asyncio.to_thread(
        subprocess.run, [sys.executable, "-m", "controlplane.embedded", "up", "--detach"], cwd=CHECKOUT, check=True,
        capture_output=True,
    )  # fmt: skip
    up_s = time.monotonic() - killed_at - options.silence_s

    async def is_looking() -> bool:
        row = await fleet.matrix()
        return not row["held"] and bool(row["regions"])

    await fleet.wait(is_looking, 120, "an autopilot that looks again")
    print(f"silence: {', '.join(names)} dead for {options.silence_s:.0f} s: {len(during[1])} of {during[0]} failed; "
          f"back after {up_s:.0f} s")  # fmt: skip
    report_failures("silence", load.sent(began), load.failed(began), 0, killed_at)


def _is_control_plane(process: psutil.Process) -> bool:
    try:
        if process.environ().get("SWITCHYARD_HOME") != str(HOME):
            return False
        words = " ".join(process.cmdline())
    except psutil.Error:
        return False
    return any(mark in words for mark in ("controlplane.", "manage.py", "celery", "postgres", "valkey"))


def _name(process: psutil.Process) -> str:
    words = " ".join(process.cmdline()) if process.is_running() else process.name()
    for mark, name in (("plane.web", "web"), (" controller", "controller"), (" worker", "worker"), (" beat", "beat"),
                       ("embedded", "launcher"), ("postgres", "postgres"), ("valkey", "valkey")):  # fmt: skip
        if mark in words:
            return name
    return process.name()


def _percents(shares: dict[str, Any]) -> str:
    return ", ".join(f"{region} {share:.0%}" for region, share in sorted(shares.items()) if share is not None)


def report_failures(scenario: str, sent: int, failed: list[Answer], cut: int, moment: float) -> None:
    more = f", besides {cut} that streamed from killed cells" if cut else ""
    print(f"{scenario}: {len(failed)} of {sent} requests failed{more}")
    for answer in failed[:5]:
        print(f"  at {answer.began - moment:+.1f} s from {answer.cell or 'nobody'}: {answer.error}")


SCENARIOS = {"loss": loss, "flap": flap, "override": override, "evacuation": evacuation, "silence": silence}
FROM_HOME = {"loss", "flap", "override"}
"""Scenarios whose figures are of requests that are all at home."""


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="*", default=list(SCENARIOS), choices=[*SCENARIOS, []])
    parser.add_argument("--server", default=f"http://127.0.0.1:{os.environ.get('SWITCHYARD_PORT', '8000')}")
    parser.add_argument("--deployment", default="sim-70b")
    parser.add_argument("--rate", type=float, default=RATE, help="requests a second in each region")
    parser.add_argument("--flap-s", type=float, default=96.0)
    parser.add_argument("--evacuation-s", type=float, default=20.0)
    parser.add_argument("--silence-s", type=float, default=600.0)
    options = parser.parse_args()
    fleet = Fleet(options.server, options.deployment)
    regions = (await fleet.ask("GET", "/regions"))["results"]
    urls = {region["name"]: region["ingress_url"] for region in regions}
    load = Load(urls, options.deployment, options.rate)
    await prepare(fleet)
    print(f"load: {options.rate:g} requests a second in each region, {load.request_s():.2f} s each")
    for name in options.scenarios:
        if name in FROM_HOME:
            await until_home(fleet, 300)
        print(f"--- {name}: {SCENARIOS[name].__doc__}")
        await SCENARIOS[name](fleet, load, options)
    await load.end()


if __name__ == "__main__":
    asyncio.run(main())
