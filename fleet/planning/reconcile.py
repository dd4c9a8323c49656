"""Decides what brings the fleet from what it is to what it should be: cells, their nodes, and the supply of nodes.

One plan for scaling and repair. Works on one snapshot; a pass is repeated until it decides nothing more.
"""

from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime

from fleet.planning.decisions import (
    CreateCell,
    Decision,
    LaunchNodes,
    MoveCell,
    RetireNode,
    StartCell,
    StopCell,
)
from fleet.planning.health import DEAD
from fleet.planning.placement import available_spares, choose_joining, choose_together
from fleet.planning.settings import FleetSettings
from fleet.planning.snapshot import CellView, DeploymentView, FleetView, NodeView
from fleet.planning.states import CellState, NodeState

LEAVING = frozenset({CellState.DRAINING, CellState.STOPPED})
BROKEN = frozenset({CellState.FAILED, CellState.LOST})

# When a region has too many cells, the least useful goes first.
SURPLUS_ORDER = (CellState.PENDING, CellState.LOST, CellState.FAILED, CellState.STARTING, CellState.READY)

PoolKey = tuple[str, str]


@dataclass
class _Pass:
    """Working memory of one plan: what is decided, which spares are still free, and how many nodes cells need."""

    fleet: FleetView
    settings: FleetSettings
    now: datetime
    decisions: list[Decision] = field(default_factory=list)
    free: dict[PoolKey, list[NodeView]] = field(default_factory=dict)
    needed: Counter[PoolKey] = field(default_factory=Counter)

    def spares(self, pool: PoolKey) -> list[NodeView]:
        if pool not in self.free:
            self.free[pool] = available_spares(self.fleet, *pool)
        return self.free[pool]

    def take(self, pool: PoolKey, nodes: tuple[NodeView, ...]) -> None:
        self.free[pool] = [node for node in self.spares(pool) if node not in nodes]


def plan_reconcile(fleet: FleetView, settings: FleetSettings, now: datetime) -> tuple[Decision, ...]:
    """Steps towards the desired state. Repairs come before new cells, so that they get the nearest spares."""
    work = _Pass(fleet, settings, now)
    live = [cell for cell in fleet.cells.values() if cell.state is not CellState.STOPPED]
    for cell in live:
        if cell.state is CellState.DRAINING:
            _finish_drain(work, cell)
    surplus = _scale(work, live)
    for cell in live:
        if cell.id not in surplus:
            _bring_up(work, cell)
    _supply(work)
    return tuple(work.decisions)


def _finish_drain(work: _Pass, cell: CellView) -> None:
    deadline_s = work.fleet.deployments[cell.deployment].drain_deadline_s
    in_flight = _last_in_flight(work, cell)
    if in_flight == 0:
        reason = "drained: unrouted and idle"
    elif work.fleet.heard_for_s(cell.state_since, work.now) > deadline_s:
        left = "an unknown number of" if in_flight is None else in_flight
        reason = f"drain deadline of {deadline_s:.0f} s passed with {left} requests in flight"
    else:
        return
    work.decisions.append(StopCell(cell.id, cell.state, cell.generation, reason))


def _last_in_flight(work: _Pass, cell: CellView) -> int | None:
    """Requests in flight, measured since nothing new arrives; None: not known yet. What was measured before says
    nothing of a request that came in between."""
    if not cell.members:
        return 0
    report = work.fleet.nodes[cell.members[0].node].report
    if cell.unrouted_at is None or report.last_seen_at is None or not report.speaks_of(cell):
        return None
    age_s = (report.last_seen_at - cell.unrouted_at).total_seconds()
    return report.in_flight if age_s >= work.settings.load_age_s else None


def _scale(work: _Pass, live: list[CellView]) -> set[str]:
    """Create what is missing, end what is too much. Returns the cells that are on their way out."""
    leaving: set[str] = set()
    places = {(cell.deployment, cell.region) for cell in live}
    places |= {(name, region) for name, spec in work.fleet.deployments.items() for region in spec.cells_wanted}
    for deployment, region in sorted(places):
        wanted = work.fleet.deployments[deployment].cells_wanted.get(region, 0)
        cells = [c for c in live if c.deployment == deployment and c.region == region and c.state not in LEAVING]
        for _ in range(wanted - len(cells)):
            work.decisions.append(CreateCell(deployment, region, f"{wanted} cells wanted, {len(cells)} there"))
        if len(cells) > wanted:
            cells.sort(key=lambda cell: (SURPLUS_ORDER.index(cell.state), -cell.created_at.timestamp(), cell.id))
            for cell in cells[: len(cells) - wanted]:
                leaving.add(cell.id)
                work.decisions.append(_end(cell, f"{wanted} cells wanted, {len(cells)} there"))
    return leaving


def _end(cell: CellView, reason: str) -> Decision:
    if cell.state in {CellState.READY, CellState.STARTING}:
        return MoveCell(cell.id, cell.state, cell.generation, CellState.DRAINING, reason)
    return StopCell(cell.id, cell.state, cell.generation, reason)


