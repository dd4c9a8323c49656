"""How an ingress shares cells with the other ingresses of its region: from the loads that cells report, the limit and
the weight of each cell's server. Pure.

An ingress counts only its own requests. Without the others', two ingresses fill a cell's last places twice, and the
requests above its concurrency wait in the engine, which is worst at a slow cell. So:

- **Limit**: an ingress may have its own requests there and its part of the free places. The parts of all ingresses sum
  to the free places, and are larger while much is free, so that a burst at one ingress finds room. At a full cell, an
  ingress below a quarter of its fair share may add one request per report, and those above it shrink by as much.
- **Weight**: `leastconn` compares own requests divided by weight. The weight is this ingress's part of the cell's
  requests, so that it compares the requests of all ingresses.

A report can only take away: neither exceeds what the routing table says. So a cell that reports too little gets no more
than without reports, and one that reports too much keeps `LEAST_WEIGHT` and one request. A report that its own requests
here contradict is corrected. A cell without a new report keeps its limit and weight."""

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

LEAST_WEIGHT = 0.25
"""Of the table's weight. A cell that is wrongly thought busy gets at least a quarter of its share."""
LEAST_SHARE = 0.25
"""Of a fair share of a full cell: below it, an ingress takes places from the others. With more, short bursts overfill
cells (docs/bench/shared_load.md)."""
WEIGHT_STEP = 0.1
"""A smaller change of a weight is not carried out: each costs HAProxy a lock."""
PLAUSIBLE = 0.5
"""A report counts at least as half of what this ingress's requests there lead to expect."""
COUNT_LAG = 2
KV_FULL_PERCENT = 95.0
"""From here on, an engine preempts sequences sooner than it admits new ones."""
KV_COUNTS_PERCENT = 50.0
"""Below it, the size of the present sequences says little about how many fit."""


Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True, slots=True)
class SeenCell:
    """One cell: `places` and `weight` by the routing table; the rest by its last report, the one of number `turn`.
    `own` of its `in_flight` requests are of this ingress. `waiting`: sequences in the engine's queue. `kv_percent`: use
    of its KV cache by `running` sequences; None if unknown. `counted`: requests of this ingress there by its own count,
    up to a second old; None if unknown."""

    places: int
    weight: int
    own: int
    in_flight: int
    waiting: int = 0
    running: int = 0
    kv_percent: float | None = None
    turn: int = 0
    counted: int | None = None

    @property
    def believed_own(self) -> int:
        """Own requests as reported, if its own count allows it: it lags behind by a few."""
        return self.own if self.counted is None else min(self.own, self.counted + COUNT_LAG)


@dataclass(frozen=True, slots=True)
class Steered:
    """The values of one server, and the reason for them, in one sentence."""

    weight: int
    limit: int
    why: str = ""


def steer(
    cells: Mapping[Name, SeenCell], before: Mapping[Name, Steered], *, ingresses: int, place: int
) -> dict[Name, Steered]:
    """The limit and weight of each reported cell of one pool. `ingresses` share it, and this is the one at `place`
    (from 0). Places that equal parts leave over go to other ingresses after each report. `cells` have the same
    order at every ingress."""
    usual = median([cell.in_flight / cell.own for cell in cells.values() if cell.own > 0] or [1.0])
    totals = {name: _plausible_total(cell, usual) for name, cell in cells.items()}
    parts = {name: (cell.believed_own + 1 / ingresses) / (totals[name] + 1) for name, cell in cells.items()}
    greatest = max(parts.values(), default=1.0)
    steered = {}
    for number, (name, cell) in enumerate(cells.items()):
        free = _free_places(cell, totals[name])
        limit = _limit(cell, free, ingresses, (place + number + cell.turn) % ingresses)
        weight = max(1, round(cell.weight * max(LEAST_WEIGHT, parts[name] / greatest)))
        last = before.get(name)
        if last is not None and abs(weight - last.weight) < WEIGHT_STEP * cell.weight:
            weight = min(last.weight, cell.weight)
        steered[name] = Steered(weight, limit, _why(cell, totals[name], free))
    return steered


def _plausible_total(cell: SeenCell, usual: float) -> int:
    """The requests of all ingresses. `usual`: this number for each own request, at the pool's median cell. One cell
    cannot shift the median of many."""
    own = max(cell.own, cell.counted or 0)
    return max(cell.in_flight, cell.own, math.floor(own * usual * PLAUSIBLE))


def _free_places(cell: SeenCell, total: int) -> int:
    """Places for further requests; negative if there are too many. An engine with a queue has none, and its KV cache
    holds a number of sequences of the present size."""
    free = cell.places - total
    if cell.kv_percent is not None and cell.kv_percent >= KV_COUNTS_PERCENT and cell.running:
        free = min(free, math.floor(cell.running * KV_FULL_PERCENT / cell.kv_percent) - total)
    return min(free, 0) if cell.waiting else free


def _limit(cell: SeenCell, free: int, ingresses: int, rank: int) -> int:
    """`rank`: this ingress gets one of the places that are left after equal parts, if there are more than `rank`."""
    if free <= 0:
        return _limit_when_full(cell, free, ingresses)
    equal, left = divmod(free, ingresses)
    part = equal + (rank < left)
    # Above half of the places, a growing part of the rest goes to every ingress.
    plenty = max(0.0, 2 * free / cell.places - 1)
    return max(1, min(cell.places, cell.own + part + math.floor((free - part) * plenty)))


def _limit_when_full(cell: SeenCell, free: int, ingresses: int) -> int:
    fair = cell.places / ingresses
    if cell.own < fair * LEAST_SHARE:
        return min(cell.places, cell.own + 1)
    surplus = round(-free * cell.own / max(1, cell.in_flight))
    return max(1, min(cell.places, max(math.floor(fair), cell.own - surplus) if cell.own > fair else cell.own))


def _why(cell: SeenCell, total: int, free: int) -> str:
    others = max(0, total - cell.own)
    told = f"{cell.own} requests of this ingress and {others} other requests in {cell.places} places"
    if total > max(cell.in_flight, cell.own):
        told += f" (it reports {cell.in_flight})"
    if cell.waiting:
        return f"{told}; {cell.waiting} wait in its engine"
    if free < cell.places - total and cell.kv_percent is not None:
        return f"{told}; its KV cache is {cell.kv_percent:.0f} % full"
    return told
