"""Divides what a pool of machines has among those that need some of it in certain markets. Pure.

Each choice of markets gets machines that it may use, up to what it needs, and as many find one as can. All that is left
is the share of those to whom the market is all the same. Where nobody states a market, that is everything.

Decides which machines to ask providers for and which to give back: enough for all cells, and some warm.

Buys the machines of a whole cell together, and others near what waits for a node where it can. It never takes a machine
out of a cell, and never buys without a bound. Orders that nobody needs any more are taken back.
In a region whose machines are a pool of its own, every free one becomes a spare. What is bought for a deployment is
bought in its markets, and what is kept warm in those that all deployments of its type in the region may use.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from fleet.capacity.planning.pools import ANY, Markets, may_use, strictest_first, wanted_by_all
from fleet.capacity.planning.view import PlannedSpares, cells_there, planned_spares
from fleet.faults.planning.views import NEEDS_OPERATOR
from fleet.placement.planning.distance import Path
from fleet.placement.planning.packing import PoolKey, Spares, is_idle
from fleet.placement.planning.planner import Placed, PlacementRequest, PlacementResult
from fleet.reconcile.planning.decisions import Decision, LaunchNodes, RetireNode
from fleet.reconcile.planning.settings import FleetSettings
from fleet.reconcile.planning.snapshot import FleetView, NodeView, RegionView
from fleet.reconcile.planning.states import NodeState, ProviderAction
from kernel.ages import age_text


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


ENDED = frozenset({NodeState.LOST, NodeState.FAULTY, NodeState.RETIRED})
"""Machines to end. A retired one that the snapshot shows may still run."""


Needs = dict[Markets, Need]
"""What the cells of a pool need, by the markets that their deployments may use."""


@dataclass
class Stock:
    """What a pool has: `nodes` in all, and the ones that are `coming` to be spares."""

    nodes: int = 0
    coming: list[NodeView] = field(default_factory=list)


def needs(orders: Iterable[PlacementRequest], results: Mapping[str, PlacementResult]) -> dict[PoolKey, Needs]:
    """What was requested, whether it was there or not."""
    by_pool: dict[PoolKey, Needs] = defaultdict(lambda: defaultdict(Need))
    for order in orders:
        result, need = results[order.cell], by_pool[order.pool][order.markets]
        if isinstance(result, Placed):
            need.nodes += sum(node not in order.staying for node in result.nodes)
        else:
            need.nodes += order.count
            need.missing[result.near] += result.short
            if not order.staying and order.size > 1:
                need.whole.append(WholeCell(order.size, result.short, result.near))
    return by_pool


def plan_supply(
    fleet: FleetView, settings: FleetSettings, now: datetime, spares: Spares, wanted: Mapping[PoolKey, Needs]
) -> list[Decision]:
    """Retire lost nodes that no cell holds, launch what is missing, give back what is not needed."""
    members = {member.node for cell in fleet.cells.values() for member in cell.members}
    outside = [node for node in fleet.nodes.values() if node.id not in members]
    decisions: list[Decision] = [
        RetireNode(node.id, node.state, f"it is {node.state} and in no cell")
        for node in outside
        if _may_end(node) and not _is_kept(node, settings, now) and not _awaits_operator(node, fleet)
    ]
    ended = {decision.node for decision in decisions if isinstance(decision, RetireNode)}
    stock: dict[PoolKey, Stock] = defaultdict(Stock)
    for node in fleet.nodes.values():
        stock[node.region, node.instance_type].nodes += node.state is not NodeState.RETIRED and node.id not in ended
    for node in outside:
        if _is_coming(node, settings, now):
            stock[node.region, node.instance_type].coming.append(node)
    # A suspect spare may come back in a moment: silence alone buys nothing. What a cell needs is bought all the same.
    suspect = Counter((node.region, node.instance_type) for node in outside if node.state is NodeState.SUSPECT)
    pools = {
        (region.name, kind) for region in fleet.regions.values() for kind in (*region.spares, *(region.free or ()))
    }
    planned = planned_spares(fleet, cells_there(fleet), now) if fleet.planned else {}
    for pool in sorted(pools | set(wanted) | set(planned)):
        free, needed = fleet.regions[pool[0]].free, wanted.get(pool, {})
        if free is not None:
            decisions += _take_free(fleet, pool, free.get(pool[1], 0), stock[pool], needed, settings)
            continue
        kept = _kept_warm(fleet.regions[pool[0]], pool[1], planned.get(pool))
        count = max(0, kept.count - suspect[pool])
        warm = replace(kept, count=count, markets=_warm_markets(fleet, pool) if count else ANY)
        shares = market_shares(needed, warm, spares.free(pool), stock[pool].coming)
        decisions += _supply_all(pool, shares, stock[pool].nodes, settings, now)
    return decisions


def _kept_warm(region: RegionView, kind: str, planned: PlannedSpares | None) -> Warm:
    """How many idle machines to have, and why so many where it is for the plan of the day: as many as a person says, or
    as cells to come need beside those that are for repairs alone."""
    stated = region.spares.get(kind, 0)
    if planned is None or (ahead := planned.count + region.repair_only.get(kind, 0)) <= stated:
        return Warm(stated)
    why = f"by the plan of the day, {planned.count} of them: {planned.reason}"
    return Warm(ahead, why=why, cells=planned.cells)


def _warm_markets(fleet: FleetView, pool: PoolKey) -> Markets:
    """A warm spare should do for every deployment that may need it."""
    there = (spec for spec in fleet.deployments.values() if pool[1] in spec.instance_types)
    return wanted_by_all([spec.markets for spec in there if spec.cells_wanted.get(pool[0], 0) > 0])


def _supply_all(
    pool: PoolKey, shares: Iterable[MarketShare], there: int, settings: FleetSettings, now: datetime
) -> Iterator[Decision]:
    """Share by share. Only the last one, of any market, may have too much, so nothing is launched after a return."""
    most = settings.launches_per_pass
    for share in shares:
        for decision in _supply(pool, share, there, most, settings, now):
            if isinstance(decision, LaunchNodes):
                there, most = there + decision.count, most - decision.count
            yield decision


def _supply(
    pool: PoolKey, share: MarketShare, there: int, most: int, settings: FleetSettings, now: datetime
) -> Iterable[Decision]:
    need, warm, coming = share.need, share.warm, len(share.coming)
    missing = need.missing.total()
    spare = need.nodes - missing + len(share.free)
    lacking = need.nodes + warm - spare - coming
    hoped = missing - coming
    reason = f"{need.nodes} needed in cells and {warm} warm, {spare} spare and {coming} on their way"
    if warm and share.why_warm:
        reason += f"; {share.why_warm}"
    if hoped > max(lacking, 0) and share.misfits < settings.misfits_kept:
        lacking = min(hoped, max(lacking, 0) + settings.misfits_kept - max(share.misfits, 0))
        reason += f", {max(share.misfits, 0)} of them where they fit no cell"
    if lacking > 0:
        return _launch(pool, lacking, reason, there, share, most) if most > 0 else ()
    cancelled = list(_take_back(share, min(-lacking, -hoped), settings, now))
    return [*cancelled, *_give_back(share.free, -lacking - len(cancelled), settings, now)]


def _take_free(
    fleet: FleetView, pool: PoolKey, free: int, stock: Stock, needed: Needs, settings: FleetSettings
) -> Iterable[Decision]:
    """Every free machine of a region's own pool becomes a spare: it costs nothing more, and none is given back."""
    ordered = sum(
        node.ordered is ProviderAction.LAUNCH and (node.region, node.instance_type) == pool
        for node in fleet.nodes.values()
    )
    count = min(free - ordered, settings.launches_per_pass)
    if count <= 0:
        return ()
    missing = sum((need.missing for need in needed.values()), Counter[Path]())
    reason = f"{free} machines of its pool are free"
    return _launch_singly(pool, count, reason, stock.nodes, stock.coming, missing)


