"""Decides how each region's shares change now, or that they stay. Pure.

A region above its cap or without capacity for its share is relieved in one step, and so is one that is evacuated for
real. A region that regains its cells gets its own requests back in one step; its ingress spills if the cells fail
again. Other changes (load, latency, price, drills) take at most 10 points per 10 s; changes below 1 point are skipped.
While reports are stale, or several regions lose capacity together, the observation is probably wrong, so the table
stays, except for overrides and returning requests.

It also predicts the effect of an override once all shifts are complete, without predicting their duration."""

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
    ActiveOverrides,
    Matrix,
    OverrideView,
    Row,
    TrafficPolicy,
    distance,
    loads,
    movement,
    overrides_for,
    step_towards,
)


@dataclass(frozen=True, slots=True)
class AutopilotSettings:
    """Shares are of an origin's requests; times are in seconds. All but the last three values are from design.md §5.
    `step_every_s` covers the delay until a step's effect is measured. `fallen_share`: a region that lost over a third
    of its capacity within a minute is unhealthy; one of four lost cells is not enough. While demand exceeds the room,
    relief must shed at least `worth_relief` of a region's capacity."""

    stale_after_s: float = 15.0
    step: float = 0.10
    dead_band: float = 0.01
    step_every_s: float = 10.0
    fallen_share: float = 1 / 3
    worth_relief: float = 0.02


@dataclass(frozen=True, slots=True)
class RegionView:
    """A region with an ingress. `demand` and capacities are in concurrent requests; `share_lost` covers the last minute
    (see `load`). `reported_at` is the last report of the ingress that has been silent longest, or None if one never
    reported. `starting`: it never had capacity, and its ingress spills meanwhile. `returned`: it lost all cells within
    that minute, once, and has some again."""

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
    """Input of the decision for one deployment. `in_force` has no row for a new origin."""

    deployment: str
    regions: tuple[RegionView, ...]
    in_force: Matrix
    moved_at: datetime | None
    policy: TrafficPolicy
    overrides: tuple[OverrideView, ...]
    latency_ms: Mapping[tuple[str, str], float]


class ShiftKind(StrEnum):
    """Why requests move: no plan before, an override, an overloaded region, an origin whose cells returned, or a better
    placement."""

    FIRST = "first"
    ORDERED = "ordered"
    RELIEF = "relief"
    RETURN = "return"
    STEP = "step"


@dataclass(frozen=True, slots=True)
class ShiftTraffic:
    """`moved` is the share of all requests that changes region."""

    deployment: str
    matrix: Matrix
    kind: ShiftKind
    moved: float
    reason: str


@dataclass(frozen=True, slots=True)
class KeepTable:
    """Keep the last matrix although it may be outdated."""

    deployment: str
    reason: str


Decision = ShiftTraffic | KeepTable


def describe_rows(before: Matrix, after: Matrix) -> str:
    """Returns one part per origin whose row changes, or an empty text."""
    changed = [origin for origin in after if before.get(origin) != after[origin]]
    return "; ".join(f"{origin} -> {_shares_text(after[origin])}" for origin in changed)


def _shares_text(row: Row) -> str:
    return ", ".join(f"{region} {share:.1%}" for region, share in sorted(row.items(), key=lambda one: -one[1]))


ROUNDING = 1e-3
"""Rounding shares to hundredths of a point may add this to a region's load."""


@dataclass(frozen=True, slots=True)
class Causes:
    """Maps an origin to the reason why its row takes the target's place in one step."""

    overridden: dict[str, str] = field(default_factory=dict)
    relieved: dict[str, str] = field(default_factory=dict)
    returned: dict[str, str] = field(default_factory=dict)

    def __contains__(self, origin: str) -> bool:
        return origin in self.overridden or origin in self.relieved or origin in self.returned

    def __bool__(self) -> bool:
        return bool(self.overridden or self.relieved or self.returned)

    @property
    def summary(self) -> str:
        return "; ".join(dict.fromkeys([*self.overridden.values(), *self.relieved.values(), *self.returned.values()]))


