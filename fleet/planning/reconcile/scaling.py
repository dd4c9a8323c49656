"""Decides how many cells there are: creates what is missing, ends what is too much, and surges for rollouts.

Pure. Whatever takes an available cell down needs leave of the disruption ledger, and waits if that refuses.
"""

from collections import Counter
from collections.abc import Iterator

from engine_agent.protocol.states import CellRole
from fleet.planning.decisions import CreateCell, Decision, DrainCell, MoveCell, StopCell
from fleet.planning.ledger import Ledger
from fleet.planning.notices import Notices
from fleet.planning.role_split import beyond, counted
from fleet.planning.roles.plan import Place
from fleet.planning.rollout.versions import VersionPlan
from fleet.planning.rollout.waves import RolloutProgress
from fleet.planning.settings import FleetSettings
from fleet.planning.snapshot import CellView, FleetView
from fleet.planning.states import CellState, DisruptionCause
from fleet.planning.type_plan import TypePlan

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
