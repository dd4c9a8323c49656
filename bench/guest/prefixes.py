"""Lines that share beginnings, in the order of the file and in the order in which a batch sends them: the same lines,
the same cell, which batch work has alone, virtual time."""

import json
import random
from dataclasses import dataclass, replace

from bench.guest.world import Counts
from engine_agent.engines.sim.batching import BatchingModel, ModelParameters, Sequence
from engine_agent.engines.sim.prefix_cache import block_hashes
from traffic.planning.batch import BatchSettings
from traffic.planning.batch_lines import LineIndex

SHARED, OWN = 1024, 300
"""Tokens of instructions that lines share, and a line's own in the mean."""
CELL = ModelParameters(kv_capacity_tokens=60_000, batch_prompt_tokens=0)
IN_FLIGHT = 64
"""All its places: nobody more urgent uses it."""


@dataclass(frozen=True)
class Ordered:
    """What an order gave: tokens of answers a second, share of prompt tokens that the cache had, time to first token
    from when a line was sent."""

    tokens_per_s: float
    cached: float
    ttft: Counts


def compared(lines: int, prefixes: int, answer: int, seed: int) -> tuple[Ordered, Ordered]:
    """The file's order, which is random, and ours. `prefixes`: different instructions; `answer`: its tokens in the
    mean."""
    chance = random.Random(seed)
    prompts = [
        [f"rule{prefix}-{word}" for word in range(SHARED)]
        + [f"own{number}-{word}" for word in range(round(OWN * chance.uniform(0.5, 1.5)))]
        for number, prefix in enumerate(chance.randrange(prefixes) for _ in range(lines))
    ]
    answers = [round(answer * chance.uniform(0.5, 1.5)) for _ in prompts]
    index = LineIndex(endpoint="/v1/completions", salt=b"bench", settings=BatchSettings(max_lines=lines))
    for number, prompt in enumerate(prompts):
        body = {"model": "sim-70b", "prompt": " ".join(prompt)}
        line = {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
        index.add(json.dumps(line).encode(), number)
    index.finish()
    return _run(prompts, answers, list(range(lines)), seed), _run(prompts, answers, index.order(), seed)


def _run(prompts: list[list[str]], answers: list[int], order: list[int], seed: int) -> Ordered:
    model = BatchingModel(replace(CELL, seed=seed))
    sent: dict[str, float] = {}
    ttft, cached, now_s, waiting = Counts(), 0, 0.0, iter(order)
    while True:
        while model.running + model.waiting < IN_FLIGHT and (number := next(waiting, None)) is not None:
            blocks = block_hashes(prompts[number], CELL.prefix_block_tokens)
            model.submit(Sequence(str(number), len(prompts[number]), answers[number], blocks=blocks))
            sent[str(number)] = now_s
        step = model.begin_step(now_s)
        if step is None:
            break
        cached += sum(step.admitted.values())
        now_s = step.ends_at_s
        for token in model.finish_step():
            if token.index == 0:
                ttft.add(now_s - sent[token.sequence])
    return Ordered(sum(answers) / now_s, cached / sum(map(len, prompts)), ttft)
