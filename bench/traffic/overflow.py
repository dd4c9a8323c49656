"""Refused requests of an overloaded region with and without room in another one.

Then, without load, the CPU time that HAProxy needs to be able to send a request again. Real `sim` cells, cell proxies
and ingresses; steps are long, so that a busy machine does not slow the cells down.

    .venv/bin/python -m bench overflow [--requests 1000] [--base-port 28400]
"""

import argparse
import asyncio
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

import psutil
import uvloop

from bench.traffic import contenders
from bench.traffic.arrivals import Arrival
from bench.traffic.client import Seen, ask, body_of, play
from bench.traffic.contenders import MODEL
from bench.traffic.sim_cells import SimCell, sim_cells
from bench.traffic.simulation import percentile
from engine_agent.engines.sim.batching import ModelParameters
from engine_agent.ingress.agent import JOURNAL_FILE
from engine_agent.ingress.main import JOIN_TOKEN_VARIABLE
from engine_agent.protocol.ingress_messages import Pool, RoutingTable, SpillTarget
from engine_agent.protocol.links import PLAIN_LINKS_VARIABLE
from engine_agent.runtime.journal import Journal

HERE, THERE = "here", "there"
HOP_SECRET = "b" * 40
PLACES, STEP_MS, ANSWER_TOKENS = 32, 500.0, 16
CELL = ModelParameters(
    prefill_tokens_per_s=20_000,
    decode_step_ms=STEP_MS,
    decode_step_per_seq_ms=0,
    max_num_seqs=PLACES,
    prefix_block_tokens=0,
)
CELLS_THERE = 4
CAPACITY_PER_S = PLACES / ((ANSWER_TOKENS + 1) * STEP_MS / 1000)
QUICK = replace(CELL, decode_step_ms=1.0)
AT_ONCE = 8


@dataclass(frozen=True)
class Region:
    """One region as this bench starts it."""

    name: str
    port: int
    cells: Sequence[SimCell]


@contextmanager
def ingress(folder: Path, region: Region, other: Region | None) -> Iterator[psutil.Process]:
    """An ingress that may send to the other region, by a table in its journal."""
    spill = (SpillTarget(other.name, "127.0.0.1", other.port, f"i-{other.name}"),) if other else ()
    cells = tuple(cell.endpoint for cell in region.cells)
    pool = Pool(MODEL, (MODEL,), "realtime", cells, spill, {region.name: 1.0})
    home = folder / f"ingress-{region.name}"
    home.mkdir(parents=True, exist_ok=True)
    secrets = (HOP_SECRET,) if other else ()
    Journal(home / JOURNAL_FILE, RoutingTable).save(RoutingTable(1, region.name, (pool,), hop_secrets=secrets))
    words = (sys.executable, "-m", "engine_agent", "ingress", "--ingress-id", f"i-{region.name}", "--no-access-log")
    where = ("--region", region.name, "--home", str(home), "--port", str(region.port))
    environment = {JOIN_TOKEN_VARIABLE: "none", PLAIN_LINKS_VARIABLE: "1"}
    server = ("--server", contenders.NO_CONTROL_PLANE)
    with contenders.spawned((*words, *where, *server), home / "agent.log", environment) as process:
        contenders.wait_until_it_answers(region.port)
        yield process


def poisson(per_s: float, count: int) -> list[Arrival]:
    chance, at_s = Random(7), 0.0
    found = []
    for number in range(count):
        at_s += chance.expovariate(per_s)
        found.append(Arrival(at_s, 20, ANSWER_TOKENS, f"r{number}"))
    return found


async def send(port: int, arrivals: Sequence[Arrival]) -> tuple[list[Seen], float]:
    """All of them, and how long it took."""
    seen: list[Seen] = []
    began_s = monotonic()

    async def one(arrival: Arrival) -> None:
        seen.append(await ask(port, body_of(arrival, MODEL, 1)))

    await play(arrivals, one)
    return seen, monotonic() - began_s


def figures(seen: Sequence[Seen], lasted_s: float, here: Region) -> dict[str, Any]:
    ttft_s = [each.ttft_s for each in seen if each.whole]
    own = {cell.endpoint.cell for cell in here.cells}
    return {
        "requests": len(seen),
        "whole": len(ttft_s),
        "statuses": dict(Counter(each.status for each in seen)),
        "served_here": sum(each.whole and each.cell in own for each in seen),
        "goodput_per_s": round(len(ttft_s) / lasted_s, 1),
        "ttft_p50_s": round(percentile(ttft_s, 0.5), 3),
        "ttft_p99_s": round(percentile(ttft_s, 0.99), 3),
    }


def haproxy_cpu_s(agent: psutil.Process, home: Path) -> float:
    """Of the workers that serve: body parsers have folders of their own."""
    spent = 0.0
    for process in agent.children(recursive=True):
        if "haproxy" in process.name() and Path(process.cwd()) == home:
            times = process.cpu_times()
            spent += times.user + times.system
    return spent


@contextmanager
def regions(folder: Path, base_port: int, cell: ModelParameters) -> Iterator[tuple[Region, Region]]:
    with sim_cells(folder, base_port + 100, cell, [1.0] * (1 + CELLS_THERE)) as cells:
        yield Region(HERE, base_port, cells[:1]), Region(THERE, base_port + 10, cells[1:])


def overloads(folder: Path, base_port: int, requests: int) -> Iterator[dict[str, Any]]:
    with regions(folder, base_port, CELL) as (here, there):
        three, all_of_them = 3 * CAPACITY_PER_S, 2 * (1 + CELLS_THERE) * CAPACITY_PER_S
        with ingress(folder, here, None):
            yield {"run": "3 x here, alone", **figures(*uvloop.run(send(here.port, poisson(three, requests))), here)}
        with ingress(folder, there, here), ingress(folder, here, there):
            for run, per_s in (("3 x here, two", three), ("2 x both, two", all_of_them)):
                yield {"run": run, **figures(*uvloop.run(send(here.port, poisson(per_s, requests))), here)}


async def in_calm(port: int, requests: int, tokens: int) -> None:
    """So many requests by `AT_ONCE` clients.

    Raises:
        RuntimeError: one was not answered whole.
    """
    left = iter(range(requests))

    async def client() -> None:
        for number in left:
            if not (await ask(port, body_of(Arrival(0, 20, tokens, f"r{number}"), MODEL, 1))).whole:
                raise RuntimeError("a request of the calm run failed")

    await asyncio.gather(*(client() for _ in range(AT_ONCE)))


def prices(folder: Path, base_port: int, requests: int) -> Iterator[dict[str, Any]]:
    """Processor time of the HAProxy that serves, for each request with an answer of 1 token and of 64."""
    with regions(folder, base_port, QUICK) as (here, there):
        for run in ("calm, alone", "calm, two"):
            with ExitStack() as stack:
                other = there if run == "calm, two" else None
                if other:
                    stack.enter_context(ingress(folder, there, here))
                agent = stack.enter_context(ingress(folder, here, other))
                spent_us = {}
                for tokens in (1, 64):
                    before_s = haproxy_cpu_s(agent, folder / f"ingress-{HERE}")
                    asyncio.run(in_calm(here.port, requests, tokens))
                    spent_us[tokens] = (haproxy_cpu_s(agent, folder / f"ingress-{HERE}") - before_s) * 1e6 / requests
                yield {"run": run, "requests": requests, "haproxy_us_by_tokens": spent_us}


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--base-port", type=int, default=28400)
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        rows = overloads(Path(folder) / "overloads", options.base_port, options.requests)
        for row in chain(rows, prices(Path(folder) / "prices", options.base_port + 200, options.requests)):
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()
