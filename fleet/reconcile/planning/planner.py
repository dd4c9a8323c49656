"""Decides what brings the fleet from its actual to its desired state: how many cells there are, which start or stop,
and on which nodes. One plan covers scaling, rollouts and repair. It never drains an available cell unless the
disruption ledger allows it or its machine ends. `PLANNERS` lists all planners of a pass in order, for the live
reconciler and the simulator; the first one whose decisions change something ends the round."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime

from engine_agent.protocol.states import CellRole
from fleet.autoscaling.planning.role_split import beyond, counted
from fleet.cells.planner import drain_ended, plan_health
from fleet.faults.planning.announced import Notices, supply_ahead
from fleet.faults.planning.liveness import plan_liveness
from fleet.faults.planning.notices import plan_notices
from fleet.faults.planning.planner import plan_faults
from fleet.placement.planning.instance_types import TypePlan
from fleet.placement.planning.planner import Placed, Placement, PlacementRequest
from fleet.placement.planning.reasons import waiting
from fleet.placement.planning.reslicing import plan_layouts, waiting_cells
from fleet.placement.planning.supply import needs, plan_supply
from fleet.quotas.planning.planner import plan_shares
from fleet.quotas.planning.turns import cells_in_turn
from fleet.reconcile.planning.decisions import (
    CreateCell,
    Decision,
    DrainCell,
    ExplainCell,
    MoveCell,
    StartCell,
    StopCell,
)
from fleet.reconcile.planning.settings import FleetSettings, Ledger
from fleet.reconcile.planning.snapshot import CellView, FleetView, NodeView
from fleet.reconcile.planning.states import DEAD, CellState, DisruptionCause, NodeState
from fleet.rollouts.planning.planner import plan_rollout
from fleet.rollouts.planning.prefetch import plan_prefetch
from fleet.rollouts.planning.versions import BROKEN, Place, VersionPlan, plan_role_changes, plan_updates
from fleet.rollouts.planning.waves import RolloutProgress

# Order in which surplus cells stop.
SURPLUS_ORDER = (
    CellState.PENDING,
    CellState.DRAINING,
    CellState.LOST,
    CellState.FAILED,
    CellState.STARTING,
    CellState.READY,
)


def plan_scale(
    fleet: FleetView, versions: VersionPlan, ledger: Ledger, notices: Notices, settings: FleetSettings
) -> tuple[list[Decision], set[str]]:
    """Cells to create and to stop, and the cells that leave. Cells whose machines end count as surplus once their
    successors exist."""
    decisions: list[Decision] = []
    leaving: set[str] = set()
    types = TypePlan(fleet, versions.live, notices, settings)
    for place in sorted(_places(fleet, versions)):
        decisions += _create_cells(fleet, versions, types, place, notices)
        surplus = _surplus(fleet, versions, types, place, notices)
        leaving |= {cell.id for cell in surplus}
        decisions += _remove_surplus(fleet, versions, types, ledger, place, surplus, notices)
    return decisions, leaving


def _places(fleet: FleetView, versions: VersionPlan) -> set[Place]:
    wanted = {(name, region) for name, spec in fleet.deployments.items() for region in spec.cells_wanted}
    return {place for place in wanted | set(versions.live) if not fleet.deployments[place[0]].problem}


def _create_cells(
    fleet: FleetView, versions: VersionPlan, types: TypePlan, place: Place, notices: Notices
) -> Iterator[CreateCell]:
    deployment, region = place
    live = versions.live.get(place, ())
    ending = [cell for cell in live if cell.id in notices.going]
    going = len(ending)
    wanted, there = _target_cells(fleet, place), len(live) - going
    if ending:
        versions.roles.leave(place, ending)
    for kind, why in _new_types(fleet, types, place, wanted - there):
        version = versions.of_new(deployment, region)
        role = versions.roles.of_new(place, version)
        yield CreateCell(deployment, region, kind, _count_reason(wanted, there, going) + why, version, role)
    progress = versions.progress(deployment)
    if progress is None or not progress.is_surging:
        return
    room = progress.rollout.policy.surge - max(0, there - wanted)
    for _ in range(min(room, versions.lacking(deployment, region) - max(0, wanted - there))):
        versions.create_at_goal(deployment, region)
        reason = f"rollout {progress.rollout.id}: starts before a cell of {progress.stage.region} stops"
        role = versions.roles.of_new(place, progress.goal, goal=progress.goal)
        yield CreateCell(deployment, region, types.of_surge(place, progress.goal), reason, progress.goal, role)


def _new_types(fleet: FleetView, types: TypePlan, place: Place, lacking: int) -> Iterator[tuple[str, str]]:
    """The instance type of each missing cell with the reason. A cell on another type may be created before a waiting or
    misplaced one stops."""
    if not types.has_choice(place):
        yield from [(fleet.deployments[place[0]].instance_type, "")] * max(0, lacking)
        return
    split, there = types.split(place), types.there(place)
    for kind, count in split.cells.items():
        why = f"; on {kind}: {split.why[kind]}" if kind in split.why else ""
        yield from [(kind, why)] * max(0, count - there[kind])


def _surplus(
    fleet: FleetView, versions: VersionPlan, types: TypePlan, place: Place, notices: Notices
) -> list[CellView]:
    cells = list(versions.live.get(place, ()))
    progress = versions.progress(place[0])
    excess = len(cells) - _target_cells(fleet, place) - _kept_by_surge(progress, versions, place)
    if excess <= 0:
        return []
    surging = progress is not None and progress.is_surging
    goal = progress.goal if progress else fleet.deployments[place[0]].version

    def least_useful(cell: CellView) -> tuple[bool, bool, bool, bool, int, bool, float, str]:
        is_new = cell.version == goal
        rank = SURPLUS_ORDER.index(cell.state)
        stays, has_place = cell.id not in notices.going, cell.role not in too_many
        is_right = cell.instance_type not in wrong
        return stays, surging and is_new, has_place, is_right, rank, is_new, -cell.created_at.timestamp(), cell.id

    too_many: frozenset[CellRole] = frozenset()
    wrong: frozenset[str] = frozenset()
    # During a rollout only the version counts, or it would never end.
    by_type = types.split(place).cells if types.has_choice(place) and progress is None else None
    if not versions.roles.are_apart(place) and by_type is None:
        return sorted(cells, key=least_useful)[:excess]
    surplus: list[CellView] = []
    for _ in range(excess):
        if by_type is not None:
            there = Counter(cell.instance_type for cell in cells)
            wrong = frozenset(kind for kind, count in there.items() if count > by_type.get(kind, 0))
        too_many = beyond(counted(cell.role for cell in cells), versions.roles.wanted(place))
        surplus.append(min(cells, key=least_useful))
        cells.remove(surplus[-1])
    return surplus


def _kept_by_surge(progress: RolloutProgress | None, versions: VersionPlan, place: Place) -> int:
    """Cells above the target that a surge keeps: old ones stay next to new ones until the bake is over."""
    if progress is None or not progress.is_surging or progress.is_returning:
        return 0
    return 0 if versions.lacking(*place) > 0 else progress.rollout.policy.surge


def _remove_surplus(
    fleet: FleetView,
    versions: VersionPlan,
    types: TypePlan,
    ledger: Ledger,
    place: Place,
    surplus: list[CellView],
    notices: Notices,
) -> Iterator[Decision]:
    going = sum(cell.id in notices.going for cell in surplus)
    wanted, there = _target_cells(fleet, place), len(versions.live[place]) - going
    progress = versions.progress(place[0])
    surging = progress.rollout.id if progress and progress.is_surging else None
    scale_reason = _count_reason(wanted, there, going)
    claim = fleet.deployments[place[0]].claim(place[1])
    superfluous = len(surplus) - (claim.asked - wanted)
    for number, cell in enumerate(surplus):
        makes_room = number >= superfluous
        kind = cell.instance_type
        by_type = types.split(place).why.get(kind) if types.has_choice(place) else None
        cause = DisruptionCause.PREEMPTION if makes_room else DisruptionCause.SCALE
        reason = claim.reason if makes_room else scale_reason + (f"; not on {kind}: {by_type}" if by_type else "")
        if cell.state is CellState.READY:
            refused = ledger.refusal(cell, cause) is not None
            forced = refused and cell.id in notices.going and _cannot_wait(fleet, cell, notices)
            if not refused or forced:
                ledger.charge(cell, cause)
                yield DrainCell(cell.id, cell.generation, cause, reason, surging, forced)
        elif cell.state is CellState.STARTING:
            yield MoveCell(cell.id, cell.state, cell.generation, CellState.DRAINING, reason)
        elif cell.state is not CellState.DRAINING:
            yield StopCell(cell.id, cell.state, cell.generation, reason)


def _cannot_wait(fleet: FleetView, cell: CellView, notices: Notices) -> bool:
    """Whether it must drain now. While its successors still start, it waits as long as possible."""
    others = [one for one in fleet.cells.values() if one.deployment == cell.deployment and one.id not in notices.going]
    serves = any(one.state is CellState.READY and notices.is_taken_up(one) for one in others)
    starts = any(one.state in {CellState.STARTING, CellState.READY} for one in others)
    return notices.must_drain(cell, is_awaited=starts and not serves)


def _count_reason(wanted: int, there: int, going: int) -> str:
    more = f", and {going} whose machines end" if going else ""
    return f"{wanted} cells wanted, {there} exist{more}"


def _target_cells(fleet: FleetView, place: Place) -> int:
    return fleet.deployments[place[0]].cells_wanted.get(place[1], 0)


WAITING = BROKEN | {CellState.PENDING, CellState.DRAINING}
"""Cells that wait for an action."""


@dataclass
class _Pass:
    """Working memory of one plan: decisions, cells that need nodes, and the number of explanations."""

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
    """Steps towards the desired state. Repairs come before new cells and get the nearest spares."""
    work = _Pass(fleet, settings, now)
    scaled, leaving = plan_scale(fleet, work.versions, work.ledger, work.notices, settings)
    work.decisions += scaled
    work.decisions += plan_updates(fleet, work.versions, work.ledger, leaving)
    work.decisions += plan_role_changes(fleet, work.versions.roles, work.versions.live, work.ledger, leaving)
    for cell in fleet.cells.values():
        if problem := fleet.deployments[cell.deployment].problem:
            _explain_problem(work, cell, problem)
        elif cell.state is CellState.DRAINING:
            _finish_drain(work, cell, cell.returns and cell.id not in leaving)
        elif cell.id not in leaving:
            _bring_up(work, cell)
    _place_cells(work)
    return tuple(work.decisions)


def _explain_problem(work: _Pass, cell: CellView, problem: str) -> None:
    """Leaves a cell without a valid target alone, and explains it if it does not serve."""
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
    """Starts a cell that should run. A broken cell waits longer after each failure of the same version."""
    if cell.state is CellState.PENDING:
        _start_again(work, cell, "")
    elif work.versions.has_obsolete_target(cell):
        _start_again(work, cell, "stopped halfway")
    elif cell.state in BROKEN:
        wait_s = _backoff_s(cell.restarts, work.settings)
        _start_again(work, cell, f"restart {cell.restarts + 1}, {wait_s:.0f} s after it broke", wait_s)


def _start_again(work: _Pass, cell: CellView, reason: str, wait_s: float = 0.0) -> None:
    """Starts a cell on its remaining nodes, and requests the missing ones. Waits while one of them is silent: it may be
    dead, and the new generation would fail as well."""
    version = work.versions.of(cell)
    size = work.fleet.deployments[cell.deployment].of(version, cell.instance_type).nodes_per_cell
    members = [work.fleet.nodes[member.node] for member in cell.members]
    staying = tuple(node for node in members if node.state not in DEAD)[:size]
    if not all(_is_reporting(work, cell, node) for node in staying):
        return
    short = size - len(staying)
    if short > 0:
        work.ordered[cell.id] = version
        work.orders.append(_placement_request(work, cell, version, staying, short))
        return
    if version != cell.version:
        why = "it broke" if wait_s else reason
        reason, wait_s = f"{why}; {cell.version} -> {version}", 0.0
    if _age_s(cell, work.now) >= wait_s:
        work.decisions.append(_start_cell(work, cell, staying, reason, version))


def _start_cell(work: _Pass, cell: CellView, nodes: Iterable[NodeView], reason: str, version: str) -> StartCell:
    role = work.versions.roles.of(cell, version)
    if role is not cell.role and cell.generation:
        reason = f"{reason}; {cell.role} -> {role}"
    other = role if role is not cell.role else None
    return StartCell(cell.id, cell.state, cell.generation, tuple(node.id for node in nodes), reason, version, other)


def _is_reporting(work: _Pass, cell: CellView, node: NodeView) -> bool:
    """Whether a remaining node reports. For a broken cell it must have reported since then, because its death may be
    the cause."""
    seen_at = work.fleet.holds_until(node, work.now)
    if node.state is not NodeState.READY or not node.report.connected or seen_at is None:
        return False
    spoke_since = cell.state not in BROKEN or seen_at > cell.state_since
    return spoke_since and work.fleet.unheard_s(node, work.now) <= work.settings.doubt_after_s


def _placement_request(
    work: _Pass, cell: CellView, version: str, staying: tuple[NodeView, ...], count: int
) -> PlacementRequest:
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


def _place_cells(work: _Pass) -> None:
    """Starts the cells that get nodes, explains the others, and plans the supply of machines and their layouts."""
    placement = Placement(work.fleet)
    turns = cells_in_turn(work.fleet, {order.cell for order in work.orders})
    work.orders.sort(key=lambda order: turns[order.cell])
    work.orders = [replace(order, turn=turns[order.cell][:2]) for order in work.orders]
    answers = placement.place(work.orders)
    for order in work.orders:
        cell, answer = work.fleet.cells[order.cell], answers[order.cell]
        if isinstance(answer, Placed):
            work.decisions.append(_start_cell(work, cell, answer.nodes, answer.reason, work.ordered[cell.id]))
            continue
        _explain(work, cell, waiting(cell.reason, answer.reason, is_broken=order.is_repair))
    ahead = [
        beside for cell in _cells_losing_machines(work) if (beside := supply_ahead(cell, work.fleet, work.notices))
    ]
    wanted = needs([*work.orders, *ahead], answers | placement.place(ahead))
    work.decisions += plan_supply(work.fleet, work.settings, work.now, placement.spares, wanted)
    waits = waiting_cells(work.fleet, work.orders, answers, work.now)
    work.decisions += plan_layouts(work.fleet, work.settings, work.now, placement.spares, waits, work.ledger)


def _cells_losing_machines(work: _Pass) -> Iterator[CellView]:
    """Serving cells that will need another machine, which is bought before they are drained."""
    for node in work.notices.by_node:
        cell = work.fleet.cell_of(node)
        if cell is None or cell.id in work.ordered or cell.id in work.notices.going or cell.is_leaving:
            continue
        if work.notices.end_of(node) and min(m.node for m in cell.members if work.notices.end_of(m.node)) == node:
            yield cell


def _backoff_s(restarts: int, settings: FleetSettings) -> float:
    return float(min(settings.restart_backoff_s * 2.0 ** min(restarts, 30), settings.restart_backoff_max_s))


def _age_s(cell: CellView, now: datetime) -> float:
    return (now - cell.state_since).total_seconds()


Planner = Callable[[FleetView, FleetSettings, datetime], tuple[Decision, ...]]

PLANNERS: tuple[Planner, ...] = (
    plan_liveness, plan_notices, plan_faults, plan_health, plan_rollout, plan_shares, plan_reconcile,
    plan_prefetch,
)  # fmt: skip
MAX_ROUNDS = 6
"""Rounds of one pass. The next pass continues."""

LEASE_TTL_S = 5.0
"""A worker killed during a pass blocks the next for this long; with its start that stays below the 15 s of I8. Renewed
every second between decisions."""
