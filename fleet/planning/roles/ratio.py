"""Decides how many cells of a region read prompts, how many answer, and whether to tell them apart at all. Pure.

Of all ways to tell the cells of a place apart it takes the one that carries most within both limits
(`fleet.planning.roles.capacity`); mixed, unless that carries a gain more. What a change of roles gains must be as much:
it restarts cells.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from fleet.planning.role_split import RoleSplit, split_within
from fleet.planning.roles.capacity import (
    RoleDemand,
    RoleLimits,
    RolePace,
    carries,
    handover_from_tokens,
    handover_s,
    is_stall_short,
    mixed_carries,
    needed_cells,
    stall_s,
)

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
