"""How many requests a second cells carry within the limits of first tokens and of gaps between tokens, told apart by
role or all mixed. Pure; `fleet.planning.roles.ratio` decides by it.

A step of n sequences that also reads p prompt tokens takes a + b n + c p (`models_registry.planning.step_model`). A
prefill cell with chunks of C tokens so reads C / (a + c C) tokens a second; a decode cell whose steps may take `itl_s`
runs n = (itl_s - a) / b sequences at once and makes n / (a + b n) tokens. Requests of U uncached prompt tokens and O
tokens of answer, r a second, take

    prefill cells = r U / (prefill tokens a second x rho), decode cells = r O / (decode tokens a second x rho)

rounded up. Waiting for one of p prefill cells, for longer than w in one case of a hundred, bounds rho:
1 - rho = ln(100) S / (2 p w), S being the seconds of one prompt (M/D/1 in heavy traffic: Kingman 1962).

A mixed cell stalls every answer that it gives while it reads a prompt. That is within the objective if such a step
takes no longer than `itl_s`, or if less than `LATE_SHARE` of all gaps between tokens are such: of the O - 1 gaps of a
request that came, n others lose k each, k being the steps of its prompt, so n <= LATE_SHARE (O - 1) / k. The handover
and a step of the decode cell come before the first token, which that cell gives.

So a handover never hastens the request itself: it pays from the length on at which reading it in a step beside the n
answers that a decode cell is planned to give would keep these waiting for longer than `itl_s`, (itl_s - a - b n) / c.
"""

import math
from dataclasses import dataclass

from fleet.planning.role_split import RoleSplit

LATE_SHARE = 0.01
"""Of gaps between tokens that may be longer than the objective: it is one of the 99th percentile."""
_LN_OF_LATE = -math.log(LATE_SHARE)
PREFILL_CELLS_MOST = 1000
BLOCK_TOKENS = 16
"""Of a KV cache, which is handed over in whole ones."""


@dataclass(frozen=True, slots=True)
class RolePace:
    """What was measured of cells. Seconds of any step, for each sequence in it and for each prompt token that it reads;
    `chunk_tokens`: of prompts in a step at most; `most_at_once`: requests that a decode cell runs. `handover_s` and
    `handover_token_s`: of handing over a prompt, and for each token of it."""

    step_s: float
    sequence_s: float
    prompt_token_s: float
    chunk_tokens: int
    most_at_once: int
    handover_s: float = 0.0
    handover_token_s: float = 0.0

    @property
    def prefill_tokens_per_s(self) -> float:
        return self.chunk_tokens / (self.step_s + self.prompt_token_s * self.chunk_tokens)

    def at_once(self, itl_s: float) -> int:
        """Sequences of a step that takes no longer; 0: even one does."""
        if self.step_s + self.sequence_s > itl_s:
            return 0
        by_pace = (itl_s - self.step_s) / self.sequence_s if self.sequence_s > 0 else math.inf
        return int(min(by_pace, self.most_at_once))

    def decode_tokens_per_s(self, itl_s: float) -> float:
        n = self.at_once(itl_s)
        return n / (self.step_s + self.sequence_s * n)

    def prompt_s(self, tokens: float) -> float:
        """Of reading one prompt, with nothing else to do."""
        return math.ceil(tokens / self.chunk_tokens) * self.step_s + self.prompt_token_s * tokens


@dataclass(frozen=True, slots=True)
class RoleDemand:
    """Requests a second of a place, and means of one: prompt tokens that no cache has, and tokens of the answer.
    `expected_per_s`: of the forecast, at p90; None: there is none. `requests`: that these means are of."""

    per_s: float
    uncached_tokens: float
    output_tokens: float
    requests: int
    expected_per_s: float | None = None

    @property
    def planned_per_s(self) -> float:
        return max(self.per_s, self.expected_per_s or 0.0)


@dataclass(frozen=True, slots=True)
class RoleLimits:
    """`ttft_s` and `itl_s`: until the first token, and between two, at the 99th percentile. `utilisation`: how busy
    cells are planned to be at most. `gain`: by which part more the cells of a place must carry apart before they are
    told apart, and by which before their roles change again: each change is a restart."""

    ttft_s: float
    itl_s: float
    utilisation: float = 0.8
    gain: float = 0.2


