"""Latency of 1, 2 and 4 ingresses with one slow cell, the cost of reports of load, and CPU time per request.

Four parts, all by default: `simulated` (virtual time, repeats exactly), `reports` (what a report costs by each way to
get it), `real` (HAProxy, cell proxies and `sim` cells) and `cpu` (short requests over stub cells). Every result is
appended to a file.

    .venv/bin/python -m bench shared_load [--parts simulated,reports,real,cpu] [--rounds 3]
"""

import argparse
import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import uvloop

from bench import RESULTS, cpu_s, family, note, percentile
from bench.traffic import contenders
from bench.traffic.arrivals import Arrival, heavy_tailed
from bench.traffic.contenders import MODEL
from bench.traffic.proxies import WHOLE, BenchFleet, wire_ask, wire_build, wire_cells
from bench.traffic.region_simulation import RegionSimulation
from bench.traffic.sim_cells import Seen, ask, body_of, play, sim_cells
from engine_agent.engines.sim.batching import ModelParameters
from engine_agent.node.http import HttpClient, NoResponse
from engine_agent.node.identity import Identity
from engine_agent.protocol.identity import IdentityKind, IdentityName
from engine_agent.protocol.ingress_messages import CellEndpoint

BASE_PORT = 27700
COUNTS = (1, 2, 4)
PLACES, SLOW_FACTOR = 16, 3.0
CELL = ModelParameters(
    prefill_tokens_per_s=5000, decode_step_ms=40, decode_step_per_seq_ms=1, max_num_seqs=PLACES, prefix_block_tokens=0
)
"""As in `real_routing`: an answer takes 3.3 s on average."""
CELLS = 8
RATES = (20.0, 25.0, 26.5)
"""A second: 66, 82 and 87 % of the capacity."""
PERIODS_S = (0.0, 0.1, 1.0)
"""With 0 there are no reports. 1 s is the period of HAProxy's health checks."""
REQUESTS = 3000


def simulate(rounds: int) -> None:
    for rate in RATES:
        alone: list[float] = []
        for count in COUNTS:
            for every_s in PERIODS_S if count > 1 else (0.0,):
                p99_ms = [_simulated_p99_ms(count, rate, every_s, seed) for seed in range(rounds)]
                alone = alone or p99_ms
                ratio = median(one / other for one, other in zip(p99_ms, alone, strict=True))
                row = {"part": "simulated", "ingresses": count, "rate": rate, "every_s": every_s, "ratio": ratio}
                note("shared_load", row | _spread("p99_ms", p99_ms))


