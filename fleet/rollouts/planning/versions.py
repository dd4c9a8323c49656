"""Decides which version and role a cell gets when it next starts, which serving cells are drained now to change theirs,
and which prefill and decode cells pair. Counts what it has assigned in this pass. It never drains more than a stage
needs and the disruption ledger allows.

Without a rollout, cells get the deployment's own version. With one, as many cells of a region as the stage requires get
the goal version, and all others the one that the rollout comes from. A cell keeps its role unless its place has too
many of it."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from engine_agent.protocol.messages import DECODE_NODES_MAX, PREFILL_CELLS_MAX
from engine_agent.protocol.states import CellRole
from fleet.autoscaling.planning.role_split import RoleSplit, beyond, counted, most_lacking, next_to_move
from fleet.reconcile.planning.decisions import DrainCell
from fleet.reconcile.planning.settings import Ledger
from fleet.reconcile.planning.snapshot import CellView, FleetView
from fleet.reconcile.planning.states import CellState, DisruptionCause
from fleet.rollouts.planning.waves import RolloutProgress, progress_of

Place = tuple[str, str]
"""Deployment, region."""
KEPT_STATES = frozenset({CellState.READY, CellState.STARTING})
"""Cells in these states keep their role. All others get one when they start."""


class RolePlan:
    """Roles of one pass. `live`: cells that stay, by place."""

    def __init__(self, fleet: FleetView, live: Mapping[Place, list[CellView]]) -> None:
        self._fleet = fleet
        self._live = live
        self._assigned: dict[Place, list[CellRole]] = {}
        """Roles of running cells and of those assigned in this pass."""
        self._above_target: dict[Place, list[CellRole]] = {}
        """Roles of cells created above the target."""

    def wanted(self, place: Place) -> RoleSplit:
        return self._fleet.deployments[place[0]].split(place[1])

    def are_apart(self, place: Place) -> bool:
        """Whether a place has or should have separate prefill and decode cells."""
        wanted = self.wanted(place).is_apart
        return wanted or any(cell.role is not CellRole.MIXED for cell in self._live.get(place, ()))

    def leave(self, place: Place, cells: Iterable[CellView]) -> None:
        """Frees the roles of cells whose machines end, for their successors."""
        given = self._roles(place)
        for cell in cells:
            if cell.state in KEPT_STATES:
                given.remove(cell.role)

    def of(self, cell: CellView, version: str) -> CellRole:
        """The role that this cell gets if it starts now with this version."""
        place = (cell.deployment, cell.region)
        given, wanted = self._roles(place), self.wanted(place)
        if cell.state in KEPT_STATES and cell.role in given:
            given.remove(cell.role)
        role = cell.role
        if not self._fleet.deployments[cell.deployment].of(version).hands_over:
            role = CellRole.MIXED
        elif given.count(role) >= wanted.of(role) or (wanted.decode and CellRole.DECODE not in given):
            role = most_lacking(counted(given), wanted) or role
        given.append(role)
        return role

    def of_new(self, place: Place, version: str, goal: str = "") -> CellRole:
        """The role of a new cell. `goal`: it is a surge cell of a rollout to that version."""
        given, wanted = self._roles(place), self.wanted(place)
        if not self._fleet.deployments[place[0]].of(version).hands_over:
            role = CellRole.MIXED
        elif goal:
            created = self._above_target.setdefault(place, [])
            role = next(iter(next_to_move(self.at(place, goal, created), wanted)), CellRole.MIXED)
            created.append(role)
        else:
            role = most_lacking(counted(given), wanted) or CellRole.MIXED
        given.append(role)
        return role

    def at(self, place: Place, version: str, more: Iterable[CellRole] = ()) -> RoleSplit:
        """Roles of cells that run a version or are being drained to return with it, plus `more`."""
        cells = self._live.get(place, ())
        return counted([*(cell.role for cell in cells if cell.version == version or cell.returns), *more])

    def _roles(self, place: Place) -> list[CellRole]:
        if place not in self._assigned:
            cells = self._live.get(place, ())
            self._assigned[place] = [cell.role for cell in cells if cell.state in KEPT_STATES]
        return self._assigned[place]


def in_turn(cells: Iterable[CellView], moved: RoleSplit, wanted: RoleSplit) -> Iterator[CellView]:
    """Cells in the order in which a rollout moves them, per role the oldest first."""
    left = sorted(cells, key=lambda cell: (cell.created_at, cell.id))
    at = {role: moved.of(role) for role in CellRole}
    while left:
        split = RoleSplit(at[CellRole.MIXED], at[CellRole.PREFILL], at[CellRole.DECODE])
        turn = next_to_move(split, wanted)
        cell = next((one for role in turn for one in left if one.role is role), left[0])
        left.remove(cell)
        at[cell.role] += 1
        yield cell


def plan_role_changes(
    fleet: FleetView, roles: RolePlan, live: Mapping[Place, list[CellView]], ledger: Ledger, leaving: set[str]
) -> Iterator[DrainCell]:
    """Cells to drain so that they return in a missing role. None during a rollout, whose gates compare cells of equal
    roles."""
    for place in sorted(live):
        deployment = fleet.deployments[place[0]]
        if deployment.problem or place[0] in fleet.rollouts or not roles.are_apart(place):
            continue
        cells = [cell for cell in live[place] if cell.id not in leaving]
        wanted = deployment.split(place[1])
        if len(cells) != wanted.total:
            continue
        yield from _role_drains([cell for cell in cells if cell.state in KEPT_STATES], wanted, ledger)


def _role_drains(cells: list[CellView], wanted: RoleSplit, ledger: Ledger) -> Iterator[DrainCell]:
    present = counted(cell.role for cell in cells)
    for role in _roles_to_convert(present, wanted):
        surplus = max(1, present.of(role) - wanted.of(role))
        ready = [cell for cell in cells if cell.role is role and cell.state is CellState.READY]
        for cell in sorted(ready, key=lambda one: (one.created_at, one.id))[:surplus]:
            if ledger.refusal(cell, DisruptionCause.ROLE) is not None:
                break
            ledger.charge(cell, DisruptionCause.ROLE)
            reason = f"its place needs {wanted} and has {present}"
            yield DrainCell(cell.id, cell.generation, DisruptionCause.ROLE, reason)


def _roles_to_convert(present: RoleSplit, wanted: RoleSplit) -> list[CellRole]:
    """Roles with cells to convert. The last cell that answers must stay: a prefill cell becomes a decode cell first."""
    if wanted.decode and not present.decode and present.answering == 1 and present.prefill:
        return [CellRole.PREFILL]
    return sorted(beyond(present, wanted))


# Only cells of one place with equal KV layouts pair. A decode cell without such a prefill cell computes prompts itself.


@dataclass(frozen=True, slots=True)
class PairingCell:
    """A running prefill or decode cell. `layout`: fingerprint of the KV layout that it hands over, never empty; `node`:
    its leader; `serves`: it accepts new work."""

    id: str
    role: CellRole
    layout: str
    node: str
    serves: bool


def prefill_cells_of(decode: PairingCell, present: Iterable[PairingCell]) -> tuple[PairingCell, ...]:
    """Prefill cells of its place with the same KV layout, which this decode cell may call."""
    found = (
        one
        for one in present
        if one.role is CellRole.PREFILL and one.serves and one.layout and one.layout == decode.layout
    )
    return tuple(sorted(found, key=lambda one: one.id)[:PREFILL_CELLS_MAX])


def decode_nodes_of(prefill: PairingCell, present: Iterable[PairingCell]) -> tuple[str, ...]:
    """Nodes whose proxies may call this prefill cell, including those of draining cells."""
    found = {one.node for one in present if one.role is CellRole.DECODE and one.layout and one.layout == prefill.layout}
    return tuple(sorted(found)[:DECODE_NODES_MAX])


BROKEN = frozenset({CellState.FAILED, CellState.LOST})


class VersionPlan:
    """Versions and `roles` of one pass. `live`: cells that stay, by place."""

    def __init__(self, fleet: FleetView) -> None:
        self._fleet = fleet
        self._progress = {
            name: progress
            for name, deployment in fleet.deployments.items()
            if (progress := progress_of(deployment, fleet.rollouts.get(name)))
        }
        self.live: dict[Place, list[CellView]] = defaultdict(list)
        for cell in fleet.cells.values():
            if not cell.is_leaving:
                self.live[cell.deployment, cell.region].append(cell)
        self.roles = RolePlan(fleet, self.live)
        self._at_goal: Counter[Place] = Counter()
        for name, progress in self._progress.items():
            for region in progress.regions:
                cells = self.live.get((name, region), ())
                self._at_goal[name, region] = sum(is_at(cell, progress.goal) for cell in cells)
        self._halted = {name for name, progress in self._progress.items() if self._is_halted(progress)}

    def progress(self, deployment: str) -> RolloutProgress | None:
        return self._progress.get(deployment)

    def active(self) -> Iterable[RolloutProgress]:
        """Progress of active rollouts, by deployment name."""
        return (self._progress[name] for name in sorted(self._progress))

    def lacking(self, deployment: str, region: str) -> int:
        """How many more cells of the region should move to the goal now. Draining cells count as moved."""
        progress = self._progress.get(deployment)
        if progress is None or not progress.is_moving or deployment in self._halted:
            return 0
        on_their_way = sum(cell.returns for cell in self.live.get((deployment, region), ()))
        return progress.quota(region) - self._at_goal[deployment, region] - on_their_way

    def of(self, cell: CellView) -> str:
        """The version that this cell gets if it starts now."""
        progress = self._progress.get(cell.deployment)
        if progress is None:
            return self._fleet.deployments[cell.deployment].version
        if is_at(cell, progress.goal):
            return progress.goal
        place = (cell.deployment, cell.region)
        if self._may_move(cell, progress) and self._at_goal[place] < progress.quota(cell.region):
            self._at_goal[place] += 1
            return progress.goal
        return progress.rollout.from_version

    def of_new(self, deployment: str, region: str) -> str:
        progress = self._progress.get(deployment)
        if progress is None:
            return self._fleet.deployments[deployment].version
        return progress.goal if progress.is_complete(region) else progress.rollout.from_version

    def create_at_goal(self, deployment: str, region: str) -> None:
        """Counts a new cell on the goal version."""
        self._at_goal[deployment, region] += 1

    def has_obsolete_target(self, cell: CellView) -> bool:
        """Whether a starting cell has a version that is no longer needed."""
        progress = self._progress.get(cell.deployment)
        if progress is None or cell.state is not CellState.STARTING:
            return False
        return cell.version not in {progress.goal, progress.rollout.from_version}

    def _may_move(self, cell: CellView, progress: RolloutProgress) -> bool:
        if cell.returns:
            return True
        return progress.is_complete(cell.region) or (progress.is_moving and cell.deployment not in self._halted)

    def _is_halted(self, progress: RolloutProgress) -> bool:
        """One failed start stops further moves until that cell is ready."""
        if progress.is_returning:
            return False
        failed = {start.cell for start in progress.rollout.failed}
        cells = (cell for region in progress.regions for cell in self.live.get((progress.deployment.name, region), ()))
        return any(
            is_at(cell, progress.goal)
            and cell.state is not CellState.READY
            and (cell.state is CellState.FAILED or cell.id in failed)
            for cell in cells
        )


def is_at(cell: CellView, version: str) -> bool:
    """Whether a cell runs or will run this version. A draining cell does not count."""
    return cell.version == version and cell.state is not CellState.DRAINING


def plan_updates(fleet: FleetView, versions: VersionPlan, ledger: Ledger, leaving: set[str]) -> Iterator[DrainCell]:
    """Cells to drain for their rollout, within the allowed disruption. Those whose nodes still fetch the version wait,
    except in a rollback."""
    for deployment in sorted(fleet.rollouts):
        progress = versions.progress(deployment)
        if progress is None or progress.is_surging or progress.deployment.problem:
            continue
        for region in progress.regions:
            idle = _not_serving(versions, deployment, region, progress.goal)
            count = versions.lacking(deployment, region) - idle
            for cell in cells_to_move(versions, progress, region, leaving):
                if count <= 0 or ledger.refusal(cell, DisruptionCause.ROLLOUT) is not None:
                    break
                if not progress.is_returning and fleet.lacking_nodes(cell, progress.goal):
                    continue
                ledger.charge(cell, DisruptionCause.ROLLOUT)
                count -= 1
                reason = f"rollout {progress.rollout.id} moves it to {progress.goal}"
                yield DrainCell(cell.id, cell.generation, DisruptionCause.ROLLOUT, reason, progress.rollout.id)


def _not_serving(versions: VersionPlan, deployment: str, region: str, goal: str) -> int:
    """Old cells that will start with the goal version, so that no serving cell must be drained for them."""
    waiting = {CellState.PENDING, CellState.FAILED, CellState.LOST}
    cells = versions.live.get((deployment, region), ())
    return sum(cell.state in waiting and cell.version != goal for cell in cells)


def cells_to_move(
    versions: VersionPlan, progress: RolloutProgress, region: str, leaving: set[str]
) -> Iterator[CellView]:
    """Serving cells of other versions, alternating roles and instance types, the oldest first."""
    place, goal = (progress.deployment.name, region), progress.goal
    cells = versions.live.get(place, ())
    old = [c for c in cells if c.state is CellState.READY and c.version != goal and c.id not in leaving]
    turn = in_turn(old, versions.roles.at(place, goal), versions.roles.wanted(place))
    return _types_in_turn(turn, cells, goal) if progress.deployment.further else turn


def _types_in_turn(turn: Iterable[CellView], cells: Iterable[CellView], goal: str) -> Iterator[CellView]:
    """Picks the instance type with the fewest updated cells next, so that every type runs the new version early."""
    moved = Counter(cell.instance_type for cell in cells if cell.version == goal or cell.returns)
    left = list(turn)
    while left:
        cell = min(left, key=lambda one: moved[one.instance_type])
        left.remove(cell)
        moved[cell.instance_type] += 1
        yield cell
