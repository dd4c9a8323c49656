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
FACTOR_STEP = 1 / 32
"""Precision of the multiple that a deployment carries."""


@dataclass(frozen=True, slots=True)
class Stress:
    """A deployment under `load` concurrent requests at its worst moment from `at` on, without the lost regions:
    `unplaced` find no room below the utilisation cap and wait, so that their time to first token grows. It carries up
    to `holds_until` times the forecast; `HIGHEST_FACTOR` means at least that. `first`: the region whose requests are
    the first without room, "" if it carries every multiple."""

    deployment: str
    at: datetime
    load: float
    unplaced: float
    holds_until: float
    first: str = ""

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
    """Each deployment at `factor` times its forecast without the `lost` regions, the first to break first."""
    rows = []
    for one in _with_slots(deployments):
        slot, until = _worst_moment(one, lost, latency_ms)
        without_room = _without_room(one, slot, lost, latency_ms, factor) if factor > until else {}
        broken = without_room or _without_room(one, slot, lost, latency_ms, until + FACTOR_STEP)
        first = max(broken, key=lambda region: (broken[region], region)) if until < HIGHEST_FACTOR and broken else ""
        at = one.at + timedelta(seconds=slot * one.slot_s)
        load = factor * sum(place.demand[slot] for place in one.places.values())
        rows.append(Stress(one.name, at, load, sum(without_room.values()), until, first))
    return tuple(sorted(rows, key=first_to_break))


def first_to_break(row: Stress) -> tuple[float, float, str]:
    """Sorts the first deployment to break first."""
    return row.holds_until, -row.unplaced, row.deployment


def _worst_moment(
    one: ExpectedDeployment, lost: Collection[str], latency_ms: Mapping[tuple[str, str], float]
) -> tuple[int, float]:
    """The slot that breaks first, and the greatest multiple of the forecast that finds room in it, to the precision of
    `FACTOR_STEP`. Looks at the slots in which the load, an origin's load or the use of what remains is highest: all 96
    would take ten times as long."""
    peak, until = _peak(one)[0], HIGHEST_FACTOR
    worst = peak
    for slot in dict.fromkeys((peak, *_tight_slots(one, lost))):
        if not _holds(one, slot, lost, latency_ms, until):
            worst, until = slot, _holds_until(one, slot, lost, latency_ms, until)
    return worst, until


def _tight_slots(one: ExpectedDeployment, lost: Collection[str]) -> Iterator[int]:
    places = one.places.values()
    slots = range(len(next(iter(places)).demand) if one.places else 0)
    left = [place for region, place in one.places.items() if region not in lost]

    def use(slot: int) -> float:
        room = sum(place.capacity[slot] for place in left)
        return sum(place.demand[slot] for place in places) / room if room > 0 else 0.0

    if slots:
        yield max(slots, key=lambda slot: (use(slot), -slot))
        yield from (max(slots, key=lambda slot: (place.demand[slot], -slot)) for place in places)


def _holds(
    one: ExpectedDeployment,
    slot: int,
    lost: Collection[str],
    latency_ms: Mapping[tuple[str, str], float],
    factor: float,
) -> bool:
    return sum(_without_room(one, slot, lost, latency_ms, factor).values()) <= LEAST_DEMAND * len(one.places)


def _holds_until(
    one: ExpectedDeployment,
    slot: int,
    lost: Collection[str],
    latency_ms: Mapping[tuple[str, str], float],
    broken: float,
) -> float:
    """Between 0 and the multiple `broken`, at which it does not hold."""
    low, high = 0.0, broken
    while high - low > FACTOR_STEP:
        middle = (low + high) / 2
        low, high = (middle, high) if _holds(one, slot, lost, latency_ms, middle) else (low, middle)
    return low


def plan_region_losses(
    deployments: Sequence[ExpectedDeployment], latency_ms: Mapping[tuple[str, str], float]
) -> dict[str, tuple[Shortage, ...]]:
    """Lost region -> its shortages, the largest first. `latency_ms` has every pair of regions."""
    found: dict[str, list[Shortage]] = {}
    for one in _with_slots(deployments):
        slot, load = _peak(one)
        before = sum(_without_room(one, slot, (), latency_ms).values())
        for region in one.places:
            more = sum(_without_room(one, slot, (region,), latency_ms).values()) - before
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


def _without_room(
    one: ExpectedDeployment,
    slot: int,
    lost: Collection[str],
    latency_ms: Mapping[tuple[str, str], float],
    factor: float = 1.0,
) -> Mapping[str, float]:
    """Origin -> concurrent requests that find no room."""
    demand = {region: max(LEAST_DEMAND, factor * place.demand[slot]) for region, place in one.places.items()}
    places = {
        region: ServingRegion(region, place.capacity[slot], place.capacity[slot])
        for region, place in one.places.items()
        if region not in lost
    }
    task = PlacementProblem(demand, places, one.policy, ActiveOverrides(), latency_ms)
    return place_demand(task).unplaced
