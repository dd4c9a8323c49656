"""In which markets the machines of a deployment may be bought, and which machines that lets it use. Pure.

Whoever states no market may use any machine, also one that was not bought in a market. Whoever states some may use only
a machine of which it is certain that it is of one of them.
"""

from collections.abc import Collection, Iterable
from enum import StrEnum
from functools import reduce
from typing import Any


class Market(StrEnum):
    """How machines of a pool are bought. `reserved` and `block`: in this reservation or Capacity Block alone. `open`:
    in an open reservation that fits, else on demand. `interruptible`: in a reservation whose owner may want it back."""

    RESERVED = "reserved"
    BLOCK = "block"
    OPEN = "open"
    ON_DEMAND = "on_demand"
    INTERRUPTIBLE = "interruptible"
    SPOT = "spot"


Markets = frozenset[Market]
"""Of a deployment: those that it may use. Of a machine: those that it may turn out to be of, one once it is there."""

ANY: Markets = frozenset()
"""Of a deployment: it states none. Of a machine: it is of none, or nothing is known of it."""


class InvalidMarkets(ValueError):
    """Not a statement of markets; the text says what is wrong and what would be right."""


def parse_markets(stated: Any) -> Markets:
    """The markets of a list of their names, such as `["reserved", "on_demand"]`; empty: any.

    Raises:
        InvalidMarkets: it is no list, names no market, or one twice.
    """
    known = ", ".join(Market)
    if not isinstance(stated, list | tuple):
        raise InvalidMarkets(f"markets must be a list of some of: {known}; empty for any")
    for name in stated:
        if not isinstance(name, str) or name not in set(Market):
            raise InvalidMarkets(f"{name!r} is no market; there are: {known}")
        if stated.count(name) > 1:
            raise InvalidMarkets(f"{name} is named twice")
    return frozenset(Market(name) for name in stated)


def stored(markets: Iterable[Market]) -> list[str]:
    """The markets as rows keep them, in one order however they were stated."""
    found = set(markets)
    return [market.value for market in Market if market in found]


def may_use(wanted: Markets, machine: Markets) -> bool:
    """Whether a deployment with these markets may use a machine."""
    return not wanted or (bool(machine) and machine <= wanted)


def wanted_by_all(stated: Collection[Markets]) -> Markets:
    """What each of these deployments may use; `ANY` if there is no such market, or none states any."""
    choices = [markets for markets in stated if markets]
    return reduce(frozenset.intersection, choices) if choices else ANY


def strictest_first(markets: Markets) -> tuple[int, list[str]]:
    """A key to sort by: whoever may use fewer machines gets its own first, and `ANY` comes last."""
    return len(markets) or len(Market) + 1, stored(markets)
