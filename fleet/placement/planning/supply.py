"""Decides which machines to order from providers and which to return: enough for all cells, and some warm. It orders
the machines of a whole cell together, and others near the nodes that wait. It never takes a machine out of a cell and
never orders without a limit. Unneeded orders are cancelled. In a region with a fixed pool, every free machine becomes a
spare.

Machines are bought in their deployment's markets, warm ones in those that suit all deployments of the type in the
region. A matching divides the machines of a pool among the choices of markets, so that as many needs as possible are
met; the rest belongs to deployments without stated markets."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from fleet.capacity.planning.pools import ANY, Markets, may_use, strictest_first, wanted_by_all
from fleet.capacity.planning.view import PlannedSpares, cells_there, planned_spares
from fleet.faults.planning.repairs import is_under_repair
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
    """A cell without nodes. Of its `size`, `short` are missing below `near`; the others are held spares."""

    size: int
    short: int
    near: Path


@dataclass
class Need:
    """Needs of the cells of a pool: `nodes` in total, of which `missing` below these network nodes. `whole`: cells
    that could start anywhere, in order."""

    nodes: int = 0
    missing: Counter[Path] = field(default_factory=Counter)
    whole: list[WholeCell] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Warm:
    """Warm spares of a pool and their markets. `why`: the reason, unless a user set the number; `cells`: sizes of the
    planned cells that they are for."""

    count: int = 0
    markets: Markets = ANY
    why: str = ""
    cells: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class MarketShare:
    """Need and machines of one choice of markets. `warm`: spares to keep; `misfits`: free machines besides the warm
    ones that it may use; `split`: launch units of which others get a part; `why_warm` and `warm_cells`: as in `Warm`.
    """

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
    """The strictest markets first, and any market last with the remaining machines. Keeps the order of machines."""
    stated = sorted(({*needs, warm.markets} - {ANY}), key=strictest_first)
    given = _assigned_by_markets({markets: needs.get(markets, Need()) for markets in stated}, warm, free, coming)
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


def _assigned_by_markets(
    needs: Mapping[Markets, Need], warm: Warm, free: Sequence[NodeView], coming: Sequence[NodeView]
) -> dict[Markets, list[NodeView]]:
    """Arriving machines go to cells first, because an existing spare may fit none of them."""
    taken: dict[Markets, list[NodeView]] = defaultdict(list)
    missing = {markets: need.missing.total() for markets, need in needs.items()}
    wanted = {markets: count + warm.count * (markets == warm.markets) for markets, count in missing.items()}
    left = _assign_all(coming, missing, taken)
    _assign_all((*free, *left), wanted, taken)
    return taken


def _assign_all(
    nodes: Iterable[NodeView], room: Mapping[Markets, int], taken: dict[Markets, list[NodeView]]
) -> list[NodeView]:
    """Assigns machines while there is room. Returns the others."""
    open_places = sum(room.values()) - sum(len(given) for given in taken.values())
    left = []
    for node in nodes:
        if open_places > 0 and _find_place(node, room, taken, set()):
            open_places -= 1
        else:
            left.append(node)
    return left


def _find_place(
    node: NodeView, room: Mapping[Markets, int], taken: dict[Markets, list[NodeView]], seen: set[Markets]
) -> bool:
    """Finds a place for one more machine by moving others: an augmenting path of a bipartite matching."""
    for markets, places in room.items():
        if markets in seen or not may_use(markets, node.markets):
            continue
        seen.add(markets)
        if len(taken[markets]) < places:
            taken[markets].append(node)
            return True
        for at in {other.markets: at for at, other in enumerate(taken[markets])}.values():
            if _find_place(taken[markets][at], room, taken, seen):
                taken[markets][at] = node
                return True
    return False


ENDED = frozenset({NodeState.LOST, NodeState.FAULTY, NodeState.RETIRED})
"""Machines to terminate. A retired one in the snapshot may still run."""


Needs = dict[Markets, Need]
"""Needs of a pool's cells by markets."""


@dataclass
class Stock:
    """A pool's `nodes` in total, and those `coming` as spares."""

    nodes: int = 0
    coming: list[NodeView] = field(default_factory=list)


def needs(orders: Iterable[PlacementRequest], results: Mapping[str, PlacementResult]) -> dict[PoolKey, Needs]:
    """What was requested, available or not."""
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
    """Retires lost nodes in no cell, launches missing machines, and returns surplus ones."""
    members = {member.node for cell in fleet.cells.values() for member in cell.members}
    outside = [node for node in fleet.nodes.values() if node.id not in members]
    decisions: list[Decision] = [
        RetireNode(node.id, node.state, f"it is {node.state} and in no cell")
        for node in outside
        if _may_end(node)
        and not _is_kept(node, settings, now)
        and not _awaits_operator(node, fleet)
        and not is_under_repair(fleet, node, settings.faults, now)
    ]
    ended = {decision.node for decision in decisions if isinstance(decision, RetireNode)}
    stock: dict[PoolKey, Stock] = defaultdict(Stock)
    for node in fleet.nodes.values():
        stock[node.region, node.instance_type].nodes += node.state is not NodeState.RETIRED and node.id not in ended
    for node in outside:
        if is_coming(node, settings, now):
            stock[node.region, node.instance_type].coming.append(node)
    # A suspect spare may report again, so it is not replaced. Needs of cells are bought anyway.
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
        decisions += _supply_shares(pool, shares, stock[pool].nodes, settings, now)
    return decisions


