"""How many requests a second cells carry within the limits of first tokens and of gaps between tokens, told apart by
role or all mixed. Pure; `fleet.autoscaling.planning.roles` decides by it.

A step of n sequences that also reads p prompt tokens takes a + b n + c p
(`models_registry.benchmarks.planning.measurements`). A
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

Decides how many cells of a region read prompts, how many answer, and whether to tell them apart at all. Pure.

Of all ways to tell the cells of a place apart it takes the one that carries most within both limits
(`fleet.autoscaling.planning.roles`); mixed, unless that carries a gain more. What a change of roles gains must be as
much:
it restarts cells.

What cells of a place count of their requests, and what a while between two looks says of one of them. Pure.

Totals belong to one start of a cell: what started anew meanwhile is left out of the difference. Cells of a place get
requests in turn, so lengths are the median of the cells', and none counts for many times what the median cell has: one
that lies of itself moves little where there are three.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import median

from engine_agent.protocol.states import CellRole
from fleet.autoscaling.planning.role_split import RoleSplit, split_within

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


FROM_TOKENS_HELD = 0.25
"""By which part the length from which prompts are handed over must move before decode cells are told another."""
LEAST_REQUESTS = 20
"""Since the last look; fewer say nothing about lengths."""


class RatioRule(StrEnum):
    DEMAND = "demand"
    SHORT_PROMPTS = "short_prompts"
    HANDOVER = "handover"
    NO_GAIN = "no_gain"
    TOO_FEW = "too_few"
    ROLLOUT = "rollout"
    HYSTERESIS = "hysteresis"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class RatioView:
    """A place whose roles are planned: `cells` that it should have, and the roles that it should have now. None: nobody
    has measured it, or asked lately. `is_rolling`: its cells move to another version, and are compared by role.
    `from_tokens`: from so many uncached tokens on its decode cells have prompts read elsewhere; None: nobody said so.
    """

    cells: int
    current: RoleSplit
    limits: RoleLimits
    pace: RolePace | None = None
    demand: RoleDemand | None = None
    is_rolling: bool = False
    from_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class RatioDecision:
    """`needed`: what the demand takes at least; None: unknown, or apart is not better. `carries` and `mixed_carries`:
    requests a second within both limits that the cells would do so, and all mixed. `from_tokens` is as in `RatioView`.
    """

    split: RoleSplit
    rule: RatioRule
    reason: str
    needed: RoleSplit | None = None
    carries: float | None = None
    mixed_carries: float | None = None
    from_tokens: int | None = None

    def explained(self, more: str) -> "RatioDecision":
        return replace(self, reason=f"{self.reason}; {more}")


def plan_ratio(view: RatioView) -> RatioDecision:
    """The roles that the cells of a place should have, and from which length on prompts are handed over."""
    found = replace(_plan_split(view), from_tokens=view.from_tokens)
    if not found.split.is_apart or view.pace is None or view.is_rolling:
        return found
    tokens = handover_from_tokens(view.pace, view.limits)
    if tokens is None or (view.from_tokens and abs(tokens - view.from_tokens) <= FROM_TOKENS_HELD * view.from_tokens):
        return found
    return replace(found, from_tokens=tokens)


def _plan_split(view: RatioView) -> RatioDecision:
    kept = split_within(view.cells, view.current.prefill, view.current.decode)
    demand, pace = view.demand, view.pace
    if view.is_rolling:
        return RatioDecision(kept, RatioRule.ROLLOUT, f"a rollout moves its cells: it keeps {kept}")
    if demand is None or pace is None or demand.requests < LEAST_REQUESTS:
        what = (
            "nobody has measured how long steps take" if pace is None else "too few requests came to tell their lengths"
        )
        return RatioDecision(kept, RatioRule.UNKNOWN, f"{what}: it keeps {kept}")
    mixed = RoleSplit(mixed=view.cells)
    mixed_rate = view.cells * mixed_carries(pace, demand, view.limits)
    if view.cells < 2:
        return RatioDecision(mixed, RatioRule.TOO_FEW, f"{view.cells} of 2 cells that it takes", None, None, mixed_rate)
    best, rate = max(
        ((one, carries(one, pace, demand, view.limits)) for one in _splits(view.cells)), key=lambda pair: pair[1]
    )
    found = RatioDecision(mixed, RatioRule.NO_GAIN, "", None, rate, mixed_rate)
    if rate <= mixed_rate * (1 + view.limits.gain):
        rule, why = _why_mixed(pace, demand, view.limits, rate, mixed_rate)
        return _kept_mixed(view, replace(found, rule=rule, reason=f"mixed is better: {why}"))
    needed = needed_cells(pace, demand, view.limits)
    figures = f"{best} carry {rate:.2f} a second within both limits, {mixed} {mixed_rate:.2f}"
    text = f"{_demand_text(demand)} take {needed}; {figures}"
    return _with_hysteresis(view, replace(found, split=best, rule=RatioRule.DEMAND, reason=text, needed=needed), kept)


def _splits(cells: int) -> Iterator[RoleSplit]:
    """All of them apart, the fewest prefill cells first: of equals it is the one that answers with most."""
    return (RoleSplit(0, prefill, cells - prefill) for prefill in range(1, cells))


def _why_mixed(
    pace: RolePace, demand: RoleDemand, limits: RoleLimits, rate: float, mixed_rate: float
) -> tuple[RatioRule, str]:
    limit = f"{limits.itl_s * 1000:.0f} ms"
    figures = f"mixed carries {mixed_rate:.2f} requests a second within both limits, apart {rate:.2f}"
    if is_stall_short(pace, demand, limits):
        stall = f"{stall_s(pace, demand) * 1000:.0f} ms"
        text = f"reading {demand.uncached_tokens:.0f} tokens makes a step {stall}, within {limit}"
        return RatioRule.SHORT_PROMPTS, f"{text}; {figures}"
    first_s = pace.prompt_s(demand.uncached_tokens) + handover_s(pace, demand)
    if first_s >= limits.ttft_s:
        text = f"reading and handing over a prompt take {first_s * 1000:.0f} ms, all of {limits.ttft_s * 1000:.0f} ms"
        return RatioRule.HANDOVER, f"{text}; {figures}"
    return RatioRule.NO_GAIN, f"{figures}, less than {limits.gain:.0%} more"


def _kept_mixed(view: RatioView, found: RatioDecision) -> RatioDecision:
    """To be mixed again takes a gain, too: each cell restarts for it. Unless apart does not work at all."""
    if not view.current.is_apart or not found.carries or found.mixed_carries is None:
        return found
    if found.mixed_carries >= found.carries * (1 + view.limits.gain):
        return found
    kept = split_within(view.cells, view.current.prefill, view.current.decode)
    return replace(found, split=kept, rule=RatioRule.HYSTERESIS).explained(
        f"{kept} stay, as it is less than a restart is worth"
    )


def _with_hysteresis(view: RatioView, found: RatioDecision, kept: RoleSplit) -> RatioDecision:
    if not kept.is_apart or kept == found.split or view.pace is None or view.demand is None or found.carries is None:
        return found
    carried = carries(kept, view.pace, view.demand, view.limits)
    if found.carries < carried * (1 + view.limits.gain):
        text = f"{kept} stay: they carry {carried:.2f}, less than {view.limits.gain:.0%} below"
        return replace(found, split=kept, rule=RatioRule.HYSTERESIS, carries=carried).explained(text)
    return found


def _demand_text(demand: RoleDemand) -> str:
    rate = f"{demand.planned_per_s:.2f} requests a second"
    if demand.expected_per_s is not None and demand.expected_per_s > demand.per_s:
        rate += f" expected ({demand.per_s:.2f} now)"
    return f"{rate} of {demand.uncached_tokens:.0f} uncached prompt tokens and {demand.output_tokens:.0f} of answer"


LONGEST_S = 3600.0
"""Between two looks; a longer one says nothing of now."""
MOST_OF_MEDIAN = 4.0
"""Requests of a cell, as a multiple of the median cell's, that count at most."""
MOST_GROWTH = 10.0
"""By which a forecast may multiply what comes now."""


