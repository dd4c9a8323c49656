"""Decides how many cells there are: creates what is missing, ends what is too much, and surges for rollouts.

Pure. Whatever takes an available cell down needs leave of the disruption ledger, and waits if that refuses.

Decides what brings the fleet from what it is to what it should be: how many cells, and on which nodes.

One plan for scaling, rollouts and repair, over one disruption ledger. Works on one snapshot; a pass is repeated until
it decides nothing more.

Which planners make up a round, and in which order: the first whose decisions change something ends it. And who may
run one: whoever holds a lease.

The live reconciler and the simulator run these and no others.
"""

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
from fleet.rollouts.planning.versions import BROKEN, Place, VersionPlan, plan_role_changes, plan_updates
from fleet.rollouts.planning.waves import RolloutProgress

# When a region has too many cells, the least useful goes first.
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
    """What to create and to end, and the cells that are on their way out. Cells whose machines end are too many as soon
    as others are there in their place."""
    decisions: list[Decision] = []
    leaving: set[str] = set()
    types = TypePlan(fleet, versions.live, notices, settings)
    for place in sorted(_places(fleet, versions)):
        decisions += _create(fleet, versions, types, place, notices)
        surplus = _surplus(fleet, versions, types, place, notices)
        leaving |= {cell.id for cell in surplus}
        decisions += _end(fleet, versions, types, ledger, place, surplus, notices)
    return decisions, leaving


def _places(fleet: FleetView, versions: VersionPlan) -> set[Place]:
    wanted = {(name, region) for name, spec in fleet.deployments.items() for region in spec.cells_wanted}
    return {place for place in wanted | set(versions.live) if not fleet.deployments[place[0]].problem}


def _create(
    fleet: FleetView, versions: VersionPlan, types: TypePlan, place: Place, notices: Notices
) -> Iterator[CreateCell]:
    deployment, region = place
    live = versions.live.get(place, ())
    ending = [cell for cell in live if cell.id in notices.going]
    going = len(ending)
    wanted, there = _wanted(fleet, place), len(live) - going
    if ending:
        versions.roles.leave(place, ending)
    for kind, why in _new_types(fleet, types, place, wanted - there):
        version = versions.of_new(deployment, region)
        role = versions.roles.of_new(place, version)
        yield CreateCell(deployment, region, kind, _reason(wanted, there, going) + why, version, role)
    progress = versions.progress(deployment)
    if progress is None or not progress.is_surging:
        return
    room = progress.rollout.policy.surge - max(0, there - wanted)
    for _ in range(min(room, versions.lacking(deployment, region) - max(0, wanted - there))):
        versions.create_at_goal(deployment, region)
        reason = f"rollout {progress.rollout.id}: comes before a cell of {progress.stage.region} goes"
        role = versions.roles.of_new(place, progress.goal, goal=progress.goal)
        yield CreateCell(deployment, region, types.of_surge(place, progress.goal), reason, progress.goal, role)


def _new_types(fleet: FleetView, types: TypePlan, place: Place, lacking: int) -> Iterator[tuple[str, str]]:
    """The instance type of each cell that is missing, and why that one. A cell of another type may come before one that
    waits in vain, or works where it should not, goes."""
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
    excess = len(cells) - _wanted(fleet, place) - _held(progress, versions, place)
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
    # What a rollout moves goes by version alone, or it would never be over.
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


def _held(progress: RolloutProgress | None, versions: VersionPlan, place: Place) -> int:
    """Cells beyond the wanted ones that a surge keeps: the old ones stay beside the new until the bake is over."""
    if progress is None or not progress.is_surging or progress.is_returning:
        return 0
    return 0 if versions.lacking(*place) > 0 else progress.rollout.policy.surge


def _end(
    fleet: FleetView,
    versions: VersionPlan,
    types: TypePlan,
    ledger: Ledger,
    place: Place,
    surplus: list[CellView],
    notices: Notices,
) -> Iterator[Decision]:
    going = sum(cell.id in notices.going for cell in surplus)
    wanted, there = _wanted(fleet, place), len(versions.live[place]) - going
    progress = versions.progress(place[0])
    surging = progress.rollout.id if progress and progress.is_surging else None
    scale_reason = _reason(wanted, there, going)
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
    """Whether it must drain now. While all that could serve instead still starts, it waits as long as it can."""
    others = [one for one in fleet.cells.values() if one.deployment == cell.deployment and one.id not in notices.going]
    serves = any(one.state is CellState.READY and notices.is_taken_up(one) for one in others)
    starts = any(one.state in {CellState.STARTING, CellState.READY} for one in others)
    return notices.must_drain(cell, is_awaited=starts and not serves)


def _reason(wanted: int, there: int, going: int) -> str:
    more = f", and {going} whose machines end" if going else ""
    return f"{wanted} cells wanted, {there} there{more}"


def _wanted(fleet: FleetView, place: Place) -> int:
    return fleet.deployments[place[0]].cells_wanted.get(place[1], 0)


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


Planner = Callable[[FleetView, FleetSettings, datetime], tuple[Decision, ...]]

PLANNERS: tuple[Planner, ...] = (
    plan_liveness, plan_notices, plan_faults, plan_health, plan_rollout, plan_shares, plan_reconcile,
)  # fmt: skip
MAX_ROUNDS = 6
"""Rounds of one pass; what is left is for the next."""

LEASE_TTL_S = 5.0
"""A worker killed in the middle of a pass holds up the next for this long; with its own start that stays below the
15 s of I8. It is renewed every second, between decisions, each of which takes a fraction of it."""
