"""Decides how many cells of a region prefill, how many decode, and whether to separate them at all. Of all splits it
chooses the one with the highest request rate within the limits of first tokens and inter-token latency. It keeps the
current roles unless the gain is large, because a change restarts cells.

A step of n sequences that also reads p prompt tokens takes a + b n + c p
(`models_registry.benchmarks.planning.measurements`). A prefill cell with chunks of C tokens reads C / (a + c C) tokens
per second. A decode cell whose steps may take `itl_s` runs n = (itl_s - a) / b sequences and makes n / (a + b n) tokens
per second. At r requests per second with U uncached prompt tokens and O tokens of answer:

    prefill cells = r U / (prefill tokens per second x rho), decode cells = r O / (decode tokens per second x rho)

rounded up. At most one of a hundred requests waits longer than w for one of p prefill cells if 1 - rho = ln(100) S / (2
p w), with S the seconds of one prompt (M/D/1 in heavy traffic: Kingman 1962).

A mixed cell stalls its answers while it reads a prompt. That is within the objective if such a step takes at most
`itl_s`, or if less than `LATE_SHARE` of all gaps are stalls: of a request's O - 1 gaps, n other requests stall k each,
k being the steps of a prompt, so n <= LATE_SHARE (O - 1) / k. The handover and one step of the decode cell precede the
first token, so a handover never speeds up the request itself. It pays from the length at which reading the prompt next
to the n planned answers would stall them for more than `itl_s`: (itl_s - a - b n) / c.

Demand comes from counter differences between two checks. Cells that restarted in between are left out. Cells of a place
receive requests in turn, so lengths are medians over cells, and a cell with wrong counts has little effect among three.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import median

from engine_agent.protocol.states import CellRole
from fleet.autoscaling.planning.role_split import RoleSplit, split_within

LATE_SHARE = 0.01
"""Share of gaps that may exceed the objective, which is a 99th percentile."""
_LN_OF_LATE = -math.log(LATE_SHARE)
MAX_PREFILL_CELLS = 1000
BLOCK_TOKENS = 16
"""Of a KV cache, which is handed over in whole blocks."""


@dataclass(frozen=True, slots=True)
class RolePace:
    """Measured speed of cells: seconds per step, per sequence and per prompt token in it. `chunk_tokens`: prompt tokens
    per step at most; `most_at_once`: concurrent requests of a decode cell; `handover_s` and `handover_token_s`: per
    handover and per token of it."""

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
        """Sequences in a step that takes at most `itl_s`; 0 if even one takes longer."""
        if self.step_s + self.sequence_s > itl_s:
            return 0
        by_pace = (itl_s - self.step_s) / self.sequence_s if self.sequence_s > 0 else math.inf
        return int(min(by_pace, self.most_at_once))

    def decode_tokens_per_s(self, itl_s: float) -> float:
        n = self.at_once(itl_s)
        return n / (self.step_s + self.sequence_s * n)

    def prompt_s(self, tokens: float) -> float:
        """Seconds to read one prompt without other work."""
        return math.ceil(tokens / self.chunk_tokens) * self.step_s + self.prompt_token_s * tokens


@dataclass(frozen=True, slots=True)
class RoleDemand:
    """Requests per second of a place, with the mean uncached prompt tokens and answer tokens over `requests` requests.
    `expected_per_s`: forecast at p90, if there is one."""

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
    """`ttft_s` and `itl_s`: limits at the 99th percentile. `utilisation`: maximum planned utilisation. `gain`: required
    relative gain of separate roles, and of any change of roles, because it restarts cells."""

    ttft_s: float
    itl_s: float
    utilisation: float = 0.8
    gain: float = 0.2


def handover_from_tokens(pace: RolePace, limits: RoleLimits) -> int | None:
    """Uncached tokens from which a decode cell hands a prompt over, or None if no step is too long."""
    beside = limits.utilisation * pace.at_once(limits.itl_s)
    left_s = limits.itl_s - pace.step_s - pace.sequence_s * beside
    if left_s >= pace.prompt_token_s * pace.chunk_tokens:
        return None
    blocks = int(max(0.0, left_s) / pace.prompt_token_s) // BLOCK_TOKENS
    return max(1, blocks) * BLOCK_TOKENS


def needed_cells(pace: RolePace, demand: RoleDemand, limits: RoleLimits) -> RoleSplit:
    """The fewest cells of each role for the demand."""
    rate = demand.planned_per_s
    decode = max(1, math.ceil(rate * demand.output_tokens / _decode_rate(pace, demand, limits)))
    prefill = 1
    while prefill < MAX_PREFILL_CELLS and _prefill_rate(prefill, pace, demand, limits) < rate * demand.uncached_tokens:
        prefill += 1
    return RoleSplit(0, prefill, decode)


def carries(split: RoleSplit, pace: RolePace, demand: RoleDemand, limits: RoleLimits) -> float:
    """Requests per second of separate prefill and decode cells within both limits."""
    by_prefill = _prefill_rate(split.prefill, pace, demand, limits) / max(1.0, demand.uncached_tokens)
    by_decode = split.decode * _decode_rate(pace, demand, limits) / max(1.0, demand.output_tokens)
    return min(by_prefill, by_decode)


def _prefill_rate(cells: int, pace: RolePace, demand: RoleDemand, limits: RoleLimits) -> float:
    """Prompt tokens per second of these cells with 99 % of first tokens in time."""
    prompt_s = pace.prompt_s(demand.uncached_tokens)
    wait_s = limits.ttft_s - prompt_s - handover_s(pace, demand)
    if wait_s <= 0:
        return 0.0
    by_wait = 1 - _LN_OF_LATE * prompt_s / (2 * cells * wait_s)
    return cells * pace.prefill_tokens_per_s * max(0.0, min(limits.utilisation, by_wait))


def _decode_rate(pace: RolePace, demand: RoleDemand, limits: RoleLimits) -> float:
    """Tokens per second of one decode cell at the limit between tokens; almost 0 if no step is short enough."""
    return max(1e-9, pace.decode_tokens_per_s(limits.itl_s) * limits.utilisation)


def mixed_carries(pace: RolePace, demand: RoleDemand, limits: RoleLimits) -> float:
    """Requests per second of one mixed cell within both limits."""
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
    """Whether a step that reads a prompt during an answer stays within the limit between tokens."""
    return stall_s(pace, demand) <= limits.itl_s


def stall_s(pace: RolePace, demand: RoleDemand) -> float:
    """Seconds of a step that reads a prompt, or a chunk of it, during one answer."""
    read = min(demand.uncached_tokens, pace.chunk_tokens)
    return pace.step_s + 2 * pace.sequence_s + pace.prompt_token_s * read


def handover_s(pace: RolePace, demand: RoleDemand) -> float:
    """Seconds from a computed prompt to the first token: the handover and one step of the decode cell."""
    return pace.step_s + pace.handover_s + pace.handover_token_s * demand.uncached_tokens


FROM_TOKENS_HYSTERESIS = 0.25
"""Relative change of the handover threshold before decode cells get a new one."""
MIN_REQUESTS = 20
"""Since the previous check. Fewer requests give no reliable lengths."""


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
    """A place with planned roles: `cells` is its target, `current` its roles. `pace` and `demand`: None if unmeasured
    or without recent requests. `is_rolling`: a rollout moves its cells and compares them by role. `from_tokens`:
    current handover threshold of its decode cells, if any."""

    cells: int
    current: RoleSplit
    limits: RoleLimits
    pace: RolePace | None = None
    demand: RoleDemand | None = None
    is_rolling: bool = False
    from_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class RatioDecision:
    """`needed`: minimum for the demand, or None if unknown or mixed is better. `carries` and `mixed_carries`: requests
    per second within both limits, as planned and with mixed cells. `from_tokens`: as in `RatioView`."""

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
    """The roles of a place's cells, and the handover threshold."""
    found = replace(_plan_split(view), from_tokens=view.from_tokens)
    if not found.split.is_apart or view.pace is None or view.is_rolling:
        return found
    tokens = handover_from_tokens(view.pace, view.limits)
    if tokens is None or (
        view.from_tokens and abs(tokens - view.from_tokens) <= FROM_TOKENS_HYSTERESIS * view.from_tokens
    ):
        return found
    return replace(found, from_tokens=tokens)