def plan_shift(view: TrafficView, settings: AutopilotSettings, now: datetime) -> Decision | None:
    """Returns what to do for one deployment, or None if the shares are right or the next step is not due."""
    active = overrides_for(view.deployment, view.overrides, now)
    task = placement_problem(view, active)
    target = place_demand(task)
    overridden = _overridden_origins(view, active, target)
    returned = _returned_origins(view, task, target, settings, now)
    if held := reason_to_keep_table(view, settings, now):
        causes = Causes(overridden, returned=returned)
        return _shift_of(view, task, _adopt_rows(view, target, causes), causes) or KeepTable(view.deployment, held)
    causes = Causes(overridden, _relieved_origins(view, task, target, settings), returned)
    matrix = _adopt_rows(view, target, causes)
    if view.moved_at is None or (now - view.moved_at).total_seconds() >= settings.step_every_s:
        matrix = _step_rows(matrix, target, settings)
    if target.fits and not _fits_caps(task, matrix):
        # Rows that move independently could meet in one region, so all move by the same part of their way.
        matrix = dict(target.matrix) if causes else _step_alike(view.in_force, target, settings)
    return _shift_of(view, task, matrix, causes)


def placement_problem(view: TrafficView, active: ActiveOverrides) -> PlacementProblem:
    """Returns the placement problem, with the load of each region under the table in force. A new origin that is
    starting counts as at home: its requests would otherwise leave for a region that may have no cell either, and return
    in steps."""
    demand = {region.name: max(region.demand, LEAST_DEMAND) for region in view.regions}
    at_home = {region.name: {region.name: 1.0} for region in view.regions if region.starting}
    carried = loads({**at_home, **view.in_force}, demand)
    serving_others = {name for origin, row in view.in_force.items() for name in row if name != origin}
    places = {
        region.name: _serving_region(
            region, carried.get(region.name, 0.0), view.policy, serves_others=region.name in serving_others
        )
        for region in view.regions
    }
    return PlacementProblem(demand, places, view.policy, active, view.latency_ms)


def _serving_region(region: RegionView, carried: float, policy: TrafficPolicy, *, serves_others: bool) -> ServingRegion:
    """A starting region keeps its share, since it would otherwise lose all and regain it in steps. Returned capacity is
    planned for its own origin. `serves_others`: it serves other origins, so it was never empty."""
    holds = carried / policy.utilisation_cap if region.starting else 0.0
    starts = region.starting and region.capacity_now <= 0
    returned = region.returned and not serves_others
    capacity = region.capacity_now if returned else region.capacity
    return ServingRegion(region.name, capacity, max(region.capacity_now, holds), carried, starts, returned)


def reason_to_keep_table(view: TrafficView, settings: AutopilotSettings, now: datetime) -> str:
    """Returns why observations must not be acted upon, or an empty text."""
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
    return (now - region.reported_at).total_seconds() if region.reported_at else math.inf


def _overridden_origins(view: TrafficView, active: ActiveOverrides, target: Placement) -> dict[str, str]:
    causes = {}
    for origin, row in target.matrix.items():
        before = view.in_force.get(origin)
        if before is None:
            causes[origin] = "first plan"
        elif row == before:
            continue
        elif origin in active.rows:
            causes[origin] = f"the shares of {origin} are fixed by an override"
        elif closed := _region_names(region for region in before if region in active.closed and region not in row):
            causes[origin] = f"{closed} is evacuated"
        elif barred := _region_names(region for region in before if not view.policy.may_serve(origin, region)):
            causes[origin] = f"residency keeps requests of {origin} out of {barred}"
    return causes


def _region_names(regions: Iterable[str]) -> str:
    return ", ".join(sorted(regions))


def _relieved_origins(
    view: TrafficView, task: PlacementProblem, target: Placement, settings: AutopilotSettings
) -> dict[str, str]:
    after = loads(target.matrix, task.demand)
    causes: dict[str, str] = {}
    for name in sorted({region for row in view.in_force.values() for region in row}):
        reason = _overload_reason(task, name, after.get(name, 0.0), target.fits, settings)
        for origin, row in view.in_force.items():
            if reason and origin in target.matrix and row.get(name, 0.0) > target.matrix[origin].get(name, 0.0):
                causes.setdefault(origin, reason)
    return causes