def _kept_warm(region: RegionView, kind: str, planned: PlannedSpares | None) -> Warm:
    """Number of idle machines to keep: the number that a user set, or what cells of the day plan need besides the
    repair reserve."""
    stated = region.spares.get(kind, 0)
    if planned is None or (ahead := planned.count + region.repair_only.get(kind, 0)) <= stated:
        return Warm(stated)
    why = f"by the day plan, {planned.count} of them: {planned.reason}"
    return Warm(ahead, why=why, cells=planned.cells)


def _warm_markets(fleet: FleetView, pool: PoolKey) -> Markets:
    """Markets that suit every deployment that may need a warm spare."""
    there = (spec for spec in fleet.deployments.values() if pool[1] in spec.instance_types)
    return wanted_by_all([spec.markets for spec in there if spec.cells_wanted.get(pool[0], 0) > 0])


def _supply_shares(
    pool: PoolKey, shares: Iterable[MarketShare], there: int, settings: FleetSettings, now: datetime
) -> Iterator[Decision]:
    """Supplies each share. Only the last one, of any market, may have a surplus, so nothing is launched after a
    return."""
    most = settings.launches_per_pass
    for share in shares:
        for decision in _supply_share(pool, share, there, most, settings, now):
            if isinstance(decision, LaunchNodes):
                there, most = there + decision.count, most - decision.count
            yield decision


def _supply_share(
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
    """Every free machine of a region's own pool becomes a spare. It costs nothing extra, and none is returned."""
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
    """Launches single machines first, so that growth delays no repair, then those of whole cells together. At most
    `most`, unless one cell is larger."""
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
    """Machines near the nodes that wait, then the rest anywhere."""
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
    """Cancels orders whose machine does not exist yet, the newest first, units as a whole."""
    units: dict[str, list[NodeView]] = defaultdict(list)
    for node in share.coming:
        if node.state is NodeState.JOINING and node.ordered is ProviderAction.LAUNCH and node.unit not in share.split:
            units[node.unit or node.id].append(node)
    for nodes in sorted(units.values(), key=lambda nodes: (nodes[0].state_since, nodes[0].id), reverse=True):
        waited_s = (now - nodes[0].state_since).total_seconds()
        if len(nodes) <= count and waited_s >= settings.unneeded_order_kept_s:
            count -= len(nodes)
            reason = f"no longer needed, and it has waited {age_text(waited_s)} for its machine"
            yield from (RetireNode(node.id, node.state, reason) for node in nodes)


def _give_back(spares: Iterable[NodeView], count: int, settings: FleetSettings, now: datetime) -> list[Decision]:
    """Returns the most expensive first, because the cheapest are used next."""
    old = [node for node in spares if _spare_for_s(node, now) > settings.surplus_after_s]
    old.sort(key=lambda node: -(node.price_per_hour or 0.0))
    kept = min((node.price_per_hour or 0.0 for node in old[count:]), default=None)
    return [
        RetireNode(node.id, node.state, f"surplus spare for {age_text(_spare_for_s(node, now))}{_dearer(node, kept)}")
        for node in old[:count]
    ]


def _dearer(node: NodeView, kept: float | None) -> str:
    """Why this machine was returned instead of another."""
    if kept is None or not node.price_per_hour or node.price_per_hour <= kept:
        return ""
    return f", at {node.price_per_hour:.2f} $/h more expensive than those that stay"


def is_coming(node: NodeView, settings: FleetSettings, now: datetime) -> bool:
    """A node in no cell that will be a spare soon: joining, or still stopping an engine."""
    if node.cordoned or is_idle(node):
        return False
    return node.state in {NodeState.JOINING, NodeState.READY} or _is_kept(node, settings, now)


def _may_end(node: NodeView) -> bool:
    return node.state in ENDED and node.ordered is not ProviderAction.TERMINATE


def _awaits_operator(node: NodeView, fleet: FleetView) -> bool:
    """A faulty node stays while an incident waits for an operator."""
    return node.state is NodeState.FAULTY and fleet.faults.is_held(node.id, NEEDS_OPERATOR)


def _is_kept(node: NodeView, settings: FleetSettings, now: datetime) -> bool:
    """A node that never joined counts as coming for a while, so that a failed launch is not repeated in a storm."""
    never_joined = node.state is NodeState.LOST and node.report.last_seen_at is None
    return never_joined and (now - node.state_since).total_seconds() < settings.failed_launch_kept_s


def _spare_for_s(node: NodeView, now: datetime) -> float:
    return 0.0 if node.spare_since is None else (now - node.spare_since).total_seconds()