def _launch(pool: PoolKey, count: int, reason: str, there: int, share: MarketShare, most: int) -> Iterator[LaunchNodes]:
    """Those of whole cells together, also of cells to come, as far as so many are lacking, the others singly and first:
    growth keeps no repair waiting. At most `most`, unless one cell alone is larger."""
    need, missing, units = share.need, Counter(share.need.missing), Counter[int]()
    repairs = max(0, missing.total() - sum(cell.short for cell in need.whole) - len(share.coming))
    for cell in need.whole:
        if cell.size <= count - repairs:
            units[cell.size] += 1
            count -= cell.size
            missing[cell.near] -= cell.short
    for size in share.warm_cells:
        if 1 < size <= count - max(repairs, missing.total()):
            units[size] += 1
            count -= size
    singly = min(count, most)
    yield from _launch_singly(pool, singly, reason, there, share.coming, missing, share.markets)
    left, there = most - singly, there + singly
    for size, wanted in sorted(units.items()):
        number = min(wanted, max(left // size, left == most))
        if number > 0:
            why = f"{reason}; {size} together for a cell"
            yield LaunchNodes(*pool, size * number, why, there, unit=size, markets=share.markets)
        left, there = left - size * number, there + size * number


def _launch_singly(
    pool: PoolKey,
    count: int,
    reason: str,
    there: int,
    coming: Sequence[NodeView],
    missing: Mapping[Path, int],
    markets: Markets = ANY,
) -> Iterator[LaunchNodes]:
    """What waits for a node gets one near it, and then whatever else is lacking, anywhere."""
    requested: Counter[Path] = Counter()
    for near, wanted in missing.items():
        close = sum(node.topology[: len(near)] == near for node in coming)
        requested[near] += max(0, min(wanted - close, count - requested.total()))
    requested[()] += count - requested.total()
    for near, number in sorted(requested.items()):
        if number:
            yield LaunchNodes(*pool, number, reason, there, near, markets=markets)
            there += number


def _take_back(share: MarketShare, count: int, settings: FleetSettings, now: datetime) -> Iterator[RetireNode]:
    """Orders of machines that are not there yet, the youngest first, and of a unit all or none."""
    units: dict[str, list[NodeView]] = defaultdict(list)
    for node in share.coming:
        if node.state is NodeState.JOINING and node.ordered is ProviderAction.LAUNCH and node.unit not in share.split:
            units[node.unit or node.id].append(node)
    for nodes in sorted(units.values(), key=lambda nodes: (nodes[0].state_since, nodes[0].id), reverse=True):
        waited_s = (now - nodes[0].state_since).total_seconds()
        if len(nodes) <= count and waited_s >= settings.unneeded_order_kept_s:
            count -= len(nodes)
            reason = f"nobody needs it any more, and it has waited {age_text(waited_s)} for its machine"
            yield from (RetireNode(node.id, node.state, reason) for node in nodes)


def _give_back(spares: Iterable[NodeView], count: int, settings: FleetSettings, now: datetime) -> list[Decision]:
    """The dearest first: what is left is what is taken next."""
    old = [node for node in spares if _spare_for_s(node, now) > settings.surplus_after_s]
    old.sort(key=lambda node: -(node.price_per_hour or 0.0))
    kept = min((node.price_per_hour or 0.0 for node in old[count:]), default=None)
    return [
        RetireNode(node.id, node.state, f"surplus spare for {age_text(_spare_for_s(node, now))}{_dearer(node, kept)}")
        for node in old[:count]
    ]


def _dearer(node: NodeView, kept: float | None) -> str:
    """Why this one, where another one could have gone."""
    if kept is None or not node.price_per_hour or node.price_per_hour <= kept:
        return ""
    return f", at {node.price_per_hour:.2f} $/h dearer than those that stay"


def _is_coming(node: NodeView, settings: FleetSettings, now: datetime) -> bool:
    """A node in no cell that will be a spare soon: a joining one, or one that still stops an engine."""
    if node.cordoned or is_idle(node):
        return False
    return node.state in {NodeState.JOINING, NodeState.READY} or _is_kept(node, settings, now)


def _may_end(node: NodeView) -> bool:
    return node.state in ENDED and node.ordered is not ProviderAction.TERMINATE


def _awaits_operator(node: NodeView, fleet: FleetView) -> bool:
    """A faulty node stays as it is while an incident waits for an operator."""
    return node.state is NodeState.FAULTY and fleet.faults.is_held(node.id, NEEDS_OPERATOR)


def _is_kept(node: NodeView, settings: FleetSettings, now: datetime) -> bool:
    """A node that never joined is kept for a while and counts as coming, so that a launch that fails is not a storm."""
    never_joined = node.state is NodeState.LOST and node.report.last_seen_at is None
    return never_joined and (now - node.state_since).total_seconds() < settings.failed_launch_kept_s


def _spare_for_s(node: NodeView, now: datetime) -> float:
    return 0.0 if node.spare_since is None else (now - node.spare_since).total_seconds()
