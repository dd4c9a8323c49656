"""What the region autopilot looks at, what it can decide, and the figures it decides by. Pure data.

Decides how the share of each region changes now: relieve at once, everything else in small steps, or hold. Pure.

A region that carries more than its cap, or cannot serve what is sent there, is relieved in one step; so is one that
operators close for real. A region that had no cell left and has some again gets its own requests back in one step: its
ingress sends them elsewhere by itself should the cells fail again. All other changes (load of other regions, nearer,
cheaper, a drill) take at most 10 points per 10 s, and changes below 1 point are left.

While reports are stale, or several regions lost capacity together, it is more likely our view that is wrong than all of
them: then the last table stays, but for what operators order and for requests that come home.

Predicts what evacuating a region, or fixing shares, would do to a deployment once all has moved: who receives what,
how full everybody is then, and what fits nowhere. Pure; it changes nothing and promises no time.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum

from kernel.ages import age_text
from traffic.region_shares.planning.placement import (
    LEAST_DEMAND,
    Placement,
    PlacementProblem,
    ServingRegion,
    place_demand,
)
from traffic.region_shares.planning.policy import (
    Matrix,
    Orders,
    OverrideView,
    Row,
    TrafficPolicy,
    distance,
    loads,
    movement,
    orders_for,
    step_towards,
)


@dataclass(frozen=True, slots=True)
class AutopilotSettings:
    """Shares are of an origin's requests, `_s` seconds. All are from design.md §5 but the last three, which are ours:

    `step_every_s` is the time in which a step's effect is seen, reports and averages included. `fallen_share`: a region
    that lost more than a third of its capacity within a minute goes bad; one that lost a cell of four does not. While
    not everything fits, relief must take at least `worth_relief` of a region's capacity off it to be worth a jump.
    """

    stale_after_s: float = 15.0
    step: float = 0.10
    dead_band: float = 0.01
    step_every_s: float = 10.0
    fallen_share: float = 1 / 3
    worth_relief: float = 0.02


@dataclass(frozen=True, slots=True)
class RegionView:
    """A region that has an ingress. `demand` and capacities are requests at once, `share_lost` is of the last minute
    (see `windows`). `reported_at`: the last report of its ingress that was silent longest; None: one never reported.
    `starting`: it has no capacity yet, and nothing is known of it; its ingress spills by itself until it has.
    `returned`: it had no cell within that minute, once, and has some again."""

    name: str
    demand: float
    capacity: float
    capacity_now: float
    share_lost: float
    reported_at: datetime | None
    starting: bool = False
    returned: bool = False


@dataclass(frozen=True, slots=True)
class TrafficView:
    """All that is decided upon for one deployment. `in_force` has no row of an origin that is new."""

    deployment: str
    regions: tuple[RegionView, ...]
    in_force: Matrix
    moved_at: datetime | None
    policy: TrafficPolicy
    overrides: tuple[OverrideView, ...]
    latency_ms: Mapping[tuple[str, str], float]


class ShiftKind(StrEnum):
    """Why requests move: there was no plan, an operator ordered it, a region cannot carry them, their own region has
    cells again, or it is better so."""

    FIRST = "first"
    ORDERED = "ordered"
    RELIEF = "relief"
    RETURN = "return"
    STEP = "step"


@dataclass(frozen=True, slots=True)
class ShiftTraffic:
    """Take this matrix. `moved` is the share of all requests that goes to another region than before."""

    deployment: str
    matrix: Matrix
    kind: ShiftKind
    moved: float
    reason: str


@dataclass(frozen=True, slots=True)
class HoldTable:
    """Leave the last matrix as it is, though it may be wrong."""

    deployment: str
    reason: str


Decision = ShiftTraffic | HoldTable


def describe_rows(before: Matrix, after: Matrix) -> str:
    """What changes, one part for each origin whose row does; empty if none does."""
    changed = [origin for origin in after if before.get(origin) != after[origin]]
    return "; ".join(f"{origin} -> {_shares(after[origin])}" for origin in changed)


def _shares(row: Row) -> str:
    return ", ".join(f"{region} {share:.1%}" for region, share in sorted(row.items(), key=lambda one: -one[1]))


ROUNDING = 1e-3
"""What shares in hundredths of a point may add to a region's load."""


@dataclass(frozen=True, slots=True)
class Causes:
    """Origin -> why its row takes the target's place at once."""

    ordered: dict[str, str] = field(default_factory=dict)
    relieved: dict[str, str] = field(default_factory=dict)
    returned: dict[str, str] = field(default_factory=dict)

    def __contains__(self, origin: str) -> bool:
        return origin in self.ordered or origin in self.relieved or origin in self.returned

    def __bool__(self) -> bool:
        return bool(self.ordered or self.relieved or self.returned)

    @property
    def summary(self) -> str:
        return "; ".join(dict.fromkeys([*self.ordered.values(), *self.relieved.values(), *self.returned.values()]))


