"""Decides which machines to ask providers for and which to give back: enough for all cells, and some warm.

Buys the machines of a whole cell together, and others near what waits for a node where it can. It never takes a machine
out of a cell, and never buys without a bound. Orders that nobody needs any more are taken back.
In a region whose machines are a pool of its own, every free one becomes a spare.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from fleet.planning.decisions import Decision, LaunchNodes, RetireNode
from fleet.planning.fault_rules import NEEDS_OPERATOR
from fleet.planning.placement.distance import Path
from fleet.planning.placement.planner import Placed, PlacementRequest, PlacementResult
from fleet.planning.placement.spares import PoolKey, Spares, is_idle
from fleet.planning.settings import FleetSettings
from fleet.planning.snapshot import FleetView, NodeView
from fleet.planning.states import NodeState, ProviderAction

ENDED = frozenset({NodeState.LOST, NodeState.FAULTY, NodeState.RETIRED})
"""Machines to end. A retired one that the snapshot shows may still run."""


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


@dataclass
class Stock:
    """What a pool has: `nodes` in all, and the ones that are `coming` to be spares."""

    nodes: int = 0
    coming: list[NodeView] = field(default_factory=list)


def needs(orders: Iterable[PlacementRequest], results: Mapping[str, PlacementResult]) -> dict[PoolKey, Need]:
    """What was requested, whether it was there or not."""
    by_pool: dict[PoolKey, Need] = defaultdict(Need)
    for order in orders:
        result, need = results[order.cell], by_pool[order.pool]
        if isinstance(result, Placed):
            need.nodes += sum(node not in order.staying for node in result.nodes)
        else:
            need.nodes += order.count
            need.missing[result.near] += result.short
            if not order.staying and order.size > 1:
                need.whole.append(WholeCell(order.size, result.short, result.near))
    return by_pool


def plan_supply(
    fleet: FleetView, settings: FleetSettings, now: datetime, spares: Spares, wanted: Mapping[PoolKey, Need]
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
    for pool in sorted(pools | set(wanted)):
        free = fleet.regions[pool[0]].free
        if free is not None:
            decisions += _take_free(fleet, pool, free.get(pool[1], 0), stock[pool], wanted.get(pool, Need()), settings)
            continue
        warm = max(0, fleet.regions[pool[0]].spares.get(pool[1], 0) - suspect[pool])
        decisions += _supply(pool, warm, spares, stock[pool], wanted.get(pool, Need()), settings, now)
    return decisions


def _supply(
    pool: PoolKey,
    warm: int,
    spares: Spares,
    stock: Stock,
    need: Need,
    settings: FleetSettings,
    now: datetime,
) -> Iterable[Decision]:
    there, coming = len(spares.of(pool)), len(stock.coming)
    lacking = need.nodes + warm - there - coming
    misfits = spares.count(pool) - warm
    hoped = need.missing.total() - coming
    reason = f"{need.nodes} needed in cells and {warm} warm, {there} spare and {coming} on their way"
    if hoped > max(lacking, 0) and misfits < settings.misfits_kept:
        lacking = min(hoped, max(lacking, 0) + settings.misfits_kept - max(misfits, 0))
        reason += f", {max(misfits, 0)} of them where they fit no cell"
    if lacking > 0:
        return _launch(pool, lacking, reason, stock, need, settings.launches_per_pass)
    cancelled = list(_take_back(stock.coming, min(-lacking, -hoped), settings, now))
    return [*cancelled, *_give_back(spares.free(pool), -lacking - len(cancelled), settings, now)]


def _take_free(
    fleet: FleetView, pool: PoolKey, free: int, stock: Stock, need: Need, settings: FleetSettings
) -> Iterable[Decision]:
    """Every free machine of a region's own pool becomes a spare: it costs nothing more, and none is given back."""
    ordered = sum(
        node.ordered is ProviderAction.LAUNCH and (node.region, node.instance_type) == pool
        for node in fleet.nodes.values()
    )
    count = min(free - ordered, settings.launches_per_pass)
    if count <= 0:
        return ()
    return _launch_singly(pool, count, f"{free} machines of its pool are free", stock, need.missing)


def _launch(pool: PoolKey, count: int, reason: str, stock: Stock, need: Need, most: int) -> Iterator[Decision]:
    """Those of whole cells together, as far as so many are lacking, the others singly and first: growth keeps no repair
    waiting. At most `most`, unless one cell alone is larger."""
    missing, units = Counter(need.missing), Counter[int]()
    repairs = max(0, missing.total() - sum(cell.short for cell in need.whole) - len(stock.coming))
    for cell in need.whole:
        if cell.size <= count - repairs:
            units[cell.size] += 1
            count -= cell.size
            missing[cell.near] -= cell.short
    singly = min(count, most)
    yield from _launch_singly(pool, singly, reason, stock, missing)
    left, there = most - singly, stock.nodes + singly
    for size, wanted in sorted(units.items()):
        number = min(wanted, max(left // size, left == most))
        if number > 0:
            yield LaunchNodes(*pool, size * number, f"{reason}; {size} together for a cell", there, unit=size)
        left, there = left - size * number, there + size * number


def _launch_singly(
    pool: PoolKey, count: int, reason: str, stock: Stock, missing: Mapping[Path, int]
) -> Iterator[Decision]:
    """What waits for a node gets one near it, and then whatever else is lacking, anywhere."""
    requested: Counter[Path] = Counter()
    for near, wanted in missing.items():
        coming = sum(node.topology[: len(near)] == near for node in stock.coming)
        requested[near] += max(0, min(wanted - coming, count - requested.total()))
    requested[()] += count - requested.total()
    there = stock.nodes
    for near, number in sorted(requested.items()):
        if number:
            yield LaunchNodes(*pool, number, reason, there, near)
            there += number


def _take_back(coming: Iterable[NodeView], count: int, settings: FleetSettings, now: datetime) -> Iterator[RetireNode]:
    """Orders of machines that are not there yet, the youngest first, and of a unit all or none."""
    units: dict[str, list[NodeView]] = defaultdict(list)
    for node in coming:
        if node.state is NodeState.JOINING and node.ordered is ProviderAction.LAUNCH:
            units[node.unit or node.id].append(node)
    for nodes in sorted(units.values(), key=lambda nodes: (nodes[0].state_since, nodes[0].id), reverse=True):
        waited_s = (now - nodes[0].state_since).total_seconds()
        if len(nodes) <= count and waited_s >= settings.unneeded_order_kept_s:
            count -= len(nodes)
            reason = f"nobody needs it any more, and it has waited {waited_s:.0f} s for its machine"
            yield from (RetireNode(node.id, node.state, reason) for node in nodes)


def _give_back(spares: Iterable[NodeView], count: int, settings: FleetSettings, now: datetime) -> list[Decision]:
    old = [node for node in spares if _spare_for_s(node, now) > settings.surplus_after_s]
    return [
        RetireNode(node.id, node.state, f"surplus spare for {_spare_for_s(node, now):.0f} s") for node in old[:count]
    ]


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
