"""Predicts what evacuating a region, or fixing shares, would do to a deployment once all has moved: who receives what,
how full everybody is then, and what fits nowhere. Pure; it changes nothing and promises no time."""

from dataclasses import dataclass, replace
from datetime import datetime

from traffic.planning.autopilot import placement_problem
from traffic.planning.demand_placement import place_demand
from traffic.planning.matrix import Matrix, loads
from traffic.planning.overrides import OverrideView, orders_for
from traffic.planning.shift import TrafficView


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
