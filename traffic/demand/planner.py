"""From what ingresses and cells report to the demand of each series, and its mean over a slot. Pure.

An ingress counts what it gives its own cells, wherever that came from, and what it has sent to other regions. So what a
region's applications have under way is both, less what other regions sent there. What a silent region sends counts
where it is served. Classes are told apart by cells: an ingress does not count them.

How many requests at once it takes to be done in time with what batches and near-real-time requests queue. Pure.

Whatever is queued takes a little, so that there is a cell for it; and as its deadlines come nearer, more.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from engine_agent.protocol.states import ServingClass
from fleet.capacity.planning.forecast_series import HISTORY_SLOT_S, SeriesKey

COVERED_LEAST = 0.8
"""Of a slot that must have been seen of a series; less is a hole."""
LONGEST_LOOK_S = 20.0
"""For so long a look counts at most; of what comes after it nothing is known."""

GUEST = ServingClass.BATCH.value
Place = tuple[str, str]
"""Deployment, region."""


@dataclass(frozen=True, slots=True)
class PoolLook:
    """A deployment at the ingresses of a region: `here` are requests with its cells or waiting for one, `sent` those
    that are with other regions; `sent_to`: by region, how many went there since its ingresses started."""

    here: float
    sent: float = 0.0
    sent_to: Mapping[str, float] = field(default_factory=dict)

    def __add__(self, other: "PoolLook") -> "PoolLook":
        regions = self.sent_to.keys() | other.sent_to.keys()
        sent_to = {region: self.sent_to.get(region, 0.0) + other.sent_to.get(region, 0.0) for region in regions}
        return PoolLook(self.here + other.here, self.sent + other.sent, sent_to)


def origin_loads(pools: Mapping[str, PoolLook], before: Mapping[str, PoolLook]) -> dict[str, float]:
    """Requests at once of the applications of each region that reported. What is with other regions is laid to them as
    what went there since the look before; if nothing did, as all that ever did."""
    loads = {region: pool.here + pool.sent for region, pool in pools.items()}
    for region, pool in pools.items():
        went = _went(pool, before.get(region))
        total = sum(went.values())
        for other, count in went.items():
            if other in loads and total > 0:
                loads[other] -= pool.sent * count / total
    return {region: max(0.0, load) for region, load in loads.items()}


def _went(pool: PoolLook, before: PoolLook | None) -> Mapping[str, float]:
    known = before.sent_to if before else {}
    grown = {region: max(0.0, total - known.get(region, 0.0)) for region, total in pool.sent_to.items()}
    return grown if sum(grown.values()) > 0 else pool.sent_to


def series_loads(
    deployment: str, own_class: str, origins: Mapping[str, float], in_cells: Mapping[Place, Mapping[str, float]]
) -> dict[SeriesKey, float]:
    """The load of each origin by class: as the cells of that region tell them apart, else as all of the deployment do,
    else all of its own class. `in_cells`: requests at once by class, as leaders report them."""
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


def guest_share(cells: Iterable[Mapping[str, float]]) -> float:
    """Which part of what cells work on is batch work, from 0 to 1, by what each says of itself: requests at once by
    class. Each counts alike, whatever numbers it claims, so one that lies moves it by its own part."""
    shares = [classes.get(GUEST, 0.0) / total for classes in cells if (total := sum(classes.values())) > 0]
    return sum(shares) / len(shares) if shares else 0.0


class SlotMeans:
    """What was seen of one slot so far. Each look counts for the time since the one before it."""

    def __init__(self, index: int) -> None:
        self.index = index
        self._seen_until_s = float(index * HISTORY_SLOT_S)
        self._sums: dict[SeriesKey, float] = defaultdict(float)
        self._seen_s: dict[Place, float] = defaultdict(float)

    def add(self, at_s: float, places: Iterable[Place], loads: Mapping[SeriesKey, float]) -> None:
        """A look within this slot. `places`: deployments in origin regions of which it tells."""
        seen_s = min(max(0.0, at_s - self._seen_until_s), LONGEST_LOOK_S)
        self._seen_until_s = max(self._seen_until_s, at_s)
        for place in places:
            self._seen_s[place] += seen_s
        for key, load in loads.items():
            self._sums[key] += load * seen_s

    def means(self, known: Iterable[SeriesKey]) -> dict[SeriesKey, float]:
        """Of all series that were seen for long enough and have load, or are known to have had some."""
        keys = {*known, *(key for key, total in self._sums.items() if total > 0)}
        whole = {place: seen_s for place, seen_s in self._seen_s.items() if seen_s >= COVERED_LEAST * HISTORY_SLOT_S}
        return {
            key: round(self._sums.get(key, 0.0) / whole[key.deployment, key.origin], 4)
            for key in keys
            if (key.deployment, key.origin) in whole
        }


def slot_of(at_s: float) -> int:
    """The number of the slot that a moment is in, since 1970."""
    return int(at_s // HISTORY_SLOT_S)


LEAST_LEFT_S = 60.0
"""A deadline that is nearer asks for no more: it would ask for the whole fleet for a second."""


@dataclass(frozen=True, slots=True)
class QueuedWork:
    """`requests` that are queued; `per_s`: of each, one over the seconds that are left for it, summed up."""

    requests: float = 0.0
    per_s: float = 0.0

    def __add__(self, other: "QueuedWork") -> "QueuedWork":
        return QueuedWork(self.requests + other.requests, self.per_s + other.per_s)


def work_until(requests: int, left_s: float) -> QueuedWork:
    """So many requests that share a deadline."""
    return QueuedWork(requests, requests / max(left_s, LEAST_LEFT_S))


def requests_at_once(work: QueuedWork, service_s: float | None) -> float:
    """By Little's law, and no more than there are. Where nobody knows how long one takes it is one at a time."""
    if work.requests <= 0:
        return 0.0
    return min(work.requests, work.per_s * service_s if service_s is not None else 1.0)
