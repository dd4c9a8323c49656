"""Streams while cells are killed or drain: cut, lost or repeated tokens, pauses, and the cost of the relay.

Greedy streams run over cells of `sim` or of vLLM, HAProxy and the relays. Every few seconds one cell's engine gets
SIGKILL and is started again, as its agent does; the next one is killed once it is back. Each answer is compared with
that of an undisturbed run, and the tokens that the cells counted with those that the clients got.

    .venv/bin/python -m bench continuation [--streams 1000] [--every 10] [--dialect chat …] [--without]
    .venv/bin/python -m bench continuation --engine vllm [--streams 300]
    .venv/bin/python -m bench continuation --drain 100
    .venv/bin/python -m bench continuation --power-off 3 --rate 5
    .venv/bin/python -m bench continuation --cost 3
    .venv/bin/python -m bench continuation --rollout      # needs a fleet of `make up DETACH=1 ENGINE=sim`
"""

import argparse
import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from time import monotonic
from typing import Any

import httpx
import uvloop

from bench import RESULTS, cpu_s, note, percentile
from bench.traffic import killable_cells, powerless_hosts
from bench.traffic.continued_rollout import rollouts
from bench.traffic.killable_cells import Fleet
from bench.traffic.stream_reader import DIALECTS, Seen, StreamReader

TOKENS = 200
PROMPTS = 8
DRAIN_STEP_MS = 100.0
ROLLOUT_TOKENS = 20


@contextlib.asynccontextmanager
async def killing(fleet: Fleet, every_s: float) -> AsyncIterator[list[str]]:
    """Kills the cells in turn, one every few seconds, and not before the last one is back."""
    killed: list[str] = []

    async def kill() -> None:
        async with httpx.AsyncClient() as http:
            while True:
                for cell in fleet.cells:
                    await asyncio.sleep(every_s)
                    await asyncio.to_thread(cell.kill)
                    killed.append(cell.name)
                    await cell.is_up(http)

    task = asyncio.create_task(kill())
    try:
        yield killed
    finally:
        task.cancel()
        await asyncio.wait([task])


async def measure(
    fleet: Fleet, name: str, streams: int, at_once: int, every_s: float, tokens: int = TOKENS
) -> dict[str, Any]:
    """All streams of a dialect, undisturbed and then with kills."""
    reader = StreamReader(name, tokens)
    async with httpx.AsyncClient() as http:
        for cell in fleet.cells:  # one may have been killed at the end of the last dialect
            await cell.is_up(http)
    undisturbed = await asyncio.gather(*(reader.read(fleet.port, number) for number in range(PROMPTS)))
    expected = [parse() for parse in undisturbed]
    if any(seen.is_cut for seen in expected):
        raise SystemExit(f"undisturbed streams failed: {[(seen.error, len(seen.events)) for seen in expected]}")
    before, counts, cpu = await fleet.counted(), await fleet.relay_counts(), cpu_s(fleet.relays())
    places = asyncio.Semaphore(at_once)

    async def one(number: int) -> Any:
        async with places:
            return await reader.read(fleet.port, number % PROMPTS)

    began = monotonic()
    async with killing(fleet, every_s) as killed:
        read = await asyncio.gather(*(one(number) for number in range(streams)))
    took_s = monotonic() - began
    after = await fleet.counted()
    cpu, counts = cpu_s(fleet.relays()) - cpu, (await fleet.relay_counts()) - counts
    seen = [parse() for parse in read]
    continued = sum(count for reason, count in counts.items() if reason.startswith("continued"))
    pauses = sorted((each.longest_pause_s for each in seen), reverse=True)[: max(1, continued)]
    return {
        "dialect": name,
        "streams": streams,
        "kills": len(killed),
        "continued": continued,
        **compared(seen, expected),
        "tokens_of_clients": [sum(each.usage[part] for each in seen if each.ended) for part in (0, 1)],
        "tokens_counted": [after[part] - before[part] for part in (0, 1)],
        "pause_p50_s": round(percentile(pauses, 0.5), 3),
        "pause_p99_s": round(percentile(pauses, 0.99), 3),
        "relay_cpu_us_per_event": round(1e6 * cpu / max(1, sum(len(each.events) for each in seen)), 1),
        "counts": dict(counts),
        "seconds": round(took_s, 1),
    }


def compared(seen: list[Seen], expected: list[Seen]) -> dict[str, Any]:
    """The streams in the order of their prompts, with what they would be undisturbed."""
    pairs = [(expected[number % len(expected)], each) for number, each in enumerate(seen)]
    return {
        "cut": sum(each.is_cut for each in seen),
        "errors": dict(Counter(each.error for each in seen if each.error)),
        "texts_that_differ": sum(want.text != got.text for want, got in pairs),
        "events_that_differ": sum(want.events != got.events for want, got in pairs),
        "usages_that_differ": sum(want.usage != got.usage for want, got in pairs),
    }


