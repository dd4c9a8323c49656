"""What arrives: requests of the recorded traces, and made ones with heavy tails. Pure, but for reading the files.

Every list is sorted by time and, for made ones, follows from its seed alone."""

import csv
import json
import lzma
import math
import random
from collections import OrderedDict
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import groupby

from bench import ROOT

TRACES = ROOT / "models_registry" / "traces"
MOONCAKE_BLOCK_TOKENS = 512
MOONCAKE_TICK_S = 3.0
"""The trace's timestamps are whole ticks; the requests of one are spread evenly over it."""


@dataclass(frozen=True)
class Arrival:
    """One request. `key` says what it should be kept together with; `blocks` are hashes of its prompt's full blocks."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    key: str = ""
    blocks: tuple[int, ...] = ()


def mooncake() -> list[Arrival]:
    """The Mooncake conversation trace; a request's key is its first block behind the system prompt that all share."""
    with lzma.open(TRACES / "mooncake_conversation.jsonl.xz", "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    arrivals = []
    for timestamp_ms, tick in groupby(rows, key=lambda row: int(row["timestamp"])):
        together = list(tick)
        for index, row in enumerate(together):
            at_s = timestamp_ms / 1000 + MOONCAKE_TICK_S * index / len(together)
            ids = row["hash_ids"]
            full = tuple(ids[: row["input_length"] // MOONCAKE_BLOCK_TOKENS])
            arrivals.append(
                Arrival(at_s, row["input_length"], row["output_length"], f"b{ids[min(1, len(ids) - 1)]}", full)
            )
    return sorted(arrivals, key=lambda arrival: arrival.at_s)


def azure() -> list[Arrival]:
    """The Azure conversation trace of 2023. It has no prefixes, so every request has its own key."""
    with lzma.open(TRACES / "azure_llm_2023_conv.csv.xz", "rt", encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines))
    began = datetime.fromisoformat(rows[0]["TIMESTAMP"][:26])
    return [
        Arrival(
            (datetime.fromisoformat(row["TIMESTAMP"][:26]) - began).total_seconds(),
            max(1, int(row["ContextTokens"])),
            max(1, int(row["GeneratedTokens"])),
            f"r{index}",
        )
        for index, row in enumerate(rows)
    ]


def heavy_tailed(rate: float, count: int, seed: int) -> list[Arrival]:
    """Poisson arrivals, `rate` a second, of short prompts and answers whose lengths are log-normal with a heavy tail.

    Prompts: median 100 tokens, sigma 1. Answers: median 32 tokens, sigma 1.2, mean 66; 1 % are longer than 520."""
    chance = random.Random(seed)
    at_s = 0.0
    arrivals = []
    for index in range(count):
        at_s += chance.expovariate(rate)
        prompt = min(4000, max(1, round(chance.lognormvariate(math.log(100), 1.0))))
        output = min(2000, max(1, round(chance.lognormvariate(math.log(32), 1.2))))
        arrivals.append(Arrival(at_s, prompt, output, f"r{index}"))
    return arrivals


def faster(arrivals: list[Arrival], factor: float) -> list[Arrival]:
    return [replace(arrival, at_s=arrival.at_s / factor) for arrival in arrivals]


def lru_hit_rate(arrivals: list[Arrival], cache_tokens: int) -> float:
    """Returns the share of prompt tokens that one cell with a cache of this size would find if requests took no time.
    It evicts the least recently used block, the end of a prompt before its beginning. Cells that evict like this find
    no more together, except by chance."""
    known: OrderedDict[int, None] = OrderedDict()
    found = 0
    for arrival in arrivals:
        most = (arrival.prompt_tokens - 1) // MOONCAKE_BLOCK_TOKENS
        here = arrival.blocks[:most]
        found += next((at for at, block in enumerate(here) if block not in known), len(here)) * MOONCAKE_BLOCK_TOKENS
        for block in reversed(arrival.blocks):
            known[block] = None
            known.move_to_end(block)
        while len(known) * MOONCAKE_BLOCK_TOKENS > cache_tokens:
            known.popitem(last=False)
    return found / sum(arrival.prompt_tokens for arrival in arrivals)


def best_hit_rate(arrivals: list[Arrival]) -> float:
    """Returns the share of prompt tokens that one cell with an unlimited cache would find if requests took no time."""
    known: set[int] = set()
    found = 0
    for arrival in arrivals:
        most = (arrival.prompt_tokens - 1) // MOONCAKE_BLOCK_TOKENS
        leading = next(
            (n for n, block in enumerate(arrival.blocks[:most]) if block not in known), min(most, len(arrival.blocks))
        )
        found += leading * MOONCAKE_BLOCK_TOKENS
        known.update(arrival.blocks)
    return found / sum(arrival.prompt_tokens for arrival in arrivals)
