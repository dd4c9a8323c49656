"""What changes from slot to slot, as orders with their reasons and dollars: nodes that move from one deployment, type
or region to another, cells that start and stop, machines that are launched and given back.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fleet.planning.capacity.outcome import RegionPlan, machines
from fleet.planning.capacity.rounding import start_dollars
from fleet.planning.capacity.view import Order

ORDERED_SLOTS = 8
"""What comes later is planned again before it is ordered."""


@dataclass(slots=True)
class _Change:
    """Cells of a kind that a slot has more than the one before. `shift`: dollars of a start; `hour`: of machines."""

    deployment: str
    region: str
    instance_type: str
    nodes: int
    count: int
    shift: float
    hour: float
    start_up_s: float
    reason: str


def orders_of(plans: Sequence[RegionPlan]) -> Iterator[Order]:
    """The orders of the next slots, slot by slot."""
    if not plans:
        return
    view = plans[0].arrays.view
    for slot in range(min(ORDERED_SLOTS, view.slots)):
        changes = [change for plan in plans for change in _changes(plan, slot)]
        yield from _cell_orders(changes, float(slot * view.slot_s))
        for plan in plans:
            yield from _machine_orders(plan, slot)


def _changes(plan: RegionPlan, slot: int) -> Iterator[_Change]:
    arrays = plan.arrays
    before = plan.cells[:, slot - 1] if slot else arrays.now
    shifts = start_dollars(arrays)
    for kind, count in enumerate(plan.cells[:, slot] - before):
        if count:
            one, place = arrays.places[arrays.place_of[kind]]
            hour = float(arrays.hour[arrays.group_of[kind]] * arrays.nodes[kind])
            yield _Change(
                one.name,
                place.region,
                arrays.kinds[kind].instance_type,
                int(arrays.nodes[kind]),
                int(count),
                float(shifts[kind]),
                hour,
                one.start_up_s,
                _reason(plan, kind, slot),
            )


def _reason(plan: RegionPlan, kind: int, slot: int) -> str:
    arrays = plan.arrays
    place = arrays.place_of[kind]
    of = arrays.kinds_of(place)
    there = int(plan.cells[of, slot].sum())
    cover, expected = float(arrays.cover[place, slot]), float(arrays.expected[place, slot])
    cells = f"{there} cell{'' if there == 1 else 's'}"
    room = float(arrays.useful[of] @ plan.cells[of, slot])
    if arrays.places[place][1].demand is None:
        return "nobody forecasts its load"
    if room - cover >= float(arrays.useful[of].min()) and any(due.place == place for due in arrays.dues):
        return f"{expected:.1f} requests at once are expected, and batches that are due take the rest of {cells}"
    return f"{expected:.1f} requests at once are expected; {cover:.1f} are to be covered, by {cells}"


def _cell_orders(changes: list[_Change], at_s: float) -> Iterator[Order]:
    """Nodes move first within a region and type, then to another type, then to another region."""
    more, fewer = ([one for one in changes if (one.count > 0) is grows] for grows in (True, False))
    for same in (("region", "instance_type"), ("deployment", "region"), ("deployment",)):
        for gains in more:
            for gives in fewer:
                if all(getattr(gains, name) == getattr(gives, name) for name in same):
                    yield from _move(gains, gives, at_s)
    for one in more:
        if one.count:
            begins_s = max(0.0, at_s - one.start_up_s)
            hours = one.count * (one.shift + one.hour)
            yield _order(one, "start", begins_s, one.count, hours)
    for one in fewer:
        if one.count:
            yield _order(one, "stop", at_s, -one.count, one.count * one.hour)


def _move(gains: _Change, gives: _Change, at_s: float) -> Iterator[Order]:
    """As many whole cells as what the other gives has nodes for."""
    count = min(gains.count, -gives.count * gives.nodes // gains.nodes)
    if count <= 0:
        return
    gains.count -= count
    gives.count += -(-count * gains.nodes // gives.nodes)
    taken_from = f"{gives.deployment} in {gives.region} on {gives.instance_type}"
    begins_s = max(0.0, at_s - gains.start_up_s)
    reason = f"{gains.reason}; {gives.deployment} in {gives.region}: {gives.reason}"
    price = count * (gains.shift + gains.hour - gives.hour * gains.nodes / gives.nodes)
    yield Order(
        begins_s,
        "move",
        gains.deployment,
        gains.region,
        gains.instance_type,
        count,
        round(price, 4),
        reason,
        taken_from,
    )


def _order(one: _Change, kind: str, at_s: float, count: int, dollars: float) -> Order:
    return Order(at_s, kind, one.deployment, one.region, one.instance_type, count, round(dollars, 4), one.reason)


def _machine_orders(plan: RegionPlan, slot: int) -> Iterator[Order]:
    arrays = plan.arrays
    for pool, row in zip(arrays.pools, machines(plan), strict=True):
        before = row.machines[slot - 1] if slot else pool.now
        count = row.machines[slot] - before
        if count:
            kind = "launch" if count > 0 else "give_back"
            what = "more" if count > 0 else "fewer"
            reason = f"cells take {row.machines[slot]} of {pool.name}, {abs(count)} {what} than before"
            at_s = float(slot * arrays.view.slot_s)
            hour = round(count * pool.price, 4)
            yield Order(at_s, kind, "", pool.region, pool.instance_type, abs(count), hour, reason, pool.name)