def plan_shift(view: TrafficView, settings: AutopilotSettings, now: datetime) -> Decision | None:
    """What to do about one deployment now; None: all is where it should be, or on its way."""
    orders = orders_for(view.deployment, view.overrides, now)
    task = placement_problem(view, orders)
    target = place_demand(task)
    ordered = _ordered(view, orders, target)
    returned = _returned(view, task, target, settings, now)
    if held := reason_to_hold(view, settings, now):
        causes = Causes(ordered, returned=returned)
        return _shift(view, task, _adopting(view, target, causes), causes) or HoldTable(view.deployment, held)
    causes = Causes(ordered, _relieved(view, task, target, settings), returned)
    matrix = _adopting(view, target, causes)
    if view.moved_at is None or (now - view.moved_at).total_seconds() >= settings.step_every_s:
        matrix = _stepping(matrix, target, settings)
    if target.fits and not _respects_caps(task, matrix):
        # Rows that move apart from each other meet somewhere: all move alike instead.
        matrix = dict(target.matrix) if causes else _alike(view.in_force, target, settings)
    return _shift(view, task, matrix, causes)


def placement_problem(view: TrafficView, orders: Orders) -> PlacementProblem:
    """What is to be placed, with what regions carry under the table in force. An origin that is new and starts is at
    home: its requests would else go to a region that may have no cell either, and come back in steps."""
    demand = {region.name: max(region.demand, LEAST_DEMAND) for region in view.regions}
    at_home = {region.name: {region.name: 1.0} for region in view.regions if region.starting}
    carried = loads({**at_home, **view.in_force}, demand)
    guests = {name for origin, row in view.in_force.items() for name in row if name != origin}
    places = {
        region.name: _place(region, carried.get(region.name, 0.0), view.policy, has_guests=region.name in guests)
        for region in view.regions
    }
    return PlacementProblem(demand, places, view.policy, orders, view.latency_ms)


def _place(region: RegionView, carried: float, policy: TrafficPolicy, *, has_guests: bool) -> ServingRegion:
    """A region that starts keeps what it has: it would else send all of it away, to take it back in steps. What a
    region has again is planned for its own origin. `has_guests`: it serves other origins, and so it was never empty."""
    holds = carried / policy.utilisation_cap if region.starting else 0.0
    starts = region.starting and region.capacity_now <= 0
    returned = region.returned and not has_guests
    capacity = region.capacity_now if returned else region.capacity
    return ServingRegion(region.name, capacity, max(region.capacity_now, holds), carried, starts, returned)


def reason_to_hold(view: TrafficView, settings: AutopilotSettings, now: datetime) -> str:
    """Why nothing that was seen may be acted upon; empty: it may."""
    ages = {one.name: _age_s(one, now) for one in view.regions}
    stale = [
        f"{name} for {age_text(age_s)}" if age_s < math.inf else f"{name} never"
        for name, age_s in ages.items()
        if age_s > settings.stale_after_s
    ]
    if stale:
        return f"no fresh report: {', '.join(stale)}"
    fallen = [region for region in view.regions if region.share_lost > settings.fallen_share]
    if len(fallen) < 2:
        return ""
    shares = ", ".join(f"{region.name} {region.share_lost:.0%}" for region in fallen)
    return f"several regions lost capacity within a minute: {shares}"


def _age_s(region: RegionView, now: datetime) -> float:
    """Of the last report of its ingress that was silent longest."""
    return (now - region.reported_at).total_seconds() if region.reported_at else math.inf


def _ordered(view: TrafficView, orders: Orders, target: Placement) -> dict[str, str]:
    """Origin -> what an operator ordered, or that it is new."""
    causes = {}
    for origin, row in target.matrix.items():
        before = view.in_force.get(origin)
        if before is None:
            causes[origin] = "first plan"
        elif row == before:
            continue
        elif origin in orders.rows:
            causes[origin] = f"the shares of {origin} are fixed by an override"
        elif closed := _names(region for region in before if region in orders.closed and region not in row):
            causes[origin] = f"{closed} is evacuated"
        elif barred := _names(region for region in before if not view.policy.may_serve(origin, region)):
            causes[origin] = f"residency keeps requests of {origin} out of {barred}"
    return causes


def _names(regions: Iterable[str]) -> str:
    return ", ".join(sorted(regions))


def _relieved(
    view: TrafficView, task: PlacementProblem, target: Placement, settings: AutopilotSettings
) -> dict[str, str]:
    """Origin -> which region its row burdens with more than it can carry, where the target is better."""
    after = loads(target.matrix, task.demand)
    causes: dict[str, str] = {}
    for name in sorted({region for row in view.in_force.values() for region in row}):
        reason = _overload(task, name, after.get(name, 0.0), target.fits, settings)
        for origin, row in view.in_force.items():
            if reason and origin in target.matrix and row.get(name, 0.0) > target.matrix[origin].get(name, 0.0):
                causes.setdefault(origin, reason)
    return causes


def _returned(
    view: TrafficView, task: PlacementProblem, target: Placement, settings: AutopilotSettings, now: datetime
) -> dict[str, str]:
    """Origins whose own ingresses see their cells again, which would serve more of their requests than they do."""
    return {
        region.name: f"{region.name} has healthy cells again"
        for region in view.regions
        if task.places[region.name].returned and _age_s(region, now) <= settings.stale_after_s
        if target.matrix[region.name].get(region.name, 0.0) > view.in_force.get(region.name, {}).get(region.name, 0.0)
    }