@dataclass(frozen=True, slots=True)
class CountedCell:
    """Totals of one start of a cell. `read_tokens`: of prompts that a prefill cell read for others. `handover_s`: how
    long it takes a decode cell now to take one over; None: it took none."""

    generation: int
    role: CellRole
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    read_tokens: int = 0
    in_flight: float = 0.0
    handover_s: float | None = None

    def since(self, before: "CountedCell") -> "CountedCell | None":
        """What was added; None: it is another count."""
        added = CountedCell(
            self.generation,
            self.role,
            self.requests - before.requests,
            self.prompt_tokens - before.prompt_tokens,
            self.cached_tokens - before.cached_tokens,
            self.completion_tokens - before.completion_tokens,
            self.read_tokens - before.read_tokens,
        )
        numbers = (
            added.requests, added.prompt_tokens, added.cached_tokens, added.completion_tokens, added.read_tokens,
        )  # fmt: skip
        return added if self.generation == before.generation and min(numbers) >= 0 else None


Counted = Mapping[str, CountedCell]
"""Cell -> what it counted."""


def demand_between(before: Counted, now: Counted, seconds: float, expected_at_once: float | None) -> RoleDemand | None:
    """What came in so many seconds; None: nothing is known. `expected_at_once`: requests at once that are forecast.

    Where engines count what they took over as cached, those tokens count that prefill cells have read, if these are
    more; never more than the prompts have.
    """
    pairs = ((cell, before[name]) for name, cell in now.items() if name in before)
    added = [one for cell, earlier in pairs if (one := cell.since(earlier)) is not None]
    answered = [one for one in added if one.role is not CellRole.PREFILL and one.requests > 0]
    if not 0 < seconds <= LONGEST_S or not answered:
        return None
    most = MOST_OF_MEDIAN * median(one.requests for one in answered)
    requests = int(sum(min(one.requests, most) for one in answered))
    prompt = median(one.prompt_tokens / one.requests for one in answered)
    own = median(max(0, one.prompt_tokens - one.cached_tokens) / one.requests for one in answered)
    read = min(prompt, sum(one.read_tokens for one in added) / requests)
    per_s = requests / seconds
    at_once = sum(cell.in_flight for cell in now.values() if cell.role is not CellRole.PREFILL)
    expected = None
    if expected_at_once is not None and at_once > 0:
        expected = per_s * min(MOST_GROWTH, expected_at_once / at_once)
    return RoleDemand(
        per_s=per_s,
        uncached_tokens=max(1.0, own, read),
        output_tokens=max(1.0, median(one.completion_tokens / one.requests for one in answered)),
        requests=requests,
        expected_per_s=expected,
    )


def measured_handover_s(now: Counted) -> float | None:
    """How long taking over a prompt takes, the median of the decode cells that did; None: none did."""
    seen = [cell.handover_s for cell in now.values() if cell.handover_s is not None]
    return median(seen) if seen else None