def _plan_split(view: RatioView) -> RatioDecision:
    kept = split_within(view.cells, view.current.prefill, view.current.decode)
    demand, pace = view.demand, view.pace
    if view.is_rolling:
        return RatioDecision(kept, RatioRule.ROLLOUT, f"a rollout moves its cells: it keeps {kept}")
    if demand is None or pace is None or demand.requests < MIN_REQUESTS:
        what = "step times are not measured" if pace is None else "too few requests to estimate their lengths"
        return RatioDecision(kept, RatioRule.UNKNOWN, f"{what}: it keeps {kept}")
    mixed = RoleSplit(mixed=view.cells)
    mixed_rate = view.cells * mixed_carries(pace, demand, view.limits)
    if view.cells < 2:
        return RatioDecision(mixed, RatioRule.TOO_FEW, f"{view.cells} of at least 2 cells", None, None, mixed_rate)
    best, rate = max(
        ((one, carries(one, pace, demand, view.limits)) for one in _splits(view.cells)), key=lambda pair: pair[1]
    )
    found = RatioDecision(mixed, RatioRule.NO_GAIN, "", None, rate, mixed_rate)
    if rate <= mixed_rate * (1 + view.limits.gain):
        rule, why = _why_mixed(pace, demand, view.limits, rate, mixed_rate)
        return _kept_mixed(view, replace(found, rule=rule, reason=f"mixed is better: {why}"))
    needed = needed_cells(pace, demand, view.limits)
    figures = f"{best} carry {rate:.2f} per second within both limits, {mixed} {mixed_rate:.2f}"
    text = f"{_demand_text(demand)} take {needed}; {figures}"
    return _with_hysteresis(view, replace(found, split=best, rule=RatioRule.DEMAND, reason=text, needed=needed), kept)


