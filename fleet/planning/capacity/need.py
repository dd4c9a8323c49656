"""What of a plan counts for one place: its cells of all types together, slot by slot, and the need that the autoscaler
takes from the next ones. Pure; no numpy, for web and the control loops.
"""

import math
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from fleet.planning.autoscaling.view import PlannedNeed
from fleet.planning.capacity.view import CapacityPlan

FRESH_S = 2700.0
"""A plan is made every quarter of an hour; after two that were missed it counts no more."""


HELD_S = 1800.0
"""Cells are held for what the plan has so long after the need: who starts a cell again within half an hour pays for two
starts, and the next plan may turn as well. Over two recorded weeks that more than halves the turns, for a thousandth of
the cost (docs/bench/capacity_plan.md)."""


@dataclass(frozen=True, slots=True)
class PlacePlan:
    """A deployment in a region, slot by slot from `at` on: cells; requests at once that are expected, those that are to
    be covered, those that batches may have (none where nobody forecasts the load), and what of these is due.
    `start_up_s`: in which time a cell was taken to start."""

    at: datetime
    slot_s: int
    cells: tuple[int, ...]
    expected: tuple[float, ...]
    cover: tuple[float, ...]
    budget: tuple[float, ...] = ()
    due: tuple[float, ...] = ()
    start_up_s: float = 0.0

    def is_fresh(self, now: datetime) -> bool:
        return 0.0 <= (now - self.at).total_seconds() < FRESH_S


def place_plan(plan: CapacityPlan, deployment: str, region: str) -> PlacePlan | None:
    key = (deployment, region)
    rows = [row.cells for row in plan.cells if (row.deployment, row.region) == key]
    load = next((row for row in plan.loads if (row.deployment, row.region) == key), None)
    if not rows or load is None:
        return None
    budget = next((row for row in plan.budgets if (row.deployment, row.region) == key), None)
    cells = tuple(sum(slot) for slot in zip(*rows, strict=True))
    free = (budget.requests, budget.due) if budget else ((), ())
    return PlacePlan(plan.at, plan.slot_s, cells, load.expected, load.cover, *free, start_up_s=load.start_up_s)


def at_load(place: PlacePlan, factor: float) -> PlacePlan:
    """What the plan would have at so many times the load, as near as arithmetic comes without a solver: cells grow by
    what they have room for; batches that are due are as many as before. It knows no range and no machines."""
    due = place.due or (0.0,) * len(place.cells)
    cells = tuple(
        math.ceil(count * (cover * factor + more) / (cover + more) - 1e-9) if cover + more else count
        for count, cover, more in zip(place.cells, place.cover, due, strict=True)
    )
    expected, cover = (tuple(value * factor for value in row) for row in (place.expected, place.cover))
    return replace(place, cells=cells, expected=expected, cover=cover)


def need_within(place: PlacePlan, now: datetime, start_up_s: float) -> PlannedNeed | None:
    """The most cells until one that is ordered now has served for a slot, and as what is enough the most until half an
    hour later; None: the plan is too old, or of a time to come, or nobody forecasts the load, so that it only has what
    there was."""
    if not place.is_fresh(now) or not place.budget:
        return None
    age_s = (now - place.at).total_seconds()
    first, last = (int(seconds // place.slot_s) for seconds in (age_s, age_s + start_up_s + place.slot_s))
    row = place.cells[first : last + 1]
    if not row:
        return None
    slot = first + row.index(max(row))
    begins_at = place.at + timedelta(seconds=slot * place.slot_s)
    due = place.due[slot] if place.due else 0.0
    batches = f", and batches that are due take {due:.1f}" if due else ""
    reason = (
        f"from {begins_at:%H:%M} UTC on {place.expected[slot]:.1f} requests at once are expected and "
        f"{place.cover[slot]:.1f} to be covered{batches}"
    )
    later = last + 1 + math.ceil(HELD_S / place.slot_s)
    return PlannedNeed(max(row), reason, max(place.cells[first:later]))


def batch_seconds(place: PlacePlan, now: datetime, within_s: float) -> float:
    """Requests at once times seconds that batches may have from `now` on within a time. Beyond the end of the plan the
    mean of its day."""
    if not place.budget:
        return 0.0
    age_s = max(0.0, (now - place.at).total_seconds())
    total, ends_s = 0.0, age_s + within_s
    for slot, requests in enumerate(place.budget):
        begin, end = slot * place.slot_s, (slot + 1) * place.slot_s
        total += requests * max(0.0, min(end, ends_s) - max(begin, age_s))
    beyond_s = ends_s - max(age_s, len(place.budget) * place.slot_s)
    return total + max(0.0, beyond_s) * sum(place.budget) / len(place.budget)


def batch_time_s(place: PlacePlan, now: datetime, work: float) -> float | None:
    """Seconds from `now` until batches may have had so much work, requests at once times seconds; None: never, as the
    day is planned."""
    if not place.budget or not (mean := sum(place.budget) / len(place.budget)):
        return None
    age_s, left = max(0.0, (now - place.at).total_seconds()), work
    for slot, requests in enumerate(place.budget):
        begin, end = max(slot * place.slot_s, age_s), (slot + 1) * place.slot_s
        if end > begin and requests * (end - begin) >= left:
            return begin + left / requests - age_s if left > 0 else 0.0
        left -= requests * max(0.0, end - begin)
    return max(0.0, len(place.budget) * place.slot_s - age_s) + left / mean
