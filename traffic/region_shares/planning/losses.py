"""Finds deployments that lack capacity if regions are lost when their load peaks in the next day (N+1), and the
multiple of that peak that each carries. Pure. Requests that arrive in a lost region count as if they arrived
elsewhere: they go where residency and room let them."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from traffic.region_shares.planning.placement import LEAST_DEMAND, PlacementProblem, ServingRegion, place_demand
from traffic.region_shares.planning.policy import ActiveOverrides, TrafficPolicy


@dataclass(frozen=True, slots=True)
class ExpectedPlace:
    """A deployment in a region: `demand` that arrives there (p90), and tested `capacity`, both in concurrent requests
    by slot."""

    demand: Sequence[float]
    capacity: Sequence[float]


@dataclass(frozen=True, slots=True)
class ExpectedDeployment:
    """`places` by region. All have the same number of slots of `slot_s` seconds from `at` on."""

    name: str
    at: datetime
    slot_s: int
    places: Mapping[str, ExpectedPlace]
    policy: TrafficPolicy


@dataclass(frozen=True, slots=True)
class Shortage:
    """Of `load` concurrent requests in the peak slot from `at` on, `unplaced` find no room below the utilisation cap
    once the region is lost, beyond those that find none in any case."""

    deployment: str
    at: datetime
    load: float
    unplaced: float


HIGHEST_FACTOR = 16.0
"""Multiples of the peak above it count as "holds"."""
FACTOR_STEPS = 9
"""Halvings of the search for the multiple that a deployment carries: to 1/32 of the peak."""


@dataclass(frozen=True, slots=True)
class Stress:
    """A deployment under `load` concurrent requests at its peak from `at` on, without the lost regions: `unplaced` find
    no room below the utilisation cap. It carries up to `holds_until` times the forecast peak; `HIGHEST_FACTOR` means at
    least that."""

    deployment: str
    at: datetime
    load: float
    unplaced: float
    holds_until: float

    @property
    def breaks(self) -> bool:
        return self.unplaced > 0


def plan_stress(
    deployments: Sequence[ExpectedDeployment],
    latency_ms: Mapping[tuple[str, str], float],
    *,
    factor: float,
    lost: Collection[str],
) -> tuple[Stress, ...]:
    """Each deployment at `factor` times its forecast peak without the `lost` regions, the first to break first."""
    rows = []
    for one in _with_slots(deployments):
        slot, peak = _peak(one)
        until = _holds_until(one, slot, lost, latency_ms)
        unplaced = _unplaced(one, slot, lost, latency_ms, factor) if factor > until else 0.0
        at = one.at + timedelta(seconds=slot * one.slot_s)
        rows.append(Stress(one.name, at, factor * peak, unplaced, until))
    return tuple(sorted(rows, key=lambda row: (row.holds_until, -row.unplaced, row.deployment)))


def _holds_until(
    one: ExpectedDeployment, slot: int, lost: Collection[str], latency_ms: Mapping[tuple[str, str], float]
) -> float:
    """The greatest multiple of the peak that finds room, to the precision of `FACTOR_STEPS`."""

    def holds(factor: float) -> bool:
        return _unplaced(one, slot, lost, latency_ms, factor) <= LEAST_DEMAND * len(one.places)

    if holds(HIGHEST_FACTOR):
        return HIGHEST_FACTOR
    low, high = 0.0, HIGHEST_FACTOR
    for _ in range(FACTOR_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def plan_region_losses(
    deployments: Sequence[ExpectedDeployment], latency_ms: Mapping[tuple[str, str], float]
) -> dict[str, tuple[Shortage, ...]]:
    """Lost region -> its shortages, the largest first. `latency_ms` has every pair of regions."""
    found: dict[str, list[Shortage]] = {}
    for one in _with_slots(deployments):
        slot, load = _peak(one)
        before = _unplaced(one, slot, (), latency_ms)
        for region in one.places:
            more = _unplaced(one, slot, (region,), latency_ms) - before
            rows = found.setdefault(region, [])
            if more > LEAST_DEMAND * len(one.places):
                rows.append(Shortage(one.name, one.at + timedelta(seconds=slot * one.slot_s), load, more))
    return {
        region: tuple(sorted(rows, key=lambda row: (-row.unplaced, row.deployment))) for region, rows in found.items()
    }


def _with_slots(deployments: Sequence[ExpectedDeployment]) -> Iterator[ExpectedDeployment]:
    """A forecast without slots says nothing about the next day."""
    return (one for one in deployments if all(place.demand and place.capacity for place in one.places.values()))


def _peak(one: ExpectedDeployment) -> tuple[int, float]:
    """The slot with the highest load over all regions, and that load."""
    totals = [sum(slots) for slots in zip(*(place.demand for place in one.places.values()), strict=True)]
    slot = max(range(len(totals)), key=lambda number: (totals[number], -number), default=0)
    return slot, totals[slot] if totals else 0.0


def _unplaced(
    one: ExpectedDeployment,
    slot: int,
    lost: Collection[str],
    latency_ms: Mapping[tuple[str, str], float],
    factor: float = 1.0,
) -> float:
    demand = {region: max(LEAST_DEMAND, factor * place.demand[slot]) for region, place in one.places.items()}
    places = {
        region: ServingRegion(region, place.capacity[slot], place.capacity[slot])
        for region, place in one.places.items()
        if region not in lost
    }
    task = PlacementProblem(demand, places, one.policy, ActiveOverrides(), latency_ms)
    return sum(place_demand(task).unplaced.values())