def _bring_up(work: _Pass, cell: CellView) -> None:
    spec = work.fleet.deployments[cell.deployment]
    pool = (cell.region, spec.instance_type)
    if cell.state is CellState.PENDING:
        chosen = choose_together(work.spares(pool), spec.nodes_per_cell)
        _start(work, cell, pool, (), chosen, spec.nodes_per_cell)
    elif cell.state in BROKEN:
        _repair(work, cell, spec, pool)


def _repair(work: _Pass, cell: CellView, spec: DeploymentView, pool: PoolKey) -> None:
    """Start a broken cell again, on the same nodes where they live; only dead ones are swapped."""
    members = [work.fleet.nodes[member.node] for member in cell.members]
    staying = tuple(node for node in members if node.state not in DEAD)
    short = spec.nodes_per_cell - len(staying)
    if short > 0:
        chosen = choose_joining(work.spares(pool), staying, short)
        _start(work, cell, pool, staying, chosen, short)
        return
    wait_s = _backoff_s(cell.restarts, work.settings)
    if all(node.state is NodeState.READY for node in staying) and _age_s(cell, work.now) >= wait_s:
        reason = f"restart {cell.restarts + 1}, {wait_s:.0f} s after it broke"
        nodes = tuple(node.id for node in staying)
        work.decisions.append(StartCell(cell.id, cell.state, cell.generation, nodes, reason))


def _start(
    work: _Pass,
    cell: CellView,
    pool: PoolKey,
    staying: tuple[NodeView, ...],
    chosen: tuple[NodeView, ...] | None,
    short: int,
) -> None:
    work.needed[pool] += short
    if chosen is None:
        # What is free must not go to a later cell while this one waits for the rest.
        work.take(pool, tuple(work.spares(pool)[:short]))
        return
    work.take(pool, chosen)
    nodes = tuple(node.id for node in (*staying, *chosen))
    names = ", ".join(node.id for node in chosen)
    reason = f"{names} replaces what was lost" if cell.state in BROKEN else f"placed on {names}"
    work.decisions.append(StartCell(cell.id, cell.state, cell.generation, nodes, reason))


def _supply(work: _Pass) -> None:
    """Retire lost nodes that no cell holds, launch what is missing, give back what nobody needs.

    A retired node is looked at only while its machine may still run; retiring it again ends that.
    """
    members = {member.node for cell in work.fleet.cells.values() for member in cell.members}
    for node in work.fleet.nodes.values():
        if node.state in DEAD and node.id not in members and not _kept(node, work):
            work.decisions.append(RetireNode(node.id, node.state, f"it is {node.state} and in no cell"))
    pools = {(region.name, kind) for region in work.fleet.regions.values() for kind in region.spares}
    for pool in sorted(pools | set(work.needed)):
        _supply_pool(work, pool)


def _supply_pool(work: _Pass, pool: PoolKey) -> None:
    region, instance_type = pool
    warm = work.fleet.regions[region].spares.get(instance_type, 0)
    spares, coming, needed = len(available_spares(work.fleet, *pool)), _coming(work, pool), work.needed[pool]
    lacking = needed + warm - spares - coming
    if lacking > 0:
        count = min(lacking, work.settings.launches_per_pass)
        reason = f"{needed} needed in cells and {warm} warm, {spares} spare and {coming} on their way"
        work.decisions.append(LaunchNodes(region, instance_type, count, reason))
    elif lacking < 0:
        _give_back(work, work.spares(pool), -lacking)


def _kept(node: NodeView, work: _Pass) -> bool:
    """A node that never joined is kept for a while and counts as coming, so that a launch that fails is not a storm."""
    never_joined = node.report.last_seen_at is None
    return never_joined and (work.now - node.state_since).total_seconds() < work.settings.failed_launch_kept_s


def _coming(work: _Pass, pool: PoolKey) -> int:
    """Nodes that will be spares soon: joining ones, and ones that still stop an engine they were released from."""
    free = {node.id for node in available_spares(work.fleet, *pool)}
    members = {member.node for cell in work.fleet.cells.values() for member in cell.members}
    return sum(
        1
        for node in work.fleet.nodes.values()
        if (node.region, node.instance_type) == pool
        and node.id not in members
        and node.id not in free
        and not node.cordoned
        and (node.state in {NodeState.JOINING, NodeState.READY} or (node.state is NodeState.LOST and _kept(node, work)))
    )


def _give_back(work: _Pass, spares: list[NodeView], count: int) -> None:
    old = [node for node in spares if _spare_for_s(node, work.now) > work.settings.surplus_after_s]
    for node in old[:count]:
        reason = f"surplus spare for {_spare_for_s(node, work.now):.0f} s"
        work.decisions.append(RetireNode(node.id, node.state, reason))


def _spare_for_s(node: NodeView, now: datetime) -> float:
    return 0.0 if node.spare_since is None else (now - node.spare_since).total_seconds()


def _backoff_s(restarts: int, settings: FleetSettings) -> float:
    """Exponential: base, 2 x base, 4 x base, … up to the maximum."""
    return float(min(settings.restart_backoff_s * 2.0 ** min(restarts, 30), settings.restart_backoff_max_s))


def _age_s(cell: CellView, now: datetime) -> float:
    return (now - cell.state_since).total_seconds()
