"""Chains on a running fleet: a planner's answer and the first token after it, from traces and by the client.

Each request of the load is a chain: the client calls the planner, waits as long as an application would, and streams an
answer of the deployment, all with one `traceparent`. The objective is over both. The figures of a round come from the
sampled requests that share a trace (`fleet.chains.planner`), next to what the client itself measured.

    .venv/bin/python -m bench chains --rounds 3

Needs a fleet from `make up` (same SWITCHYARD_HOME). The planner gets a cell in each region of the deployment while the
bench runs; cells and chain are restored afterwards."""

import argparse
import asyncio
import json
import secrets
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import httpx

from bench import note, percentile, table
from bench.fleet.live_fleet import Fleet, Row, wait_for
from fleet.chains.planner import Chain, ChainedRequest, LinkedRequest, chain_figures, join_by_trace

READY_LIMIT_S = 180.0
SETTLED_S = 40.0
"""Samples of a window arrive up to half a minute after its end. A round is complete if none came for so long."""
SAMPLES_LIMIT_S = 180.0
REQUEST_LIMIT_S = 60.0
LINKED = "linked"
QUERY = "Rewrite as a search query: which running shoes suit wet pavement and wide feet?"
PARTS = ("planner", "application", "deployment", "sum")


@dataclass(frozen=True, slots=True)
class Seen:
    """A chain as its client saw it: from the first request to the end of the planner's answer, and to the first token
    of the deployment's."""

    trace: str
    planner_ms: float
    sum_ms: float


def body(model: str, max_tokens: int, *, stream: bool) -> Row:
    return {
        "model": model,
        "messages": [{"role": "user", "content": QUERY}],
        "max_tokens": max_tokens,
        "stream": stream,
    }


async def one_chain(client: httpx.AsyncClient, url: str, options: argparse.Namespace) -> Seen:
    """Raises httpx.HTTPError if either request fails."""
    trace = secrets.token_hex(16)
    headers = {"traceparent": f"00-{trace}-{secrets.token_hex(8)}-01"}
    began = time.monotonic()
    planner = body(options.planner, options.planner_tokens, stream=False)
    (await client.post(url, json=planner, headers=headers)).raise_for_status()
    planner_ms = 1000 * (time.monotonic() - began)
    await asyncio.sleep(options.application_ms / 1000)
    asked = body(options.deployment, options.tokens, stream=True)
    async with client.stream("POST", url, json=asked, headers=headers) as answer:
        answer.raise_for_status()
        first_at = 0.0
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                first_at = first_at or time.monotonic()
    return Seen(trace, planner_ms, 1000 * (first_at - began))


