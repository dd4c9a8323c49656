"""Decides what brings the fleet from what it is to what it should be: how many cells, and on which nodes.

One plan for scaling and repair. Works on one snapshot; a pass is repeated until it decides nothing more.
"""

from dataclasses import dataclass, field
from datetime import datetime

from fleet.planning.decisions import (
    CreateCell,
    Decision,
    ExplainCell,
    MoveCell,
    StartCell,
    StopCell,
)
from fleet.planning.health import DEAD
from fleet.planning.placement import Order, Placed, Placement
from fleet.planning.placement_words import waiting
from fleet.planning.settings import FleetSettings
from fleet.planning.snapshot import CellView, DeploymentView, FleetView, NodeView
from fleet.planning.states import CellState, NodeState
from fleet.planning.supply import needs, plan_supply

LEAVING = frozenset({CellState.DRAINING, CellState.STOPPED})
BROKEN = frozenset({CellState.FAILED, CellState.LOST})

# When a region has too many cells, the least useful goes first.
SURPLUS_ORDER = (CellState.PENDING, CellState.LOST, CellState.FAILED, CellState.STARTING, CellState.READY)


@dataclass
class _Pass:
    """Working memory of one plan: what is decided, which cells need nodes, and how many heard what they wait for."""

    fleet: FleetView
    settings: FleetSettings
    now: datetime
    decisions: list[Decision] = field(default_factory=list)
    orders: list[Order] = field(default_factory=list)
    explained: int = 0


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
    _place(work)
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
    """Start a broken cell again, on the same nodes where they live; ask for the ones that are missing."""
    if cell.state is not CellState.PENDING and cell.state not in BROKEN:
        return
    spec = work.fleet.deployments[cell.deployment]
    members = [work.fleet.nodes[member.node] for member in cell.members]
    staying = tuple(node for node in members if node.state not in DEAD)
    short = spec.nodes_per_cell - len(staying)
    if short > 0:
        work.orders.append(_order(cell, spec, staying, short))
        return
    wait_s = _backoff_s(cell.restarts, work.settings)
    if all(node.state is NodeState.READY for node in staying) and _age_s(cell, work.now) >= wait_s:
        reason = f"restart {cell.restarts + 1}, {wait_s:.0f} s after it broke"
        nodes = tuple(node.id for node in staying)
        work.decisions.append(StartCell(cell.id, cell.state, cell.generation, nodes, reason))


def _order(cell: CellView, spec: DeploymentView, staying: tuple[NodeView, ...], count: int) -> Order:
    return Order(
        cell=cell.id,
        deployment=cell.deployment,
        region=cell.region,
        instance_type=spec.instance_type,
        count=count,
        staying=staying,
        within=spec.within,
        engine=spec.engine,
        is_repair=cell.state in BROKEN,
    )


def _place(work: _Pass) -> None:
    """Start the cells that get their nodes, and say of the others what they wait for. Then see to the supply."""
    placement = Placement(work.fleet)
    answers = placement.place(work.orders)
    for order in work.orders:
        cell, answer = work.fleet.cells[order.cell], answers[order.cell]
        if isinstance(answer, Placed):
            nodes = tuple(node.id for node in answer.nodes)
            work.decisions.append(StartCell(cell.id, cell.state, cell.generation, nodes, answer.reason))
            continue
        reason = waiting(cell.reason, answer.reason, is_broken=order.is_repair)
        if reason != cell.reason and work.explained < work.settings.explanations_per_pass:
            work.explained += 1
            work.decisions.append(ExplainCell(cell.id, cell.state, cell.generation, reason))
    wanted = needs(work.orders, answers)
    work.decisions += plan_supply(work.fleet, work.settings, work.now, placement.spares, wanted)


def _backoff_s(restarts: int, settings: FleetSettings) -> float:
    """Exponential: base, 2 x base, 4 x base, … up to the maximum."""
    return float(min(settings.restart_backoff_s * 2.0 ** min(restarts, 30), settings.restart_backoff_max_s))


def _age_s(cell: CellView, now: datetime) -> float:
    return (now - cell.state_since).total_seconds()
