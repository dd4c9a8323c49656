"""Latency by routing rule with one slow cell, with real HAProxy and `sim` cells.

It confirms what `routing` simulates. Ours is the ingress as it is; the other rules are HAProxy's, in a configuration
of this bench without limits or a queue, so that only the rule differs.

    .venv/bin/python -m bench real_routing [--rate 25] [--seconds 60] [--rounds 1] [--only ours]
"""

import argparse
import contextlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import uvloop

from bench import RESULTS, note, percentile
from bench.traffic import contenders
from bench.traffic.arrivals import Arrival, heavy_tailed
from bench.traffic.contenders import MODEL
from bench.traffic.sim_cells import Seen, ask, body_of, play, sim_cells
from engine_agent.engines.sim.batching import ModelParameters
from engine_agent.ingress.haproxy import find_binary
from engine_agent.protocol.ingress_messages import CellEndpoint

BASE_PORT = 27500
CELLS, PLACES, SLOW_FACTOR = 8, 16, 3.0
CELL = ModelParameters(
    prefill_tokens_per_s=5000, decode_step_ms=40, decode_step_per_seq_ms=1, max_num_seqs=PLACES, prefix_block_tokens=0
)
"""Four times as slow as the simulated ones, because two cores compute all of them."""
RULES = {
    "round robin": "balance roundrobin",
    "random": "balance random(1)",
    "better of two random": "balance random(2)",
    "least outstanding": "balance leastconn",
}
OURS = "ours (least outstanding and one queue)"


@contextlib.contextmanager
def plain_haproxy(folder: Path, port: int, rule: str, cells: list[CellEndpoint]) -> Iterator[None]:
    """HAProxy with one rule and no other part of Switchyard."""
    servers = "".join(
        f"  server c{number} 127.0.0.1:{cell.port} check inter 200ms\n" for number, cell in enumerate(cells)
    )
    text = (
        "global\n  maxconn 4000\n  nbthread 2\n"
        "defaults\n  mode http\n  option http-no-delay\n  option abortonclose\n"
        "  timeout connect 1s\n  timeout client 900s\n  timeout server 900s\n"
        f"frontend in\n  bind 127.0.0.1:{port}\n  default_backend cells\n"
        f"backend cells\n  {rule}\n  option httpchk GET /healthz\n  http-reuse always\n{servers}"
    )
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / f"{port}.cfg"
    config.write_text(text, encoding="utf-8")
    with contenders.spawned((str(find_binary()), "-f", str(config)), folder / f"{port}.log"):
        yield


async def measure(port: int, arrivals: list[Arrival]) -> dict[str, Any]:
    """Send them all; the first tenth warms up and is not counted."""
    tries: list[Seen] = []

    async def one(arrival: Arrival) -> None:
        tries.append(await ask(port, body_of(arrival, MODEL, 1)))

    await play(arrivals, one)
    counted = sorted(tries, key=lambda seen: seen.began_s)[len(tries) // 10 :]
    ttft_ms = [seen.ttft_s * 1000 for seen in counted if seen.whole]
    failed = len(counted) - len(ttft_ms)
    return {
        "p50_ms": percentile(ttft_ms, 0.5),
        "p99_ms": percentile(ttft_ms, 0.99),
        "n": len(ttft_ms),
        "failed": failed,
    }


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rate", type=float, default=25.0)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", default="", help="beginnings of rules' names, with commas; all if none")
    options = parser.parse_args()
    folder = RESULTS / "runs" / "routing"
    with ExitStack() as stack:
        factors = [1.0] * (CELLS - 1) + [SLOW_FACTOR]
        cells = stack.enter_context(sim_cells(folder, BASE_PORT + 20, CELL, factors))
        ports = {OURS: BASE_PORT}
        stack.enter_context(contenders.ingress(folder / "ingress", BASE_PORT, cells))
        for number, (name, rule) in enumerate(RULES.items(), 1):
            ports[name] = BASE_PORT + number
            stack.enter_context(plain_haproxy(folder, ports[name], rule, cells))
        for port in ports.values():
            contenders.wait_until_it_answers(port)
        for turn in range(options.rounds):
            arrivals = heavy_tailed(options.rate, round(options.rate * options.seconds), seed=turn)
            for name, port in ports.items():
                if not name.startswith(tuple(options.only.split(","))):
                    continue
                measured = uvloop.run(measure(port, arrivals))
                note("real_routing", {"policy": name, "rate": options.rate, "seed": turn, **measured})
