"""Divides what a pool of machines has among those that need some of it in certain markets. Pure.

Each choice of markets gets machines that it may use, up to what it needs, and as many find one as can. All that is left
is the share of those to whom the market is all the same. Where nobody states a market, that is everything.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fleet.planning.markets import ANY, Markets, may_use, strictest_first
from fleet.planning.placement.distance import Path
from fleet.planning.snapshot import NodeView


@dataclass(frozen=True, slots=True)
class WholeCell:
    """A cell without a node. Of its `size`, `short` are missing below `near`: the others are spares held for it."""

    size: int
    short: int
    near: Path


@dataclass
class Need:
    """What the cells of a pool need: `nodes` in all, and of these `missing` ones below which network nodes. `whole`:
    the cells among those that lack some which could start anywhere, in the order in which they get theirs."""

    nodes: int = 0
    missing: Counter[Path] = field(default_factory=Counter)
    whole: list[WholeCell] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Warm:
    """Spares that a pool keeps, and of which markets. `why`: so many, where it is not because a person says so.
    `cells`: how many of them are for each of the cells to come."""

    count: int = 0
    markets: Markets = ANY
    why: str = ""
    cells: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class MarketShare:
    """What is needed in certain markets, and what of the pool is there for it. `warm`: spares to keep of it. `misfits`:
    free machines, beside the warm ones, that it may use. `split`: launches of which others get a part. `why_warm`,
    `warm_cells`: as of `Warm`."""

    markets: Markets
    need: Need
    warm: int
    free: tuple[NodeView, ...]
    coming: tuple[NodeView, ...]
    misfits: int
    split: frozenset[str] = frozenset()
    why_warm: str = ""
    warm_cells: tuple[int, ...] = ()


def market_shares(
    needs: Mapping[Markets, Need], warm: Warm, free: Sequence[NodeView], coming: Sequence[NodeView]
) -> tuple[MarketShare, ...]:
    """The strictest first, and last that of any market, which gets what is left. Machines keep their order."""
    stated = sorted(({*needs, warm.markets} - {ANY}), key=strictest_first)
    given = _divided({markets: needs.get(markets, Need()) for markets in stated}, warm, free, coming)
    units = {node.unit for nodes in given.values() for node in nodes if node.unit}
    owner = {node.id: markets for markets, nodes in given.items() for node in nodes}
    return tuple(
        MarketShare(
            markets=markets,
            need=needs.get(markets, Need()),
            warm=warm.count if markets == warm.markets else 0,
            free=tuple(node for node in free if owner.get(node.id, ANY) == markets),
            coming=tuple(node for node in coming if owner.get(node.id, ANY) == markets),
            misfits=sum(may_use(markets, node.markets) for node in free) - warm.count,
            split=frozenset(units),
            why_warm=warm.why,
            warm_cells=warm.cells if markets == warm.markets else (),
        )
        for markets in (*stated, ANY)
    )


def _divided(
    needs: Mapping[Markets, Need], warm: Warm, free: Sequence[NodeView], coming: Sequence[NodeView]
) -> dict[Markets, list[NodeView]]:
    """What comes goes to cells first: a spare that is there may be one that fits none of them."""
    taken: dict[Markets, list[NodeView]] = defaultdict(list)
    missing = {markets: need.missing.total() for markets, need in needs.items()}
    wanted = {markets: count + warm.count * (markets == warm.markets) for markets, count in missing.items()}
    left = _take_all(coming, missing, taken)
    _take_all((*free, *left), wanted, taken)
    return taken


def _take_all(
    nodes: Iterable[NodeView], room: Mapping[Markets, int], taken: dict[Markets, list[NodeView]]
) -> list[NodeView]:
    """Give out what there is room for; returns the others."""
    open_places = sum(room.values()) - sum(len(given) for given in taken.values())
    left = []
    for node in nodes:
        if open_places > 0 and _take(node, room, taken, set()):
            open_places -= 1
        else:
            left.append(node)
    return left


def _take(
    node: NodeView, room: Mapping[Markets, int], taken: dict[Markets, list[NodeView]], seen: set[Markets]
) -> bool:
    """Find a place for one more, by moving others where that makes one: an augmenting path of a bipartite matching."""
    for markets, places in room.items():
        if markets in seen or not may_use(markets, node.markets):
            continue
        seen.add(markets)
        if len(taken[markets]) < places:
            taken[markets].append(node)
            return True
        for at in {other.markets: at for at, other in enumerate(taken[markets])}.values():
            if _take(taken[markets][at], room, taken, seen):
                taken[markets][at] = node
                return True
    return False