def _returned_origins(
    view: TrafficView, task: PlacementProblem, target: Placement, settings: AutopilotSettings, now: datetime
) -> dict[str, str]:
    """Origins whose own ingresses see cells again, where the target serves more of their requests at home."""
    return {
        region.name: f"{region.name} has healthy cells again"
        for region in view.regions
        if task.places[region.name].returned and _age_s(region, now) <= settings.stale_after_s
        if target.matrix[region.name].get(region.name, 0.0) > view.in_force.get(region.name, {}).get(region.name, 0.0)
    }


def _overload_reason(task: PlacementProblem, region: str, after: float, fits: bool, settings: AutopilotSettings) -> str:
    """Returns why a region must be relieved in one step, or an empty text if it need not or would gain too little."""
    place = task.places.get(region)
    if place is None:
        return f"{region} no longer has an ingress"
    if place.capacity_now <= 0:
        return f"{region} has no healthy cell"
    gain = place.carried - after
    worth = LEAST_DEMAND if fits else settings.worth_relief * place.capacity_now
    if place.carried <= task.cap(region) * (1 + ROUNDING) + LEAST_DEMAND or gain <= worth:
        return ""
    return (
        f"{region} has {place.carried:.1f} concurrent requests and a tested capacity of {place.capacity_now:g}, "
        f"of which {task.policy.utilisation_cap:.0%} may be used"
    )


def _adopt_rows(view: TrafficView, target: Placement, causes: Causes) -> dict[str, Row]:
    """Returns the table in force with the target's row for each origin that has a cause, without deleted origins."""
    return {
        origin: row if origin in causes else view.in_force.get(origin, row) for origin, row in target.matrix.items()
    }


def _step_rows(matrix: Matrix, target: Placement, settings: AutopilotSettings) -> dict[str, Row]:
    """Moves every row one step towards its target unless it is within the dead band."""
    return {
        origin: row
        if distance(row, target.matrix[origin]) < settings.dead_band
        else step_towards(row, target.matrix[origin], settings.step, origin)
        for origin, row in matrix.items()
    }


def _step_alike(in_force: Matrix, target: Placement, settings: AutopilotSettings) -> dict[str, Row]:
    """Moves every row by the same part of its way, at most one step: every table between two that fit also fits."""
    ways = {origin: distance(row, target.matrix[origin]) for origin, row in in_force.items() if origin in target.matrix}
    part = min([1.0, *(settings.step / way for way in ways.values() if way > 0)])
    return {
        origin: step_towards(in_force[origin], target.matrix[origin], part * way, origin)
        if way > 0
        else in_force[origin]
        for origin, way in ways.items()
    }


def _fits_caps(task: PlacementProblem, matrix: Matrix) -> bool:
    carried = loads(matrix, task.demand)
    return all(carried.get(name, 0.0) <= task.cap(name) * (1 + ROUNDING) + LEAST_DEMAND for name in task.places)


def _shift_of(view: TrafficView, task: PlacementProblem, matrix: Matrix, causes: Causes) -> ShiftTraffic | None:
    if matrix == view.in_force:
        return None
    ranked = {
        ShiftKind.RELIEF: causes.relieved,
        ShiftKind.ORDERED: causes.overridden,
        ShiftKind.RETURN: causes.returned,
    }
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
    """A serving region before and after, in concurrent requests. Utilisations are None without capacity."""

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
    """Effect of an override on one deployment. `unplaced`: concurrent requests that fit below no cap, by origin."""

    deployment: str
    matrix: Matrix
    regions: tuple[RegionEffect, ...]
    unplaced: dict[str, float]
    over_cap: tuple[str, ...]


def preview_override(view: TrafficView, override: OverrideView, now: datetime) -> OverrideEffect:
    """Predicts the deployment's state once `override` is carried out in addition to those in force."""
    # The final state depends on current capacity, not on the minimum of the last minute.
    regions_then = (replace(one, capacity=one.capacity_now, returned=False) for one in view.regions)
    settled = replace(view, regions=tuple(regions_then))
    task = placement_problem(settled, overrides_for(view.deployment, (*view.overrides, override), now))
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
