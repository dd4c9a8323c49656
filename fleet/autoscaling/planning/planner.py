"""Decides how many cells a deployment should have in each region where they are a range. It adds what is needed
immediately. It removes only what every check of the whole agreement time found unnecessary; unknown load, a rollout or
a gap in the checks keep all cells. It never leaves the range, and never goes below what the schedule or the region
autopilot needs within it. A budget limits growth but removes no cell. Grants while machines are scarce
(`fleet.quotas.planning`) do not change the target. Also measures the regret of decisions."""

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
"""Fewer cells must have been enough for this many start-up times, because removing and re-adding a cell costs one."""
MAX_SAMPLES = 60
"""Samples per agreement time; each is the maximum of its part."""


def plan_scaling(view: ScalingView, now: datetime) -> tuple[PlaceDecision, ...]:
    """One decision per place, including unchanged ones."""
    view = view_now(view, now)
    decisions = {place.region: _plan_place(view, place, now) for place in view.places}
    return tuple(_within_budget(view, decisions))


def view_now(view: ScalingView, now: datetime) -> ScalingView:
    """The view with the ranges that the schedule leaves now, and the regions whose requests no other one has room
    for."""
    places = tuple(replace(place, range=_range_now(view, place, now)) for place in view.places)
    return replace(view, places=places, displaced_regions=_displaced_regions(view, places, now))


def _range_now(view: ScalingView, place: ScaledPlace, now: datetime) -> CellRange:
    """Begins at 0 while a window of the schedule sets 0 and none sets more."""
    window = window_in_force(view.policy.schedule, place.region, now)
    return CellRange(0, place.range.max) if window is not None and window.cells == 0 else place.range


def _displaced_regions(view: ScalingView, places: tuple[ScaledPlace, ...], now: datetime) -> frozenset[str]:
    """Regions for whose requests no other region can have room."""
    full = {place.region for place in places if greatest_need(view, place, now).cells > place.range.max}
    others_of = {one.region: [two.region for two in places if two is not one and two.ready] for one in places}
    return frozenset(
        region for region, others in others_of.items() if view.is_full_elsewhere and full.issuperset(others)
    )


def agreement_s(view: ScalingView) -> float:
    """Seconds for which fewer cells must have been enough."""
    return max(view.policy.down_after_s, START_UPS * view.start_up_s)


def _plan_place(view: ScalingView, place: ScaledPlace, now: datetime) -> PlaceDecision:
    need = greatest_need(view, place, now)
    current = place.range.clamped(place.current)
    window_s = agreement_s(view)
    history = place.history
    if place.load is not None:
        history = _with_sample(history, NeedSample(now, need.enough), window_s)
    needed = None if place.load is None else place.range.clamped(load_cells(view.at(place), place.load))
    since = idle_since(view, place, now)
    if current > 0 and need.cells == 0 and not idle_long_enough(view, since, now):
        need = replace(need, rule=ScalingRule.IDLE, cells=1, reason=_kept_warm(view, since))
    wanted, rule, reason = _decide_place(view, place, need, current, history, now)
    if place.granted is not None and place.granted < wanted:
        reason += f"; {place.granted} are granted: {place.grant_reason}"
    return PlaceDecision(place.region, wanted, needed, rule, reason, history, since)


def _kept_warm(view: ScalingView, since: datetime | None) -> str:
    idle = "not idle for" if since else "not known to be idle for"
    return f"{idle} {age_text(view.policy.idle_s)}: its last cell stays"


