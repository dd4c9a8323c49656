"""Goodput during, and recovery time after, twice the load from clients that retry.

Real `sim` cells behind a real ingress.

    .venv/bin/python -m bench retry_storm [--storm-s 60] [--retries 5] [--patience-s 5]
"""

import argparse
import asyncio
import random
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import uvloop

from bench import RESULTS, note, percentile
from bench.traffic import contenders
from bench.traffic.arrivals import Arrival
from bench.traffic.sim_cells import Seen, ask, body_of, play, sim_cells
from engine_agent.engines.sim.batching import ModelParameters

BASE_PORT = 27400
CELLS, PLACES = 4, 16
CELL = ModelParameters(
    prefill_tokens_per_s=20_000, decode_step_ms=40, decode_step_per_seq_ms=0, max_num_seqs=PLACES, prefix_block_tokens=0
)
PROMPT_TOKENS, ANSWER_TOKENS = 20, 16
CALM = 0.7
"""Of the capacity, before and after."""
CALM_BEFORE_S, CALM_AFTER_S = 20.0, 90.0
FIRST_BACKOFF_S, MOST_BACKOFF_S = 0.5, 8.0
"""As OpenAI's client waits before it tries again; a Retry-After counts more."""
WINDOW_S = 5.0


@dataclass
class Story:
    """One request with all its tries; it succeeded if the last one is whole."""

    began_s: float
    tries: list[Seen] = field(default_factory=list)


@dataclass
class Clients:
    """They leave when no token came within `patience_s`, and try `retries` times more with growing pauses."""

    port: int
    retries: int
    patience_s: float
    stories: list[Story] = field(default_factory=list)
    chance: random.Random = field(default_factory=lambda: random.Random(1))

    async def one(self, arrival: Arrival) -> None:
        story = Story(monotonic())
        self.stories.append(story)
        body = body_of(arrival, contenders.MODEL, 1)
        for attempt in range(self.retries + 1):
            seen = await ask(self.port, body, self.patience_s)
            story.tries.append(seen)
            if seen.whole or attempt == self.retries:
                return
            backoff_s = min(MOST_BACKOFF_S, FIRST_BACKOFF_S * 2**attempt) * (1 - 0.25 * self.chance.random())
            await asyncio.sleep(seen.retry_after_s or backoff_s)


def arrivals(capacity: float, storm_s: float, load: float) -> list[Arrival]:
    chance = random.Random(7)
    at_s = 0.0
    found: list[Arrival] = []
    for lasts_s, share in ((CALM_BEFORE_S, CALM), (storm_s, load), (CALM_AFTER_S, CALM)):
        ends_s = at_s + lasts_s
        while (at_s := at_s + chance.expovariate(capacity * share)) < ends_s:
            found.append(Arrival(at_s, PROMPT_TOKENS, ANSWER_TOKENS, f"r{len(found)}"))
        at_s = ends_s
    return found


async def capacity_of(port: int, seconds: float) -> float:
    """Answers a second with one client for every place: the most that these cells give on this machine."""
    body = body_of(Arrival(0, PROMPT_TOKENS, ANSWER_TOKENS, "x"), contenders.MODEL, 1)
    ends_s = monotonic() + seconds
    done = 0

    async def client() -> None:
        nonlocal done
        while monotonic() < ends_s:
            seen = await ask(port, body)
            done += seen.whole and seen.ended_s <= ends_s

    await asyncio.gather(*(client() for _ in range(CELLS * PLACES)))
    return done / seconds


def windows(stories: Sequence[Story], began_s: float, lasted_s: float) -> list[dict[str, Any]]:
    """By 5 s of the run: new requests, tries, whole answers, and their time to first token within that try."""
    rows = []
    for start in range(0, int(lasted_s), int(WINDOW_S)):
        low, high = began_s + start, began_s + start + WINDOW_S
        tries = [seen for story in stories for seen in story.tries]
        ended = [seen for seen in tries if low <= seen.ended_s < high]
        ttft_ms = [seen.ttft_s * 1000 for seen in ended if seen.whole]
        refused = sum(seen.status not in {0, 200} for seen in ended)
        rows.append(
            {
                "at_s": start,
                "new": sum(low <= story.began_s < high for story in stories) / WINDOW_S,
                "tries": sum(low <= seen.began_s < high for seen in tries) / WINDOW_S,
                "goodput": len(ttft_ms) / WINDOW_S,
                "refused": refused / WINDOW_S,
                "gave_up": (len(ended) - len(ttft_ms) - refused) / WINDOW_S,
                "ttft_p50_ms": percentile(ttft_ms, 0.5) if ttft_ms else None,
                "ttft_p99_ms": percentile(ttft_ms, 0.99) if ttft_ms else None,
            }
        )
    return rows


def verdict(rows: Sequence[dict[str, Any]], capacity: float, storm_s: float) -> dict[str, Any]:
    """Returns goodput during the storm divided by the capacity, and the seconds after it until the last degraded
    window.

    A window is degraded if a request was refused or given up, or if its p99 exceeds twice that before the storm plus
    one step."""
    ends = CALM_BEFORE_S + storm_s
    storm = [row["goodput"] for row in rows if CALM_BEFORE_S + WINDOW_S <= row["at_s"] < ends]
    before_ms = [row["ttft_p99_ms"] for row in rows if WINDOW_S <= row["at_s"] < CALM_BEFORE_S]
    limit_ms = 2 * sorted(before_ms)[len(before_ms) // 2] + CELL.decode_step_ms
    unlike = [
        row["at_s"] + WINDOW_S - ends
        for row in rows
        if row["at_s"] >= ends
        and (row["refused"] or row["gave_up"] or not row["ttft_p99_ms"] or row["ttft_p99_ms"] > limit_ms)
    ]
    return {
        "capacity": capacity,
        "goodput_share": sum(storm) / len(storm) / capacity,
        "back_after_s": max(unlike, default=0.0),
    }


async def storm(port: int, options: argparse.Namespace) -> dict[str, Any]:
    capacity = await capacity_of(port, 10.0)
    coming = arrivals(capacity, options.storm_s, options.load)
    clients = Clients(port, options.retries, options.patience_s)
    began_s = monotonic()
    await play(coming, clients.one)
    rows = windows(clients.stories, began_s, CALM_BEFORE_S + options.storm_s + CALM_AFTER_S)
    succeeded = sum(story.tries[-1].whole for story in clients.stories) / len(clients.stories)
    tries = sum(len(story.tries) for story in clients.stories) / len(clients.stories)
    settings = {
        "storm_s": options.storm_s,
        "load": options.load,
        "retries": options.retries,
        "patience_s": options.patience_s,
    }
    found = {"succeeded": succeeded, "tries_per_request": tries, "label": options.label, "windows": rows}
    return {**settings, **verdict(rows, capacity, options.storm_s), **found}


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--storm-s", type=float, default=60.0)
    parser.add_argument("--load", type=float, default=2.0)
    parser.add_argument("--retries", type=int, default=5)
    parser.add_argument("--patience-s", type=float, default=5.0)
    parser.add_argument("--label", default="")
    options = parser.parse_args()
    folder = RESULTS / "runs" / "storm"
    with ExitStack() as stack:
        cells = stack.enter_context(sim_cells(folder, BASE_PORT + 20, CELL, [1.0] * CELLS))
        stack.enter_context(contenders.ingress(folder / "ingress", BASE_PORT, cells))
        contenders.wait_until_it_answers(BASE_PORT)
        found = uvloop.run(storm(BASE_PORT, options))
    note("retry_storm", found)