def _simulated_p99_ms(count: int, rate: float, every_s: float, seed: int) -> float:
    factors = [1.0] * (CELLS - 1) + [SLOW_FACTOR]
    region = RegionSimulation(count, CELL, factors, PLACES, every_s=every_s, seed=seed)
    outcomes = region.run(heavy_tailed(rate, REQUESTS, seed))
    return percentile([outcome.ttft_s * 1000 for outcome in outcomes[REQUESTS // 10 :]], 0.99)


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    return {name: median(values), f"least_{name}": min(values), f"greatest_{name}": max(values)}


# --- what a report costs ---

REPORTS = 1000


def measure_reports(rounds: int) -> None:
    """CPU time of a report at its reader and at the cell proxy, by the way it travels."""
    fleet, folder = BenchFleet(), RESULTS / "runs" / "shared-load"
    home = folder / "reader"
    fleet.certify_ingress(home)
    with ExitStack() as stack:
        stack.enter_context(wire_cells(wire_build(RESULTS), BASE_PORT, 1))
        end, proxy = stack.enter_context(
            contenders.cell_proxy(folder, 0, BASE_PORT + 10, BASE_PORT, fleet.certify_node)
        )
        name = IdentityName(fleet.fleet_id, IdentityKind.NODE, end.node).dns
        context = Identity(home).client_context
        url = f"https://127.0.0.1:{end.port}/healthz"

        async def read(client: HttpClient, *, keep: bool) -> None:
            while True:
                with suppress(NoResponse):  # it does not listen yet
                    await client.request("GET", url, timeout_s=5)
                    break
                await asyncio.sleep(0.1)
            for _ in range(REPORTS):
                await client.request("GET", url, timeout_s=5)
                if not keep:
                    client.close()

        for _ in range(rounds):
            for way, keep in (("kept TLS connection", True), ("a TLS connection each, as a health check", False)):
                _note_cost(way, proxy, partial(asyncio.run, read(HttpClient(context, name), keep=keep)))
            _note_cost("a plain connection each, as HAProxy's agent-check", None, partial(asyncio.run, _agent_checks()))


def _note_cost(way: str, proxy: psutil.Process | None, work: Callable[[], object]) -> None:
    there = family(proxy.pid) if proxy else []
    before, own = cpu_s(there), time.process_time()
    work()
    us = {"reader_us": time.process_time() - own, "proxy_us": cpu_s(there) - before}
    note("shared_load", {"part": "reports", "way": way, **{name: s / REPORTS * 1e6 for name, s in us.items()}})


async def _agent_checks() -> None:
    """Both ends in this process: the answer is one line."""

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"up 50%\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", BASE_PORT + 90):
        for _ in range(REPORTS):
            reader, writer = await asyncio.open_connection("127.0.0.1", BASE_PORT + 90)
            await reader.read()
            writer.close()
            await writer.wait_closed()


# --- with real parts ---

REAL_CELLS, REAL_RATE, REAL_S = 4, 10.0, 25.0
"""Fewer cells than simulated: two processors compute all of them. 80 % of the capacity."""


def measure_real(rounds: int, rate: float) -> None:
    folder = RESULTS / "runs" / "shared-load"
    factors = [1.0] * (REAL_CELLS - 1) + [SLOW_FACTOR]
    with ExitStack() as stack:
        cells = stack.enter_context(sim_cells(folder, BASE_PORT + 100, CELL, factors))
        regions: dict[tuple[int, bool], list[int]] = {}
        for count, shares in ((1, False), (2, False), (2, True), (4, False), (4, True)):
            first = BASE_PORT + 10 * len(regions)
            regions[count, shares] = [first + place for place in range(count)]
            names = _names(count)
            for name, port in zip(names, regions[count, shares], strict=True):
                home, known = folder / f"ingress-{port}", _beginning_with(name, names) if shares else (name,)
                stack.enter_context(contenders.ingress(home, port, cells, names=known))
        for ports in regions.values():
            for port in ports:
                contenders.wait_until_it_answers(port)
        for turn in range(rounds):
            arrivals = heavy_tailed(rate, round(rate * REAL_S), seed=turn)
            for (count, shares), ports in regions.items():
                seen = uvloop.run(_play(arrivals, ports))
                row = {"part": "real", "ingresses": count, "shares": shares, "rate": rate, "turn": turn}
                note("shared_load", row | seen)


async def _play(arrivals: Sequence[Arrival], ports: Sequence[int]) -> dict[str, Any]:
    """Sends them to the ingresses in turn, which no client does, but which repeats. The first tenth warms up."""
    tries: list[Seen] = []

    async def one(arrival: Arrival) -> None:
        port = ports[int(arrival.key[1:]) % len(ports)]
        tries.append(await ask(port, body_of(arrival, MODEL, 1)))

    await play(arrivals, one)
    counted = sorted(tries, key=lambda seen: seen.began_s)[len(tries) // 10 :]
    ttft_ms = [seen.ttft_s * 1000 for seen in counted if seen.whole]
    failed = len(counted) - len(ttft_ms)
    return {"p50_ms": percentile(ttft_ms, 0.5), "p99_ms": percentile(ttft_ms, 0.99), "failed": failed}


# --- CPU time ---

CPU_CELLS, CONNECTIONS, CLOSED_S = 2, 64, 4.0


def measure_cpu(rounds: int) -> None:
    """Short requests as fast as the ingresses of a region take them together. CPU time without that of idle agents."""
    folder, program = RESULTS / "runs" / "shared-load", wire_build(RESULTS)
    with ExitStack() as stack:
        stubs = BASE_PORT + 200
        stack.enter_context(wire_cells(program, stubs, CPU_CELLS))
        cells = [
            stack.enter_context(contenders.cell_proxy(folder, number, stubs + 10 + 10 * number, stubs + number))[0]
            for number in range(CPU_CELLS)
        ]
        regions: dict[int, list[tuple[int, psutil.Process]]] = {}
        for count in COUNTS:
            first = stubs + 50 + 10 * len(regions)
            regions[count] = [
                (port, stack.enter_context(_of_region(folder, port, cells, name, count)))
                for port, name in enumerate(_names(count), first)
            ]
        for ports in regions.values():
            for port, _ in ports:
                contenders.wait_until_it_answers(port)
        for _ in range(rounds):
            for count, ports in regions.items():
                note("shared_load", {"part": "cpu", "ingresses": count, **_load(program, ports)})


def _names(count: int) -> tuple[str, ...]:
    return tuple(f"i-bench-{number}" for number in range(count))


def _beginning_with(name: str, names: tuple[str, ...]) -> tuple[str, ...]:
    return (name, *(other for other in names if other != name))


def _of_region(
    folder: Path, port: int, cells: Sequence[CellEndpoint], name: str, count: int
) -> AbstractContextManager[psutil.Process]:
    return contenders.ingress(folder / f"cpu-{port}", port, cells, names=_beginning_with(name, _names(count)))


def _load(program: Path, ports: Sequence[tuple[int, psutil.Process]]) -> dict[str, float]:
    processes = [each for _, process in ports for each in family(process.pid)]
    before = cpu_s(processes)
    time.sleep(CLOSED_S)
    idle_s = cpu_s(processes) - before
    before = cpu_s(processes)
    with ThreadPoolExecutor(len(ports)) as pool:
        connections = CONNECTIONS // len(ports)
        runs = [pool.submit(wire_ask, program, "closed", port, connections, CLOSED_S, WHOLE) for port, _ in ports]
        seen = [run.result() for run in runs]
    spent, requests = cpu_s(processes) - before - idle_s, sum(one.requests for one in seen)
    per_s = sum(one.requests / one.seconds for one in seen)
    cpu = {"cpu_us": spent / max(1, requests) * 1e6, "idle_ms_per_s": idle_s / CLOSED_S * 1000}
    return {"requests_per_s": per_s, **cpu, "errors": sum(one.errors for one in seen)}


PARTS: dict[str, Callable[[argparse.Namespace], None]] = {
    "simulated": lambda options: simulate(options.rounds),
    "reports": lambda options: measure_reports(options.rounds),
    "real": lambda options: measure_real(options.rounds, options.rate),
    "cpu": lambda options: measure_cpu(options.rounds),
}


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=REAL_RATE, help="of the part `real`, a second")
    options = parser.parse_args()
    for part in options.parts.split(","):
        PARTS[part](options)