def _decide_place(
    view: ScalingView, place: ScaledPlace, need: Need, current: int, history: tuple[NeedSample, ...], now: datetime
) -> tuple[int, ScalingRule, str]:
    most = place.range.max
    if need.cells > min(place.current, most):
        beyond = f"; its range ends at {most}" if need.cells > most else ""
        return min(need.cells, most), ScalingRule.MAX if beyond else need.rule, need.reason + beyond
    if place.load is None:
        return current, ScalingRule.UNKNOWN_LOAD, f"no recent load report: it keeps {cells_text(current)}"
    level = max(need.cells, min(_highest_need(history), most))
    if level >= current:
        if current != place.current:
            return current, ScalingRule.MAX, f"its range ends at {most}"
        rule = need.rule if need.cells == current else ScalingRule.AGREEMENT
        return current, rule, need.reason if rule is need.rule else _waits_for_agreement(need, current, view)
    if view.is_rolling:
        return current, ScalingRule.ROLLOUT, f"{cells_text(level)} would be enough; no cell is removed during a rollout"
    if not _covers_window(history, agreement_s(view), now):
        return current, ScalingRule.AGREEMENT, _waits_for_agreement(need, current, view)
    text = f"{cells_text(level)} would have been enough for {age_text(agreement_s(view))}: {need.reason}"
    if level == 0:
        text = f"no request for {age_text(view.policy.idle_s)}, and its range begins at 0"
    return level, need.rule, text


def _waits_for_agreement(need: Need, current: int, view: ScalingView) -> str:
    return f"{need.reason}; it keeps {cells_text(current)} until fewer were enough for {age_text(agreement_s(view))}"


def _highest_need(history: tuple[NeedSample, ...]) -> int:
    return max(sample.cells for sample in history)


def _covers_window(history: tuple[NeedSample, ...], window_s: float, now: datetime) -> bool:
    return bool(history) and now - history[0].at >= timedelta(seconds=window_s)


def _with_sample(before: tuple[NeedSample, ...], sample: NeedSample, window_s: float) -> tuple[NeedSample, ...]:
    """Appends a sample and drops those before a gap or the window, except the last one before it. Samples in one part
    of the window are merged into their maximum, so that the row stays small."""
    if before and (sample.at - before[-1].at).total_seconds() > GAP_S:
        return (sample,)
    merged, part_s = list(before), window_s / MAX_SAMPLES
    if merged and merged[-1].at.timestamp() // part_s == sample.at.timestamp() // part_s:
        merged[-1] = NeedSample(sample.at, max(merged[-1].cells, sample.cells))
    else:
        merged.append(sample)
    begins = sample.at - timedelta(seconds=window_s)
    while len(merged) > 1 and merged[1].at <= begins:
        merged.pop(0)
    return tuple(merged)


def _within_budget(view: ScalingView, decisions: dict[str, PlaceDecision]) -> Iterator[PlaceDecision]:
    """Reduces growth that exceeds the budget. It adds cell by cell where most are missing, the cheapest first. Current
    cells and minimums stay. Unknown prices count as 0."""
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
            text = f"{decision.reason}; ${budget:g} per hour allow only {most}"
            yield replace(decision, wanted=granted[region], rule=ScalingRule.BUDGET, reason=text)


# Regret is measured in shadow mode as well. The cells in force are counted next to it for comparison.

MAX_CHECK_GAP_S = 30.0
"""Longer gaps between checks count as this long, because the need in between is unknown."""


@dataclass(frozen=True, slots=True)
class Regret:
    """Cell-seconds, except `observed_s`. The need is limited to the range, so its end causes no regret."""

    observed_s: float = 0.0
    too_few_cell_s: float = 0.0
    too_many_cell_s: float = 0.0
    in_force_cell_s: float = 0.0


def regret_after(before: Regret, *, wanted: int, needed: int, in_force: int, passed_s: float) -> Regret:
    """Adds `passed_s` seconds in which these numbers of cells were wanted, needed and in force."""
    seconds = min(max(0.0, passed_s), MAX_CHECK_GAP_S)
    return Regret(
        before.observed_s + seconds,
        before.too_few_cell_s + max(0, needed - wanted) * seconds,
        before.too_many_cell_s + max(0, wanted - needed) * seconds,
        before.in_force_cell_s + in_force * seconds,
    )