async def send_chains(url: str, options: argparse.Namespace) -> tuple[list[Seen], int]:
    """Returns the chains of a round, and how many failed."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=REQUEST_LIMIT_S, limits=limits) as client:
        running = []
        for _ in range(int(options.seconds * options.rate)):
            running.append(asyncio.create_task(one_chain(client, url, options)))
            await asyncio.sleep(1 / options.rate)
        ended = await asyncio.gather(*running, return_exceptions=True)
    for each in ended:
        if isinstance(each, BaseException) and not isinstance(each, httpx.HTTPError):
            raise each
    seen = [each for each in ended if isinstance(each, Seen)]
    return seen, len(ended) - len(seen)


@contextmanager
def chained(fleet: Fleet, options: argparse.Namespace) -> Iterator[Chain]:
    """Within the block the deployment names the planner, which has cells in all its regions."""
    planner, main = options.planner, options.deployment
    cells, before = fleet.wanted(planner), fleet.get(f"deployments/{main}")["chain"]
    chain = {"planner": planner, "ttft_ms": options.objective_ms, "ttft_share": 0.99, "planner_ms": options.planner_ms}
    try:
        for region in fleet.wanted(main):
            if not cells.get(region):
                fleet.scale(planner, region, 1)
        wait_for(lambda: fleet.is_whole(planner), READY_LIMIT_S, f"every cell of {planner} is ready")
        fleet.ask("PATCH", f"deployments/{main}", {"chain": chain})
        yield Chain(planner, options.objective_ms, 0.99, options.planner_ms)
    finally:
        fleet.ask("PATCH", f"deployments/{main}", {"chain": before})
        for region in fleet.wanted(planner):
            fleet.scale(planner, region, cells.get(region, 0))


def linked(fleet: Fleet, deployment: str, since: datetime, traces: frozenset[str]) -> list[LinkedRequest]:
    rows = fleet.rows("requests", deployment=deployment, since=since.isoformat(), failed=False)
    return [
        LinkedRequest(
            at=datetime.fromisoformat(row["at"]),
            **{
                name: row[name] for name in ("request", "tenant", "trace", "cell", "ingress_ms", "first_ms", "total_ms")
            },
        )
        for row in rows
        if row["trace"] in traces
    ]


def sampled_chains(
    fleet: Fleet, options: argparse.Namespace, since: datetime, seen: Sequence[Seen]
) -> list[ChainedRequest]:
    """Returns the sampled chains of a round, once no more arrive."""
    traces = frozenset(each.trace for each in seen)
    found: list[ChainedRequest] = []
    changed_at, ends_at = time.monotonic(), time.monotonic() + SAMPLES_LIMIT_S
    while time.monotonic() < min(ends_at, changed_at + SETTLED_S):
        time.sleep(2)
        newest = join_by_trace(
            linked(fleet, options.planner, since, traces), linked(fleet, options.deployment, since, traces)
        )
        if len(newest) != len(found):
            found, changed_at = newest, time.monotonic()
    return found


def measured(chain: Chain, found: Sequence[ChainedRequest], seen: Sequence[Seen], failed: int) -> dict[str, Any]:
    """The figures of a round. `off_ms`: how far the sum of a sampled chain is from what its client measured."""
    figures = chain_figures(chain, found)
    sums = {each.trace: each.sum_ms for each in seen}
    off_ms = [abs(each.sum_ms - sums[each.request.trace]) for each in found]
    parts = {each.name: [round(each.p50_ms), round(each.p99_ms)] for each in figures.parts}
    return {
        "chains": len(seen),
        "failed": failed,
        "sampled": figures.count,
        **parts,
        "client": [round(percentile(list(sums.values()), share)) for share in (0.5, 0.99)],
        "late_percent": figures.late_percent,
        "planner_late_percent": figures.planner_late_percent,
        "off_ms": round(statistics.median(off_ms), 1) if off_ms else None,
    }


def report(chain: Chain, rounds: Sequence[dict[str, Any]]) -> str:
    """Medians of the rounds with the least and the greatest."""

    def cell(name: str, index: int) -> str:
        values = [each[name][index] for each in rounds if each.get(name)]
        return f"{statistics.median(values):.0f} ({min(values):.0f} to {max(values):.0f})" if values else "-"

    objectives = {"planner": f"{chain.planner_ms:.0f}", "sum": f"{chain.ttft_ms:.0f}"}
    names = {**{part: part for part in PARTS}, "client": "sum by the client"}
    lines = [[text, cell(name, 0), cell(name, 1), objectives.get(name, "")] for name, text in names.items()]
    return table(["ms", "p50", "p99", "objective"], lines)


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--planner", default="smollm2", help="deployment that answers first (default: %(default)s)")
    parser.add_argument("--deployment", default="sim-70b", help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=200.0, help="of each round (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=2.0, help="chains a second (default: %(default)s)")
    parser.add_argument("--planner-tokens", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--application-ms", type=float, default=20.0, help="between both requests")
    parser.add_argument("--objective-ms", type=float, default=1000.0)
    parser.add_argument("--planner-ms", type=float, default=300.0)
    options = parser.parse_args()
    fleet = Fleet()
    url = f"{fleet.ingresses(options.deployment)[0]}/v1/chat/completions"
    rounds = []
    with chained(fleet, options) as chain:
        for _ in range(options.rounds):
            since = datetime.now(UTC)
            seen, failed = asyncio.run(send_chains(url, options))
            if not seen:
                raise SystemExit(f"none of {failed} chains was answered")
            rounds.append(measured(chain, sampled_chains(fleet, options, since, seen), seen, failed))
            note("chains", rounds[-1])
        print(json.dumps(fleet.get(f"deployments/{options.deployment}/chain")["burn"]))
    print(report(chain, rounds))
