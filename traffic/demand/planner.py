"""Derives the demand of each series, and its mean over a slot, from reports of ingresses and cells; and the concurrency
needed to finish queued work in time. Pure.

An ingress counts requests in its own cells, from any region, and requests that it sent to other regions. The load of a
region's applications is the sum, less what other regions sent there. Requests from a silent region count where they are
served. Ingresses do not count serving classes, so cells' reports divide the load. Any queued work needs a minimum, so
that it has a cell, and more as deadlines approach."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from engine_agent.protocol.states import ServingClass
from fleet.capacity.planning.forecast_series import HISTORY_SLOT_S, SeriesKey

COVERED_LEAST = 0.8
"""Share of a slot that must have been observed; otherwise it is a gap."""
LONGEST_LOOK_S = 20.0
"""A sample counts for at most this long; later time is unknown."""

BATCH_CLASS = ServingClass.BATCH.value
Place = tuple[str, str]
"""Deployment, region."""


@dataclass(frozen=True, slots=True)
class PoolSample:
    """A deployment at the ingresses of a region: `here` counts requests in its cells or waiting for one, `sent` those
    at other regions; `sent_to` is the total sent to each region since the ingresses started."""

    here: float
    sent: float = 0.0
    sent_to: Mapping[str, float] = field(default_factory=dict)

    def __add__(self, other: "PoolSample") -> "PoolSample":
        regions = self.sent_to.keys() | other.sent_to.keys()
        sent_to = {region: self.sent_to.get(region, 0.0) + other.sent_to.get(region, 0.0) for region in regions}
        return PoolSample(self.here + other.here, self.sent + other.sent, sent_to)


def origin_loads(pools: Mapping[str, PoolSample], before: Mapping[str, PoolSample]) -> dict[str, float]:
    """Returns concurrent requests of each reporting region's applications. Requests at other regions are divided by
    what was sent to each since the previous sample, or in all if nothing was."""
    loads = {region: pool.here + pool.sent for region, pool in pools.items()}
    for region, pool in pools.items():
        went = _sent_by_region(pool, before.get(region))
        total = sum(went.values())
        for other, count in went.items():
            if other in loads and total > 0:
                loads[other] -= pool.sent * count / total
    return {region: max(0.0, load) for region, load in loads.items()}


def _sent_by_region(pool: PoolSample, before: PoolSample | None) -> Mapping[str, float]:
    known = before.sent_to if before else {}
    grown = {region: max(0.0, total - known.get(region, 0.0)) for region, total in pool.sent_to.items()}
    return grown if sum(grown.values()) > 0 else pool.sent_to


def series_loads(
    deployment: str, own_class: str, origins: Mapping[str, float], in_cells: Mapping[Place, Mapping[str, float]]
) -> dict[SeriesKey, float]:
    """Returns the load of each origin by class, divided as in that region's cells, or else in all cells of the
    deployment, or else all in its own class. `in_cells` has concurrent requests by class, as leaders report them."""
    everywhere: dict[str, float] = defaultdict(float)
    for (name, _), classes in in_cells.items():
        for serving_class, count in classes.items() if name == deployment else ():
            everywhere[serving_class] += count
    loads = {}
    for origin, load in origins.items():
        there = in_cells.get((deployment, origin), {})
        split = there if sum(there.values()) > 0 else everywhere if sum(everywhere.values()) > 0 else {own_class: 1.0}
        total = sum(split.values())
        for serving_class in {own_class, *split}:
            share = split.get(serving_class, 0.0) / total
            loads[SeriesKey(deployment, origin, serving_class)] = load * share
    return loads


def batch_work_share(cells: Iterable[Mapping[str, float]]) -> float:
    """Returns the share of batch work in cells, 0 to 1. Each cell has the same weight regardless of its numbers, so a
    wrong one changes only its own part."""
    shares = [classes.get(BATCH_CLASS, 0.0) / total for classes in cells if (total := sum(classes.values())) > 0]
    return sum(shares) / len(shares) if shares else 0.0


class SlotMeans:
    """Samples of the current slot. Each counts for the time since the previous one."""

    def __init__(self, index: int) -> None:
        self.index = index
        self._seen_until_s = float(index * HISTORY_SLOT_S)
        self._sums: dict[SeriesKey, float] = defaultdict(float)
        self._seen_s: dict[Place, float] = defaultdict(float)

    def add(self, at_s: float, places: Iterable[Place], loads: Mapping[SeriesKey, float]) -> None:
        """Adds a sample. `places` are the deployments and origin regions that it covers."""
        seen_s = min(max(0.0, at_s - self._seen_until_s), LONGEST_LOOK_S)
        self._seen_until_s = max(self._seen_until_s, at_s)
        for place in places:
            self._seen_s[place] += seen_s
        for key, load in loads.items():
            self._sums[key] += load * seen_s

    def means(self, known: Iterable[SeriesKey]) -> dict[SeriesKey, float]:
        """Returns the means of series that were observed long enough and have, or had, load."""
        keys = {*known, *(key for key, total in self._sums.items() if total > 0)}
        whole = {place: seen_s for place, seen_s in self._seen_s.items() if seen_s >= COVERED_LEAST * HISTORY_SLOT_S}
        return {
            key: round(self._sums.get(key, 0.0) / whole[key.deployment, key.origin], 4)
            for key in keys
            if (key.deployment, key.origin) in whole
        }


def slot_of(at_s: float) -> int:
    """Returns the number of the slot since 1970."""
    return int(at_s // HISTORY_SLOT_S)


LEAST_LEFT_S = 60.0
"""Nearer deadlines ask for no more; otherwise they would ask for the whole fleet for a second."""


@dataclass(frozen=True, slots=True)
class QueuedWork:
    """`requests` in queues; `per_s` is the sum of 1 / (seconds to the deadline)."""

    requests: float = 0.0
    per_s: float = 0.0

    def __add__(self, other: "QueuedWork") -> "QueuedWork":
        return QueuedWork(self.requests + other.requests, self.per_s + other.per_s)


def work_until(requests: int, left_s: float) -> QueuedWork:
    """Returns requests that share a deadline."""
    return QueuedWork(requests, requests / max(left_s, LEAST_LEFT_S))


def requests_at_once(work: QueuedWork, service_s: float | None) -> float:
    """Returns the concurrency by Little's law, at most the number of requests; one if the service time is unknown."""
    if work.requests <= 0:
        return 0.0
    return min(work.requests, work.per_s * service_s if service_s is not None else 1.0)
