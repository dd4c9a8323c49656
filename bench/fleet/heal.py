"""Time until a killed node is unrouted and replaced, and what clients saw.

    .venv/bin/python -m bench heal --model sim-70b --region us-east-1 --rounds 4

Needs a fleet from `make up` (same SWITCHYARD_HOME). Each round kills -9 the agent and the engine of one node, leader
and follower in turn, while a client sends requests at a steady rate through the region's ingress.
"""

import argparse
import asyncio
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from lab.steady_load import Answer, agent_and_engine, steady_load

HOME = Path(os.environ.get("SWITCHYARD_HOME", ".switchyard")).resolve()
POLL_S = 0.02
HEAL_LIMIT_S = 300.0


@dataclass(frozen=True)
class Round:
    role: str
    unrouted_s: float
    ready_s: float
    sent: int
    failed_streaming: int
    failed_otherwise: int


class Fleet:
    """The control plane's API, as automation sees it."""

    def __init__(self, server: str) -> None:
        token = (HOME / "operator-token").read_text().strip()
        self._client = httpx.AsyncClient(base_url=f"{server}/api/v1", headers={"Authorization": f"Bearer {token}"})

    async def get(self, path: str, **query: str) -> Any:
        response = await self._client.get(path, params=query)
        response.raise_for_status()
        return response.json()

    async def cell(self, cell_id: str) -> Any:
        return await self.get(f"/cells/{cell_id}/")

    async def is_routed(self, cell_id: str, region: str) -> bool:
        tables = (await self.get("/routing-tables/", region=region))["results"]
        newest = max(tables, key=lambda table: table["revision"])
        body = await self.get(f"/routing-tables/{newest['id']}/")
        return any(cell["cell"] == cell_id for pool in body["body"]["pools"] for cell in pool["cells"])

    async def wait(self, condition: Any, limit_s: float) -> float:
        """Seconds until the condition holds."""
        began = time.monotonic()
        while time.monotonic() - began < limit_s:
            if await condition():
                return time.monotonic() - began
            await asyncio.sleep(POLL_S)
        raise SystemExit(f"it did not happen within {limit_s:.0f} s")


async def one_round(fleet: Fleet, url: str, options: argparse.Namespace, rank: int) -> Round:
    cells = (await fleet.get("/cells/", deployment=options.model, region=options.region))["results"]
    cell = next(cell for cell in cells if cell["state"] == "ready")
    node = next((node for node in cell["nodes"] if node["rank"] == rank), cell["nodes"][0])
    stop = asyncio.Event()
    answers: list[Answer] = []
    load = asyncio.create_task(steady_load(url, options.model, options.rate, stop, answers))
    await asyncio.sleep(3)
    victims = agent_and_engine(node["id"], home=HOME)
    killed_at = time.monotonic()
    for victim in victims:
        victim.kill()

    async def unrouted() -> bool:
        return not await fleet.is_routed(cell["id"], options.region)

    async def ready_again() -> bool:
        now = await fleet.cell(cell["id"])
        return now["state"] == "ready" and now["generation"] > cell["generation"]

    unrouted_s = await fleet.wait(unrouted, 60.0)
    await fleet.wait(ready_again, HEAL_LIMIT_S)
    ready_s = time.monotonic() - killed_at
    await asyncio.sleep(3)
    stop.set()
    await load
    failed = [answer for answer in answers if answer.error]
    streaming = [answer for answer in failed if answer.was_streaming_from(cell["id"], killed_at)]
    for answer in failed:
        print(f"  failed at {answer.began - killed_at:+.2f} s from {answer.cell or 'nobody'}: {answer.error}")
    return Round(node["role"], unrouted_s, ready_s, len(answers), len(streaming), len(failed) - len(streaming))


async def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--server", default=f"http://127.0.0.1:{os.environ.get('SWITCHYARD_PORT', '8000')}")
    parser.add_argument("--model", default="sim-70b")
    parser.add_argument("--region", default="us-east-1")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--rate", type=float, default=5.0, help="requests a second")
    options = parser.parse_args()
    fleet = Fleet(options.server)
    url = (await fleet.get(f"/regions/{options.region}/"))["ingress_url"]
    rounds = []
    for number in range(options.rounds):
        done = await one_round(fleet, url, options, rank=number % 2)
        print(
            f"round {number + 1}, {done.role}: unrouted in {done.unrouted_s:.2f} s, ready in {done.ready_s:.1f} s;"
            f" {done.sent} requests, {done.failed_streaming} cut while streaming, {done.failed_otherwise} failed"
            " otherwise"
        )
        rounds.append(done)
    print(
        f"median of {len(rounds)}: unrouted {statistics.median(r.unrouted_s for r in rounds):.2f} s, "
        f"ready {statistics.median(r.ready_s for r in rounds):.1f} s; "
        f"failed other than by streaming from the killed cell: {sum(r.failed_otherwise for r in rounds)} "
        f"of {sum(r.sent for r in rounds)}"
    )
