"""Draws the requests of a workload: when each is due, how long it is, and the bytes that are sent. The same workload,
seed and rate give the same requests. It sends nothing."""

import csv
import json
import lzma
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path

import msgspec

from models_registry.planning.workload import TRACES, Arrival, InvalidWorkload, Prompts, Workload

FOLDER = Path(__file__).resolve().parents[1] / "traces"
BLOCK_TOKENS = 512
FIRST_ID, IDS = 1000, 8000
"""Token ids that every tokenizer of a language model has, behind its special ones."""
STATISTICS_OVER = 2000
STRETCH = 200
"""Requests within which Poisson arrivals have exactly their rate: as many as a point has at least."""


@dataclass(frozen=True, slots=True)
class Request:
    """`due_s` counts from the beginning; `blocks` are names of what its prompt begins with, `block_tokens` each."""

    due_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[str, ...] = ()
    block_tokens: int = 0


def requests(workload: Workload, rate: float, seed: int) -> Iterator[Request]:
    """Requests in the order in which they are due, without an end; a trace begins anew.

    Raises:
        InvalidWorkload: the trace is not on this host.
    """
    chance = random.Random(f"{seed} {workload.digest}")
    due_s = 0.0
    for shape, gap in _shapes(workload, chance):
        due_s += gap / rate
        yield Request(due_s, shape.prompt_tokens, shape.output_tokens, shape.blocks, shape.block_tokens)


def body_of(request: Request, model: str, workload: Workload, own: str) -> bytes:
    """The completion that is asked for. Equal blocks give equal text; the rest follows from `own`, which no other
    request to this engine may have: a cache that knows a prompt of an earlier point would not read it again."""
    pieces = [(block, request.block_tokens) for block in request.blocks]
    pieces.append((own, request.prompt_tokens - request.block_tokens * len(request.blocks)))
    ids = [id_ for name, tokens in pieces if tokens > 0 for id_ in _ids(name, tokens)]
    prompt = ids if workload.prompts is Prompts.IDS else " ".join(f"w{id_ % 1000}" for id_ in ids)
    return json.dumps(
        {
            "model": model,
            "prompt": prompt,
            "max_tokens": request.output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if workload.prompts is Prompts.IDS else {}),
        },
        separators=(",", ":"),
    ).encode()


def prefix_statistics(workload: Workload, seed: int) -> dict[str, float]:
    """Of the first requests: mean lengths, and the share of prompt tokens in beginnings that had come before."""
    known: set[tuple[str, ...]] = set()
    prompt = output = repeated = 0
    drawn = requests(workload, 1.0, seed)
    for _ in range(STATISTICS_OVER):
        request = next(drawn)
        prompt, output = prompt + request.prompt_tokens, output + request.output_tokens
        for number in range(1, len(request.blocks) + 1):
            beginning = request.blocks[:number]
            repeated += request.block_tokens if beginning in known else 0
            known.add(beginning)
    return {
        "requests": STATISTICS_OVER,
        "prompt_tokens_mean": round(prompt / STATISTICS_OVER, 1),
        "output_tokens_mean": round(output / STATISTICS_OVER, 1),
        "repeated_share": round(repeated / prompt, 4),
    }


def _shapes(workload: Workload, chance: random.Random) -> Iterator[tuple[Request, float]]:
    """Lengths, and the gap before each in units of the mean gap."""
    recorded = _trace(workload) if workload.source in TRACES else ()
    gaps = arrival_gaps(workload.arrival, random.Random(chance.random()))
    for number, gap in enumerate(gaps):
        if recorded:
            shape, recorded_gap = recorded[number % len(recorded)]
            yield shape, recorded_gap if workload.arrival is Arrival.TRACE else gap
        else:
            yield _made(workload, chance), gap


def arrival_gaps(arrival: Arrival, chance: random.Random) -> Iterator[float]:
    """Gaps between requests in units of the mean gap, without an end; of a trace, which brings its own, all alike.

    Poisson arrivals come in stretches that have the rate that is asked for, as those of `vllm bench serve` do: of 200
    requests alone the rate would be off by 7 %, and with it whatever is found.
    """
    while True:
        if arrival is not Arrival.POISSON:
            yield 1.0
            continue
        drawn = [chance.expovariate(1.0) for _ in range(STRETCH)]
        mean = sum(drawn) / STRETCH
        yield from (gap / mean for gap in drawn)


def _made(workload: Workload, chance: random.Random) -> Request:
    prompt, output = (
        max(1, round(chance.lognormvariate(math.log(median), workload.sigma))) if workload.sigma else median
        for median in (workload.prompt, workload.output)
    )
    prompt = min(max(prompt, workload.prefix + 1), max(workload.longest, workload.prompt))
    output = min(output, max(workload.longest, workload.output))
    blocks = (f"group {chance.randrange(workload.groups)}",) if workload.prefix else ()
    return Request(0.0, prompt, output, blocks, workload.prefix)


@cache
def _trace(workload: Workload) -> Sequence[tuple[Request, float]]:
    path = FOLDER / TRACES[workload.source]
    try:
        rows = _mooncake(path) if workload.source == "mooncake" else _azure(path)
    except OSError:
        raise InvalidWorkload(f"the trace {path.name} is not on this host; it comes with the sources") from None
    fitting = [row for row in rows if row.prompt_tokens + row.output_tokens <= workload.longest]
    if len(fitting) < 2:
        raise InvalidWorkload(f"no request of {workload.source} has at most {workload.longest} tokens")
    mean_gap_s = (fitting[-1].due_s - fitting[0].due_s) / (len(fitting) - 1)
    before = [fitting[0], *fitting[:-1]]
    return tuple((row, (row.due_s - last.due_s) / mean_gap_s) for row, last in zip(fitting, before, strict=True))


def _mooncake(path: Path) -> list[Request]:
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        rows = [msgspec.json.decode(line) for line in lines]
    return [
        Request(
            row["timestamp"] / 1000,
            row["input_length"],
            row["output_length"],
            tuple(f"block {id_}" for id_ in row["hash_ids"][: row["input_length"] // BLOCK_TOKENS]),
            BLOCK_TOKENS,
        )
        for row in sorted(rows, key=lambda row: int(row["timestamp"]))
    ]


def _azure(path: Path) -> list[Request]:
    with lzma.open(path, "rt", encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines))
    began = datetime.fromisoformat(rows[0]["TIMESTAMP"][:26])
    return [
        Request(
            (datetime.fromisoformat(row["TIMESTAMP"][:26]) - began).total_seconds(),
            max(1, int(row["ContextTokens"])),
            max(1, int(row["GeneratedTokens"])),
        )
        for row in rows
    ]


def _ids(name: str, tokens: int) -> list[int]:
    drawn = memoryview(random.Random(name).randbytes(2 * tokens)).cast("H")
    return [FIRST_ID + number % IDS for number in drawn]