def _overload(task: PlacementProblem, region: str, after: float, fits: bool, settings: AutopilotSettings) -> str:
    """Why a region must be relieved at once; empty: it need not, or would gain too little."""
    place = task.places.get(region)
    if place is None:
        return f"{region} has no ingress any more"
    if place.capacity_now <= 0:
        return f"{region} has no healthy cell"
    gain = place.carried - after
    worth = LEAST_DEMAND if fits else settings.worth_relief * place.capacity_now
    if place.carried <= task.cap(region) * (1 + ROUNDING) + LEAST_DEMAND or gain <= worth:
        return ""
    return (
        f"{region} has {place.carried:.1f} requests at once and was tested for {place.capacity_now:g}, "
        f"of which {task.policy.utilisation_cap:.0%} are used"
    )


def _adopting(view: TrafficView, target: Placement, causes: Causes) -> dict[str, Row]:
    """The table in force, with the target's rows where there is a cause. Origins that are gone drop out."""
    return {
        origin: row if origin in causes else view.in_force.get(origin, row) for origin, row in target.matrix.items()
    }


def _stepping(matrix: Matrix, target: Placement, settings: AutopilotSettings) -> dict[str, Row]:
    """Every row a step nearer to its target, if it is not there already but for the dead band."""
    return {
        origin: row
        if distance(row, target.matrix[origin]) < settings.dead_band
        else step_towards(row, target.matrix[origin], settings.step, origin)
        for origin, row in matrix.items()
    }


def _alike(in_force: Matrix, target: Placement, settings: AutopilotSettings) -> dict[str, Row]:
    """Every row the same part of its way, none more than a step: between two tables that fit, all tables fit."""
    ways = {origin: distance(row, target.matrix[origin]) for origin, row in in_force.items() if origin in target.matrix}
    part = min([1.0, *(settings.step / way for way in ways.values() if way > 0)])
    return {
        origin: step_towards(in_force[origin], target.matrix[origin], part * way, origin)
        if way > 0
        else in_force[origin]
        for origin, way in ways.items()
    }


def _respects_caps(task: PlacementProblem, matrix: Matrix) -> bool:
    carried = loads(matrix, task.demand)
    return all(carried.get(name, 0.0) <= task.cap(name) * (1 + ROUNDING) + LEAST_DEMAND for name in task.places)


def _shift(view: TrafficView, task: PlacementProblem, matrix: Matrix, causes: Causes) -> ShiftTraffic | None:
    if matrix == view.in_force:
        return None
    ranked = {ShiftKind.RELIEF: causes.relieved, ShiftKind.ORDERED: causes.ordered, ShiftKind.RETURN: causes.returned}
    kind = next((kind for kind, origins in ranked.items() if origins), ShiftKind.STEP)
    return ShiftTraffic(
        deployment=view.deployment,
        matrix=matrix,
        kind=kind if view.in_force else ShiftKind.FIRST,
        moved=movement(view.in_force, matrix, task.demand),
        reason=f"{causes.summary or 'a step towards the plan'}: {describe_rows(view.in_force, matrix)}",
    )


@dataclass(frozen=True, slots=True)
class RegionEffect:
    """A serving region before and after, in requests at once. Utilisations are of its capacity; None: it has none."""

    region: str
    capacity: float
    load_before: float
    load_after: float

    @property
    def receives(self) -> float:
        return self.load_after - self.load_before

    @property
    def utilisation_before(self) -> float | None:
        return self.load_before / self.capacity if self.capacity > 0 else None

    @property
    def utilisation_after(self) -> float | None:
        return self.load_after / self.capacity if self.capacity > 0 else None


@dataclass(frozen=True, slots=True)
class OverrideEffect:
    """What an order would do to one deployment. `unplaced`: requests at once that fit below no cap, by origin."""

    deployment: str
    matrix: Matrix
    regions: tuple[RegionEffect, ...]
    unplaced: dict[str, float]
    over_cap: tuple[str, ...]


def preview_override(view: TrafficView, order: OverrideView, now: datetime) -> OverrideEffect:
    """The deployment after `order` was carried out beside those that hold already."""
    # In the end the capacity of this moment counts, not the least of a minute, nor that there was none.
    regions_then = (replace(one, capacity=one.capacity_now, returned=False) for one in view.regions)
    settled = replace(view, regions=tuple(regions_then))
    task = placement_problem(settled, orders_for(view.deployment, (*view.overrides, order), now))
    placed = place_demand(task)
    after = loads(placed.matrix, task.demand)
    regions = tuple(
        RegionEffect(one.name, one.capacity_now, task.places[one.name].carried, after.get(one.name, 0.0))
        for one in sorted(view.regions, key=lambda one: one.name)
    )
    over = tuple(
        one.region for one in regions if one.load_after > task.cap(one.region) * 1.001 and one.load_after > 0.01
    )
    return OverrideEffect(view.deployment, placed.matrix, regions, dict(placed.unplaced), over)