def handover_from_tokens(pace: RolePace, limits: RoleLimits) -> int | None:
    """Uncached tokens of a prompt from which a decode cell has it read elsewhere; None: no step is too long for it, so
    it never has."""
    beside = limits.utilisation * pace.at_once(limits.itl_s)
    left_s = limits.itl_s - pace.step_s - pace.sequence_s * beside
    if left_s >= pace.prompt_token_s * pace.chunk_tokens:
        return None
    blocks = int(max(0.0, left_s) / pace.prompt_token_s) // BLOCK_TOKENS
    return max(1, blocks) * BLOCK_TOKENS


def needed_cells(pace: RolePace, demand: RoleDemand, limits: RoleLimits) -> RoleSplit:
    """The fewest cells of each role that carry the demand."""
    rate = demand.planned_per_s
    decode = max(1, math.ceil(rate * demand.output_tokens / _decode_rate(pace, demand, limits)))
    prefill = 1
    while prefill < PREFILL_CELLS_MOST and _prefill_rate(prefill, pace, demand, limits) < rate * demand.uncached_tokens:
        prefill += 1
    return RoleSplit(0, prefill, decode)


def carries(split: RoleSplit, pace: RolePace, demand: RoleDemand, limits: RoleLimits) -> float:
    """Requests a second within both limits of cells that are told apart."""
    by_prefill = _prefill_rate(split.prefill, pace, demand, limits) / max(1.0, demand.uncached_tokens)
    by_decode = split.decode * _decode_rate(pace, demand, limits) / max(1.0, demand.output_tokens)
    return min(by_prefill, by_decode)


def _prefill_rate(cells: int, pace: RolePace, demand: RoleDemand, limits: RoleLimits) -> float:
    """Prompt tokens a second that so many read, while 99 of 100 first tokens are in time."""
    prompt_s = pace.prompt_s(demand.uncached_tokens)
    wait_s = limits.ttft_s - prompt_s - handover_s(pace, demand)
    if wait_s <= 0:
        return 0.0
    by_wait = 1 - _LN_OF_LATE * prompt_s / (2 * cells * wait_s)
    return cells * pace.prefill_tokens_per_s * max(0.0, min(limits.utilisation, by_wait))


def _decode_rate(pace: RolePace, demand: RoleDemand, limits: RoleLimits) -> float:
    """Tokens a second of one decode cell, at the limit between tokens; next to nothing where no step is as short."""
    return max(1e-9, pace.decode_tokens_per_s(limits.itl_s) * limits.utilisation)


def mixed_carries(pace: RolePace, demand: RoleDemand, limits: RoleLimits) -> float:
    """Requests a second of one mixed cell within both limits."""
    gaps = max(1.0, demand.output_tokens - 1)
    prompt_s = pace.prompt_s(demand.uncached_tokens)
    if prompt_s > limits.ttft_s or pace.at_once(limits.itl_s) == 0:
        return 0.0
    work_s = pace.prompt_token_s * demand.uncached_tokens + pace.sequence_s * demand.output_tokens
    step_s = min(limits.itl_s, pace.step_s + pace.sequence_s * pace.most_at_once)
    most = limits.utilisation * (1 - pace.step_s / step_s) / work_s if work_s > 0 else math.inf
    if is_stall_short(pace, demand, limits):
        return most
    stalls = math.ceil(max(1.0, demand.uncached_tokens) / pace.chunk_tokens)
    at_once = LATE_SHARE * gaps / stalls
    return min(most, at_once / (prompt_s + gaps * (pace.step_s + pace.sequence_s)))


def is_stall_short(pace: RolePace, demand: RoleDemand, limits: RoleLimits) -> bool:
    """Whether a step that reads a prompt beside an answer takes no longer than the limit between tokens."""
    return stall_s(pace, demand) <= limits.itl_s


def stall_s(pace: RolePace, demand: RoleDemand) -> float:
    """Of a step that reads a prompt, or a chunk of it, beside one answer."""
    read = min(demand.uncached_tokens, pace.chunk_tokens)
    return pace.step_s + 2 * pace.sequence_s + pace.prompt_token_s * read


def handover_s(pace: RolePace, demand: RoleDemand) -> float:
    """From a prompt that was read until the first token: the handover, and a step of the decode cell."""
    return pace.step_s + pace.handover_s + pace.handover_token_s * demand.uncached_tokens
