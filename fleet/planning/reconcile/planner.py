"""Decides what brings the fleet from what it is to what it should be: how many cells, and on which nodes.

One plan for scaling, rollouts and repair, over one disruption ledger. Works on one snapshot; a pass is repeated until
it decides nothing more.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime

from fleet.planning.decisions import Decision, ExplainCell, StartCell, StopCell
from fleet.planning.ledger import Ledger
from fleet.planning.notices import Notices
from fleet.planning.placement.planner import Placed, Placement, PlacementRequest
from fleet.planning.placement.reasons import waiting
from fleet.planning.placement.supply import needs, plan_supply
from fleet.planning.reconcile.ahead import supply_ahead
from fleet.planning.reconcile.drains import drain_ended
from fleet.planning.reconcile.scaling import plan_scale
from fleet.planning.roles.plan import plan_role_changes
from fleet.planning.rollout.versions import BROKEN, VersionPlan, plan_updates
from fleet.planning.settings import FleetSettings
from fleet.planning.shares.turns import cells_in_turn
from fleet.planning.snapshot import CellView, FleetView, NodeView
from fleet.planning.states import DEAD, CellState, NodeState

WAITING = BROKEN | {CellState.PENDING, CellState.DRAINING}
"""Cells that wait for something to be done with them."""


@dataclass
class _Pass:
    """Working memory of one plan: what is decided, which cells need nodes, and how many explanations were given."""

    fleet: FleetView
    settings: FleetSettings
    now: datetime
    decisions: list[Decision] = field(default_factory=list)
    orders: list[PlacementRequest] = field(default_factory=list)
    ordered: dict[str, str] = field(default_factory=dict)
    """Cell -> the version that it will start with."""
    explained: int = 0

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.fleet, self.settings.ledger, self.now)
        self.versions = VersionPlan(self.fleet)
        self.notices = Notices(self.fleet, self.settings, self.now)


def plan_reconcile(fleet: FleetView, settings: FleetSettings, now: datetime) -> tuple[Decision, ...]:
    """Steps towards the desired state. Repairs come before new cells, so that they get the nearest spares."""
    work = _Pass(fleet, settings, now)
    scaled, leaving = plan_scale(fleet, work.versions, work.ledger, work.notices, settings)
    work.decisions += scaled
    work.decisions += plan_updates(fleet, work.versions, work.ledger, leaving)
    work.decisions += plan_role_changes(fleet, work.versions.roles, work.versions.live, work.ledger, leaving)
    for cell in fleet.cells.values():
        if problem := fleet.deployments[cell.deployment].problem:
            _leave(work, cell, problem)
        elif cell.state is CellState.DRAINING:
            _finish_drain(work, cell, cell.returns and cell.id not in leaving)
        elif cell.id not in leaving:
            _bring_up(work, cell)
    _place(work)
    return tuple(work.decisions)


def _leave(work: _Pass, cell: CellView, problem: str) -> None:
    """Nothing is known of what this cell should be: say so of one that does not serve, and let it be."""
    if cell.state in WAITING:
        _explain(work, cell, waiting(cell.reason, problem, is_broken=cell.state in BROKEN))


def _explain(work: _Pass, cell: CellView, reason: str) -> None:
    if reason != cell.reason and work.explained < work.settings.explanations_per_pass:
        work.explained += 1
        work.decisions.append(ExplainCell(cell.id, cell.state, cell.generation, reason))


def _finish_drain(work: _Pass, cell: CellView, returns: bool) -> None:
    reason = drain_ended(cell, work.notices)
    if reason and returns:
        _start_again(work, cell, reason)
    elif reason:
        work.decisions.append(StopCell(cell.id, cell.state, cell.generation, reason))


def _bring_up(work: _Pass, cell: CellView) -> None:
    """Start what should run and does not. A broken cell waits longer after each failure of the same version."""
    if cell.state is CellState.PENDING:
        _start_again(work, cell, "")
    elif work.versions.has_obsolete_target(cell):
        _start_again(work, cell, "stopped halfway")
    elif cell.state in BROKEN:
        wait_s = _backoff_s(cell.restarts, work.settings)
        _start_again(work, cell, f"restart {cell.restarts + 1}, {wait_s:.0f} s after it broke", wait_s)


def _start_again(work: _Pass, cell: CellView, reason: str, wait_s: float = 0.0) -> None:
    """Start a cell on the same nodes where they live; ask for the ones that are missing. While one of them is silent
    nothing is started: it may be dead, and the new generation would fail with it."""
    version = work.versions.of(cell)
    size = work.fleet.deployments[cell.deployment].of(version, cell.instance_type).nodes_per_cell
    members = [work.fleet.nodes[member.node] for member in cell.members]
    staying = tuple(node for node in members if node.state not in DEAD)[:size]
    if not all(_is_heard(work, cell, node) for node in staying):
        return
    short = size - len(staying)
    if short > 0:
        work.ordered[cell.id] = version
        work.orders.append(_order(work, cell, version, staying, short))
        return
    if version != cell.version:
        why = "it broke" if wait_s else reason
        reason, wait_s = f"{why}; {cell.version} -> {version}", 0.0
    if _age_s(cell, work.now) >= wait_s:
        work.decisions.append(_start(work, cell, staying, reason, version))


def _start(work: _Pass, cell: CellView, nodes: Iterable[NodeView], reason: str, version: str) -> StartCell:
    role = work.versions.roles.of(cell, version)
    if role is not cell.role and cell.generation:
        reason = f"{reason}; {cell.role} -> {role}"
    other = role if role is not cell.role else None
    return StartCell(cell.id, cell.state, cell.generation, tuple(node.id for node in nodes), reason, version, other)


def _is_heard(work: _Pass, cell: CellView, node: NodeView) -> bool:
    """Whether a node that shall start again is there: of a broken cell it must have reported since that broke, because
    its death may be why."""
    seen_at = node.report.last_seen_at
    if node.state is not NodeState.READY or not node.report.connected or seen_at is None:
        return False
    spoke_since = cell.state not in BROKEN or seen_at > cell.state_since
    return spoke_since and work.fleet.unheard_s(node, work.now) <= work.settings.doubt_after_s


def _order(work: _Pass, cell: CellView, version: str, staying: tuple[NodeView, ...], count: int) -> PlacementRequest:
    spec = work.fleet.deployments[cell.deployment]
    there = spec.of(version, cell.instance_type)
    return PlacementRequest(
        cell=cell.id,
        deployment=cell.deployment,
        region=cell.region,
        instance_type=cell.instance_type,
        count=count,
        staying=staying,
        within=there.within,
        engine=there.engine,
        is_repair=cell.state in BROKEN,
        markets=spec.markets,
    )


def _place(work: _Pass) -> None:
    """Start the cells that get their nodes, and say of the others what they wait for. Then see to the supply."""
    placement = Placement(work.fleet)
    turns = cells_in_turn(work.fleet, {order.cell for order in work.orders})
    work.orders.sort(key=lambda order: turns[order.cell])
    work.orders = [replace(order, turn=turns[order.cell][:2]) for order in work.orders]
    answers = placement.place(work.orders)
    for order in work.orders:
        cell, answer = work.fleet.cells[order.cell], answers[order.cell]
        if isinstance(answer, Placed):
            work.decisions.append(_start(work, cell, answer.nodes, answer.reason, work.ordered[cell.id]))
            continue
        _explain(work, cell, waiting(cell.reason, answer.reason, is_broken=order.is_repair))
    ahead = [beside for cell in _losing(work) if (beside := supply_ahead(cell, work.fleet, work.notices))]
    wanted = needs([*work.orders, *ahead], answers | placement.place(ahead))
    work.decisions += plan_supply(work.fleet, work.settings, work.now, placement.spares, wanted)


def _losing(work: _Pass) -> Iterator[CellView]:
    """Cells that serve and will need another machine: it is bought before they go down."""
    for node in work.notices.by_node:
        cell = work.fleet.cell_of(node)
        if cell is None or cell.id in work.ordered or cell.id in work.notices.going or cell.is_leaving:
            continue
        if work.notices.end_of(node) and min(m.node for m in cell.members if work.notices.end_of(m.node)) == node:
            yield cell


def _backoff_s(restarts: int, settings: FleetSettings) -> float:
    """Exponential: base, 2 x base, 4 x base, … up to the maximum."""
    return float(min(settings.restart_backoff_s * 2.0 ** min(restarts, 30), settings.restart_backoff_max_s))


def _age_s(cell: CellView, now: datetime) -> float:
    return (now - cell.state_since).total_seconds()