def _splits(cells: int) -> Iterator[RoleSplit]:
    """All separate splits, the fewest prefill cells first, because of equal ones that answers most."""
    return (RoleSplit(0, prefill, cells - prefill) for prefill in range(1, cells))


def _why_mixed(
    pace: RolePace, demand: RoleDemand, limits: RoleLimits, rate: float, mixed_rate: float
) -> tuple[RatioRule, str]:
    limit = f"{limits.itl_s * 1000:.0f} ms"
    figures = f"mixed carries {mixed_rate:.2f} requests per second within both limits, separate {rate:.2f}"
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
    """Returning to mixed also needs the gain, because each cell restarts, unless separate roles do not work at all."""
    if not view.current.is_apart or not found.carries or found.mixed_carries is None:
        return found
    if found.mixed_carries >= found.carries * (1 + view.limits.gain):
        return found
    kept = split_within(view.cells, view.current.prefill, view.current.decode)
    return replace(found, split=kept, rule=RatioRule.HYSTERESIS).explained(
        f"{kept} stay, because the gain is too small for a restart"
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
    rate = f"{demand.planned_per_s:.2f} requests per second"
    if demand.expected_per_s is not None and demand.expected_per_s > demand.per_s:
        rate += f" expected ({demand.per_s:.2f} now)"
    return f"{rate} of {demand.uncached_tokens:.0f} uncached prompt tokens and {demand.output_tokens:.0f} of answer"


MAX_INTERVAL_S = 3600.0
"""Maximum time between two checks. Older counters say nothing about the current demand."""
MAX_OF_MEDIAN = 4.0
"""Maximum requests of a cell that count, relative to the median cell."""
MAX_GROWTH = 10.0
"""Maximum factor of a forecast over the current demand."""


@dataclass(frozen=True, slots=True)
class CountedCell:
    """Totals of one start of a cell. `read_tokens`: prompt tokens that a prefill cell computed for others;
    `handover_s`: current duration of a handover to a decode cell, if any."""

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
        """The increase, or None after a restart."""
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
"""Cell -> its counters."""


def demand_between(before: Counted, now: Counted, seconds: float, expected_at_once: float | None) -> RoleDemand | None:
    """The demand over `seconds`, or None if unknown. `expected_at_once`: forecast concurrency. Some engines count
    handed-over tokens as cached; then the tokens that prefill cells computed count instead, up to the prompts' length.
    """
    pairs = ((cell, before[name]) for name, cell in now.items() if name in before)
    added = [one for cell, earlier in pairs if (one := cell.since(earlier)) is not None]
    answered = [one for one in added if one.role is not CellRole.PREFILL and one.requests > 0]
    if not 0 < seconds <= MAX_INTERVAL_S or not answered:
        return None
    most = MAX_OF_MEDIAN * median(one.requests for one in answered)
    requests = int(sum(min(one.requests, most) for one in answered))
    prompt = median(one.prompt_tokens / one.requests for one in answered)
    own = median(max(0, one.prompt_tokens - one.cached_tokens) / one.requests for one in answered)
    read = min(prompt, sum(one.read_tokens for one in added) / requests)
    per_s = requests / seconds
    at_once = sum(cell.in_flight for cell in now.values() if cell.role is not CellRole.PREFILL)
    expected = None
    if expected_at_once is not None and at_once > 0:
        expected = per_s * min(MAX_GROWTH, expected_at_once / at_once)
    return RoleDemand(
        per_s=per_s,
        uncached_tokens=max(1.0, own, read),
        output_tokens=max(1.0, median(one.completion_tokens / one.requests for one in answered)),
        requests=requests,
        expected_per_s=expected,
    )


def measured_handover_s(now: Counted) -> float | None:
    """Median duration of a handover over the decode cells, or None without any."""
    seen = [cell.handover_s for cell in now.values() if cell.handover_s is not None]
    return median(seen) if seen else None
