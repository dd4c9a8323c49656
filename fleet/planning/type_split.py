"""How many cells of a place should be on which instance type: arithmetic on what is there, what is free and what it
costs. Pure.

What works stays where it is. What is lacking goes to the type that carries a request cheapest, as far as machines of it
are there or can be bought; what is too much goes from the dearest. One cell at a time moves from where it works: to
where a person wants one, or to a type that carries as much for at least a fifth less.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ADVANTAGE = 0.2
"""By which another type must be cheaper before a cell that works gives way to one there: a start costs minutes of two
cells and what was cached, and prices that move by less would move cells to and fro. Cells change roles for as much."""


@dataclass(frozen=True, slots=True)
class TypeChoice:
    """An instance type that cells of a place may be on. `capacity`: requests at once that a cell is tested for;
    `price`: US dollars an hour of a cell, None: unknown; `stated`: how many a person wants there, None: what is best.
    `having`: cells with all their machines; `waiting`: cells that lack some. `room`: more cells that machines are there
    for; `is_bought`: others can be bought; `is_short`: a cell has waited for some as long as it may; `most`: cells that
    quotas allow, None: any number."""

    name: str
    capacity: float
    price: float | None = None
    stated: int | None = None
    having: int = 0
    waiting: int = 0
    room: int = 0
    is_bought: bool = False
    is_short: bool = False
    most: int | None = None

    @property
    def per_request(self) -> float | None:
        """US dollars an hour for a request at once; None: unknown."""
        return None if self.price is None or self.capacity <= 0 else self.price / self.capacity

    @property
    def supply(self) -> int | None:
        """More cells that may get machines now; None: any number."""
        return None if self.is_bought and not self.is_short else self.room


@dataclass(frozen=True, slots=True)
class TypeSplit:
    """`cells` by type, those to come included; `why`: what decided of the types that get more, or give a cell."""

    cells: Mapping[str, int]
    why: Mapping[str, str]


def cheapest_first(choices: Sequence[TypeChoice]) -> list[TypeChoice]:
    """In the order in which they are taken: as listed where the price of one is unknown."""
    costs = [one.per_request for one in choices]
    if any(cost is None for cost in costs):
        return list(choices)
    return sorted(choices, key=lambda one: one.per_request or 0.0)


def split_types(total: int, choices: Sequence[TypeChoice], *, may_move: bool = False) -> TypeSplit:
    """How so many cells should be divided; fewer only where quotas allow no more. `may_move`: nothing else is under
    way, so a cell that works may give way to one of another type."""
    order = cheapest_first(choices)
    is_whole = sum(one.having for one in order) >= total
    coming = {one.name: _coming(one, is_whole=is_whole) for one in order}
    cells = _kept(total, order, coming)
    left, why = total - sum(cells.values()), dict[str, str]()
    if left:
        _fill(left, order, cells, coming, why)
    elif may_move and sum(one.having for one in choices) == total:
        _move(order, cells, why)
    return TypeSplit(cells, why)


def _coming(one: TypeChoice, *, is_whole: bool) -> int:
    """Waiting cells that may get machines now, or, while nothing is lacking, that a person wants there all the same."""
    if one.supply is None:
        return one.waiting
    wanted = max(0, (one.stated or 0) - one.having) if is_whole else 0
    return min(one.waiting, max(one.supply, wanted))


def _kept(total: int, order: Sequence[TypeChoice], coming: Mapping[str, int]) -> dict[str, int]:
    """What works or is about to, as far as it is not too much: first where a person wants it, then where it is
    cheapest. So a cell that is to give way to one that still starts is too much from the beginning: when it may go is
    for the ledger."""
    cells = dict.fromkeys((one.name for one in order), 0)
    left = total
    for is_stated in (True, False):
        for one in order:
            there = one.having + coming[one.name]
            most = there if one.most is None else min(there, one.most)
            most = min(most, one.stated or 0) if is_stated else most
            count = max(0, min(left, most - cells[one.name]))
            cells[one.name] += count
            left -= count
    return cells


def _fill(
    left: int, order: Sequence[TypeChoice], cells: dict[str, int], coming: Mapping[str, int], why: dict[str, str]
) -> None:
    """What is lacking: where a person wants it, then where nothing is stated, then anywhere but where a person wants
    none. What finds no machine waits where it waits already."""
    supply = {one.name: left if one.supply is None else max(0, one.supply - coming[one.name]) for one in order}
    for rank in range(3):
        for one in order:
            due = _due(one, cells[one.name], left, rank)
            count = max(0, min(left, supply[one.name], due, _allowed(one, cells, left)))
            if count:
                cells[one.name] += count
                supply[one.name] -= count
                left -= count
                why[one.name] = _why_there(one, order, supply, rank)
    for one in sorted(order, key=lambda one: (one.stated == 0, not one.waiting)):
        count = min(left, _allowed(one, cells, left))
        if count:
            cells[one.name] += count
            left -= count
            why[one.name] = "no listed type has a free machine"


def _due(one: TypeChoice, there: int, left: int, rank: int) -> int:
    if rank == 0:
        return (one.stated or 0) - there
    return 0 if one.stated == 0 or (rank == 1 and one.stated is not None) else left


def _allowed(one: TypeChoice, cells: Mapping[str, int], left: int) -> int:
    return left if one.most is None else max(0, one.most - cells[one.name])


def _why_there(one: TypeChoice, order: Sequence[TypeChoice], supply: Mapping[str, int], rank: int) -> str:
    if rank == 0:
        return f"{one.stated} of its cells are to be on it"
    before = [other.name for other in order[: order.index(one)] if other.stated is None and not supply[other.name]]
    if before:
        return f"no machine is free of {', '.join(before)}"
    if rank == 2 or any(other.per_request is None for other in order):
        return "the first that is listed and has machines"
    return f"{one.per_request:.3g} $/h for a request at once, of those that have machines the least"


def _move(order: Sequence[TypeChoice], cells: dict[str, int], why: dict[str, str]) -> None:
    """One cell to where a person wants it; else one to a type that is cheaper, if its machines are there already."""
    for gains, gives in [(gains, gives) for gains in order for gives in reversed(order) if gains is not gives]:
        if not cells[gives.name] or not _allowed(gains, cells, 1) or gains.supply == 0:
            continue
        if reason := _stated_move(gains, gives, cells) or _cheaper_move(gains, gives, cells):
            cells[gains.name] += 1
            cells[gives.name] -= 1
            why[gains.name] = why[gives.name] = reason
            return


def _stated_move(gains: TypeChoice, gives: TypeChoice, cells: Mapping[str, int]) -> str:
    if (gains.stated or 0) > cells[gains.name] and cells[gives.name] > (gives.stated or 0):
        return f"{gains.stated} of its cells are to be on {gains.name}"
    if gives.stated is not None and gains.stated is None and cells[gives.name] > gives.stated:
        return f"{gives.stated} of its cells are to be on {gives.name}"
    return ""


def _cheaper_move(gains: TypeChoice, gives: TypeChoice, cells: Mapping[str, int]) -> str:
    if gains.stated is not None or cells[gives.name] <= (gives.stated or 0) or not gains.room:
        return ""
    cost, before = gains.per_request, gives.per_request
    if cost is None or before is None or cost > (1 - ADVANTAGE) * before or gains.capacity < gives.capacity:
        return ""
    return (
        f"{gains.name} carries as much for {cost:.3g} $/h a request at once instead of {before:.3g} on {gives.name}, "
        "and has machines"
    )
