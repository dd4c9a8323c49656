"""Decides how many cells a deployment should have in each region where they are a range. Pure.

Up at once to what is needed, however much that is; down only to what would have been enough at every look of the whole
agreement time. A load that is not known, a rollout or a gap in what was seen hold what there is. Never outside the
range, and never below what the schedule or the region autopilot needs within it. A budget stops growth; it takes no
cell away. How many of these cells it may have while machines are short is not decided here (`fleet.planning.shares`),
and what is wanted does not bow to it: it is what comes back once there are machines.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from fleet.autoscaling.planning.needs import (
    GAP_S,
    Need,
    NeedSample,
    PlaceDecision,
    ScaledPlace,
    ScalingRule,
    ScalingView,
    cells_text,
    greatest_need,
    idle_long_enough,
    idle_since,
    load_cells,
)
from fleet.autoscaling.planning.policy import CellRange, window_in_force
from kernel.ages import age_text

START_UPS = 2.0
"""So many start-up times fewer cells must have been enough: who goes down and up again has lost one."""
SAMPLES_MOST = 60
"""Kept of an agreement time; each is the most of its part."""


def plan_scaling(view: ScalingView, now: datetime) -> tuple[PlaceDecision, ...]:
    """One decision for each place, whether it changes something or not."""
    places = tuple(replace(place, range=_range_now(view, place, now)) for place in view.places)
    view = replace(view, places=places, crowded_out=_crowded_out(view, places, now))
    decisions = {place.region: _plan_place(view, place, now) for place in places}
    return tuple(_within_budget(view, decisions))


def _range_now(view: ScalingView, place: ScaledPlace, now: datetime) -> CellRange:
    """It begins at 0 while a window says so, and no other one wants more."""
    window = window_in_force(view.policy.schedule, place.region, now)
    return CellRange(0, place.range.max) if window is not None and window.cells == 0 else place.range


def _crowded_out(view: ScalingView, places: tuple[ScaledPlace, ...], now: datetime) -> frozenset[str]:
    """Regions for whose requests no other one can have room."""
    full = {place.region for place in places if greatest_need(view, place, now).cells > place.range.max}
    others_of = {one.region: [two.region for two in places if two is not one and two.ready] for one in places}
    return frozenset(
        region for region, others in others_of.items() if view.is_full_elsewhere and full.issuperset(others)
    )


def agreement_s(view: ScalingView) -> float:
    """How long fewer cells must have been enough."""
    return max(view.policy.down_after_s, START_UPS * view.start_up_s)


def _plan_place(view: ScalingView, place: ScaledPlace, now: datetime) -> PlaceDecision:
    need = greatest_need(view, place, now)
    current = place.range.clamped(place.current)
    window_s = agreement_s(view)
    history = place.history
    if place.load is not None:
        history = _remembered(history, NeedSample(now, need.enough), window_s)
    needed = None if place.load is None else place.range.clamped(load_cells(view.at(place), place.load))
    since = idle_since(view, place, now)
    if current > 0 and need.cells == 0 and not idle_long_enough(view, since, now):
        need = replace(need, rule=ScalingRule.IDLE, cells=1, reason=_kept_warm(view, since))
    wanted, rule, reason = _decide(view, place, need, current, history, now)
    if place.granted is not None and place.granted < wanted:
        reason += f"; it may have {place.granted} of them: {place.grant_reason}"
    return PlaceDecision(place.region, wanted, needed, rule, reason, history, since)


def _kept_warm(view: ScalingView, since: datetime | None) -> str:
    asked = "somebody has asked within" if since else "nobody knows that there was no request for"
    return f"{asked} {age_text(view.policy.idle_s)}: its last cell stays"


def _decide(
    view: ScalingView, place: ScaledPlace, need: Need, current: int, history: tuple[NeedSample, ...], now: datetime
) -> tuple[int, ScalingRule, str]:
    most = place.range.max
    if need.cells > min(place.current, most):
        beyond = f"; its range ends at {most}" if need.cells > most else ""
        return min(need.cells, most), ScalingRule.MAX if beyond else need.rule, need.reason + beyond
    if place.load is None:
        return current, ScalingRule.UNKNOWN_LOAD, f"nobody has reported its load lately: it keeps {cells_text(current)}"
    level = max(need.cells, min(_level(history), most))
    if level >= current:
        if current != place.current:
            return current, ScalingRule.MAX, f"its range ends at {most}"
        rule = need.rule if need.cells == current else ScalingRule.AGREEMENT
        return current, rule, need.reason if rule is need.rule else _not_yet(need, current, view)
    if view.is_rolling:
        return current, ScalingRule.ROLLOUT, f"{cells_text(level)} would do; during a rollout there are not fewer"
    if not _covers(history, agreement_s(view), now):
        return current, ScalingRule.AGREEMENT, _not_yet(need, current, view)
    text = f"{cells_text(level)} would have been enough for {age_text(agreement_s(view))}: {need.reason}"
    if level == 0:
        text = f"nobody has asked for {age_text(view.policy.idle_s)}, and its range begins at 0"
    return level, need.rule, text


def _not_yet(need: Need, current: int, view: ScalingView) -> str:
    return f"{need.reason}; it keeps {cells_text(current)} until fewer were enough for {age_text(agreement_s(view))}"


def _level(history: tuple[NeedSample, ...]) -> int:
    return max(sample.cells for sample in history)


def _covers(history: tuple[NeedSample, ...], window_s: float, now: datetime) -> bool:
    return bool(history) and now - history[0].at >= timedelta(seconds=window_s)


def _remembered(before: tuple[NeedSample, ...], sample: NeedSample, window_s: float) -> tuple[NeedSample, ...]:
    """With one sample more, without what no longer counts: what is older than the window, but for the last of that,
    and what was seen before a gap. Samples of one part of the window become one, the most of them at the time of the
    last, so that the row stays small."""
    if before and (sample.at - before[-1].at).total_seconds() > GAP_S:
        return (sample,)
    merged, part_s = list(before), window_s / SAMPLES_MOST
    if merged and merged[-1].at.timestamp() // part_s == sample.at.timestamp() // part_s:
        merged[-1] = NeedSample(sample.at, max(merged[-1].cells, sample.cells))
    else:
        merged.append(sample)
    begins = sample.at - timedelta(seconds=window_s)
    while len(merged) > 1 and merged[1].at <= begins:
        merged.pop(0)
    return tuple(merged)


def _within_budget(view: ScalingView, decisions: dict[str, PlaceDecision]) -> Iterator[PlaceDecision]:
    """The decisions, where the budget does not allow all that they add, with less: cell by cell to where most is
    lacking, of equals to the cheapest. What is there, and what ranges begin with, is never taken away for it, and what
    nobody knows the price of counts as nothing."""
    budget, places = view.policy.budget_per_hour, {place.region: place for place in view.places}
    total = sum(decision.wanted * places[region].cell_price for region, decision in decisions.items())
    if budget is None or view.elsewhere_price + total <= budget:
        yield from decisions.values()
        return
    granted = {
        region: min(decision.wanted, max(places[region].current, places[region].range.min))
        for region, decision in decisions.items()
    }
    left = budget - view.elsewhere_price - sum(count * places[region].cell_price for region, count in granted.items())
    while lacking := [
        places[region]
        for region, decision in decisions.items()
        if granted[region] < decision.wanted and places[region].cell_price <= left
    ]:
        next_one = min(lacking, key=lambda one: (granted[one.region] / decisions[one.region].wanted, one.cell_price))
        granted[next_one.region] += 1
        left -= next_one.cell_price
    for region, decision in decisions.items():
        if granted[region] == decision.wanted:
            yield decision
        else:
            most = f"{cells_text(granted[region])} there, at ${places[region].cell_price:g} each"
            text = f"{decision.reason}; ${budget:g} an hour allow no more than {most}"
            yield replace(decision, wanted=granted[region], rule=ScalingRule.BUDGET, reason=text)


# What became of a decision: how many cell-seconds it had too few or too many, by the load that came.
# Measured while the decision stands, by what is needed at each look, against what it wanted; in shadow, too. The
# cells in force are counted beside it, so that shadow can be compared with what really was.

LOOK_MOST_S = 30.0
"""A longer time without a look counts for so much: nobody saw what was needed meanwhile."""


@dataclass(frozen=True, slots=True)
class Regret:
    """Cell-seconds, but for `observed_s`. What a range's end forbade is no regret: the need is taken within it."""

    observed_s: float = 0.0
    too_few_cell_s: float = 0.0
    too_many_cell_s: float = 0.0
    in_force_cell_s: float = 0.0


def regret_after(before: Regret, *, wanted: int, needed: int, in_force: int, passed_s: float) -> Regret:
    """With `passed_s` seconds more, in which so many cells were wanted, needed and in force."""
    seconds = min(max(0.0, passed_s), LOOK_MOST_S)
    return Regret(
        before.observed_s + seconds,
        before.too_few_cell_s + max(0, needed - wanted) * seconds,
        before.too_many_cell_s + max(0, wanted - needed) * seconds,
        before.in_force_cell_s + in_force * seconds,
    )