async def drain(fleet: Fleet, streams: int, tokens: int = TOKENS, after_s: float = 10.0) -> dict[str, Any]:
    """Long streams at all cells, one of which drains after a while: how long until it is empty, and what its streams
    lose."""
    reader, cell = StreamReader("chat", tokens), fleet.cells[0]
    async with httpx.AsyncClient(timeout=120) as http:
        expected = (await reader.read(fleet.port, 0))()
        before = await fleet.counted()
        tasks = [asyncio.create_task(reader.read(fleet.port, 0)) for _ in range(streams * len(fleet.cells))]
        await cell.holds(http, lambda held: held >= streams * 0.8)
        await asyncio.sleep(after_s)
        began, used = monotonic(), cpu_by_part(fleet)
        held = (await cell.ask(http, "/phase", {"phase": "drain"}))["in_flight"]
        await cell.holds(http, lambda held: held == 0)
        empty_s = monotonic() - began
        used = {part: round(spent - used[part], 2) for part, spent in cpu_by_part(fleet).items()}
        seen = [parse() for parse in await asyncio.gather(*tasks)]
        await cell.ask(http, "/phase", {"phase": "serve"})
    after = await fleet.counted()
    return {
        "streams_of_the_cell": held,
        "empty_after_s": round(empty_s, 2),
        **compared(seen, [expected]),
        "tokens_of_clients": [sum(each.usage[part] for each in seen) for part in (0, 1)],
        "tokens_counted": [after[part] - before[part] for part in (0, 1)],
        "pause_p99_s": round(percentile([each.longest_pause_s for each in seen], 0.99), 3),
        "cpu_s": used,
        "counts": dict(await fleet.relay_counts()),
    }


def cpu_by_part(fleet: Fleet) -> Mapping[str, float]:
    return {part: cpu_s(processes) for part, processes in fleet.processes().items()}


async def cost(fleet: Fleet, rounds: int) -> dict[str, Any]:
    """CPU time of the relays per request and per event, from requests of one token and of many; and the memory that a
    stream takes while it runs."""
    limits = httpx.Limits(max_connections=None)
    per_request, per_event = [], []
    async with httpx.AsyncClient(timeout=120, limits=limits) as http:

        async def run(streams: int, tokens: int) -> tuple[float, int]:
            before = cpu_s(fleet.relays())
            body = DIALECTS["chat"].request(0, tokens)
            url = f"http://127.0.0.1:{fleet.port}/v1/chat/completions"
            answers = await asyncio.gather(*(http.post(url, json=body) for _ in range(streams)))
            return 1e6 * (cpu_s(fleet.relays()) - before), sum(each.text.count("data: ") for each in answers)

        for _ in range(rounds):
            short_us, few = await run(200, 1)
            long_us, many = await run(100, TOKENS)
            each = (long_us - short_us / 2) / (many - few / 2)
            per_event.append(round(each, 1))
            per_request.append(round((short_us - few * each) / 200, 1))
        before, held = sum(each.memory_info().rss for each in fleet.relays()), 300
        body = DIALECTS["chat"].request(0, 1000)
        url = f"http://127.0.0.1:{fleet.port}/v1/chat/completions"
        tasks = [asyncio.create_task(http.post(url, json=body)) for _ in range(held)]
        await asyncio.sleep(10)
        open_now = (await fleet.relay_counts())["open"]
        grown = sum(each.memory_info().rss for each in fleet.relays()) - before
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    return {
        "cpu_us_per_request": spread(per_request),
        "cpu_us_per_event": spread(per_event),
        "kib_per_stream": round(grown / 1024 / max(1, open_now), 1),
        "streams_held": open_now,
    }


def spread(values: list[float]) -> str:
    """The median, with the least and the greatest."""
    return f"{percentile(values, 0.5)} ({min(values)}-{max(values)})"


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engine", choices=("sim", "vllm"), default="sim")
    parser.add_argument("--streams", type=int, default=1000, help="of each dialect")
    parser.add_argument("--at-once", type=int, help="default: 100, with vLLM 16")
    parser.add_argument("--tokens", type=int, help="of a stream; default: 200, with vLLM 64")
    parser.add_argument("--cells", type=int, help="default: 3, with vLLM 2")
    parser.add_argument("--every", type=float, default=10.0, help="seconds between two kills")
    parser.add_argument("--dialect", action="append", choices=list(DIALECTS), help="default: all")
    parser.add_argument("--cost", type=int, default=0, metavar="ROUNDS", help="measure the relay instead")
    parser.add_argument("--drain", type=int, default=0, metavar="STREAMS", help="drain a cell with so many instead")
    parser.add_argument(
        "--power-off", type=int, default=0, metavar="ROUNDS", help="hosts of cells lose power in a laboratory instead"
    )
    parser.add_argument("--rollout", action="store_true", help="roll out on a running fleet instead, before and after")
    parser.add_argument("--rate", type=float, default=20.0, help="streams a second of --rollout and --power-off")
    parser.add_argument("--rounds", type=int, default=3, help="of the rollouts")
    parser.add_argument("--without", action="store_true", help="without continuation")
    options = parser.parse_args()
    if options.rollout:
        rollouts(options.rate, options.tokens or ROLLOUT_TOKENS, options.rounds)
        return
    if options.power_off:
        for row in powerless_hosts.rounds(options.power_off, options.rate, options.tokens or TOKENS):
            note("continuation", row)
        return
    folder: Path = RESULTS / "runs" / "continuation"
    of_sim = options.engine == "sim"
    if of_sim:
        program = killable_cells.sim(DRAIN_STEP_MS) if options.drain else killable_cells.sim()
    else:
        program = killable_cells.vllm(folder / "model")
    tokens = options.tokens or (TOKENS if of_sim else 64)
    at_once = options.at_once or (100 if of_sim else 16)
    cells = options.cells or (3 if of_sim else 2)
    with killable_cells.fleet(folder, program, cells=cells, continues=not options.without) as running:
        if options.drain:
            note("continuation", {"drain": options.drain, **uvloop.run(drain(running, options.drain, tokens))})
            return
        if options.cost:
            note("continuation", uvloop.run(cost(running, options.cost)))
            return
        for name in options.dialect or DIALECTS:
            row = uvloop.run(measure(running, name, options.streams, at_once, options.every, tokens))
            note("continuation", {"engine": options.engine, "continuation": not options.without, **row})
