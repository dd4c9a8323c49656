"""Decides which role a cell has when it starts next, and which serving cells go down now to come back in another one.
Pure; it counts what it has given out in this pass.

A role is like a version: a cell keeps it as long as no more of that role are there than its place should have. What
starts anyway takes a role that is missing; only what is missing then is taken down for, under the disruption ledger.

Decides which version a cell runs when it starts next, and which serving cells go down now to come back at another.
Pure; it counts what it has given out in this pass.

Without a rollout that is the deployment's own. With one, as many cells of a region as the stage asks for get the goal
version, and the others the one that the rollout comes from, whatever else they ran before. What serves is taken down as
far as that stage asks and the disruption ledger allows, and comes back on its own nodes.
"""

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
HOLDING = frozenset({CellState.READY, CellState.STARTING})
"""Cells whose role stands; all others take one when they start."""


class RolePlan:
    """The roles of one pass. `live`: the cells that stay, by place."""

    def __init__(self, fleet: FleetView, live: Mapping[Place, list[CellView]]) -> None:
        self._fleet = fleet
        self._live = live
        self._given: dict[Place, list[CellRole]] = {}
        """Roles of cells that stand, and of those that got one in this pass."""
        self._beyond: dict[Place, list[CellRole]] = {}
        """Of those that are created beyond what is wanted."""

    def wanted(self, place: Place) -> RoleSplit:
        """How many cells of each role a place should have."""
        return self._fleet.deployments[place[0]].split(place[1])

    def are_apart(self, place: Place) -> bool:
        """Whether a place has cells that are not mixed, or should have some."""
        wanted = self.wanted(place).is_apart
        return wanted or any(cell.role is not CellRole.MIXED for cell in self._live.get(place, ()))

    def leave(self, place: Place, cells: Iterable[CellView]) -> None:
        """These cells of a place, whose machines end, hold their roles no longer: others come in their stead."""
        given = self._roles(place)
        for cell in cells:
            if cell.state in HOLDING:
                given.remove(cell.role)

    def of(self, cell: CellView, version: str) -> CellRole:
        """The role that this cell has if it is started now with this version."""
        place = (cell.deployment, cell.region)
        given, wanted = self._roles(place), self.wanted(place)
        if cell.state in HOLDING and cell.role in given:
            given.remove(cell.role)
        role = cell.role
        if not self._fleet.deployments[cell.deployment].of(version).hands_over:
            role = CellRole.MIXED
        elif given.count(role) >= wanted.of(role) or (wanted.decode and CellRole.DECODE not in given):
            role = most_lacking(counted(given), wanted) or role
        given.append(role)
        return role

    def of_new(self, place: Place, version: str, goal: str = "") -> CellRole:
        """The role of a cell that is created. `goal`: it comes beyond what is wanted, for a rollout to that version."""
        given, wanted = self._roles(place), self.wanted(place)
        if not self._fleet.deployments[place[0]].of(version).hands_over:
            role = CellRole.MIXED
        elif goal:
            created = self._beyond.setdefault(place, [])
            role = next(iter(next_to_move(self.at(place, goal, created), wanted)), CellRole.MIXED)
            created.append(role)
        else:
            role = most_lacking(counted(given), wanted) or CellRole.MIXED
        given.append(role)
        return role

    def at(self, place: Place, version: str, more: Iterable[CellRole] = ()) -> RoleSplit:
        """The roles of the cells that run a version, or are on their way down to come back with it, with some more."""
        cells = self._live.get(place, ())
        return counted([*(cell.role for cell in cells if cell.version == version or cell.returns), *more])

    def _roles(self, place: Place) -> list[CellRole]:
        if place not in self._given:
            cells = self._live.get(place, ())
            self._given[place] = [cell.role for cell in cells if cell.state in HOLDING]
        return self._given[place]


def in_turn(cells: Iterable[CellView], moved: RoleSplit, wanted: RoleSplit) -> Iterator[CellView]:
    """Cells in the order in which a rollout moves them, the oldest of a role first."""
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
    """Cells to drain so that they come back in the role that is missing; none while a rollout moves cells, whose gates
    compare cells of equal roles."""
    for place in sorted(live):
        deployment = fleet.deployments[place[0]]
        if deployment.problem or place[0] in fleet.rollouts or not roles.are_apart(place):
            continue
        cells = [cell for cell in live[place] if cell.id not in leaving]
        wanted = deployment.split(place[1])
        if len(cells) != wanted.total:
            continue
        yield from _changes([cell for cell in cells if cell.state in HOLDING], wanted, ledger)


def _changes(cells: list[CellView], wanted: RoleSplit, ledger: Ledger) -> Iterator[DrainCell]:
    there = counted(cell.role for cell in cells)
    for role in _to_change(there, wanted):
        surplus = max(1, there.of(role) - wanted.of(role))
        ready = [cell for cell in cells if cell.role is role and cell.state is CellState.READY]
        for cell in sorted(ready, key=lambda one: (one.created_at, one.id))[:surplus]:
            if ledger.refusal(cell, DisruptionCause.ROLE) is not None:
                break
            ledger.charge(cell, DisruptionCause.ROLE)
            reason = f"its place should have {wanted}, and has {there}"
            yield DrainCell(cell.id, cell.generation, DisruptionCause.ROLE, reason)


def _to_change(there: RoleSplit, wanted: RoleSplit) -> list[CellRole]:
    """Roles of which cells are to become others. The last cell that answers cannot; a prefill cell comes back as a
    decode cell in its stead, and then it can."""
    if wanted.decode and not there.decode and there.answering == 1 and there.prefill:
        return [CellRole.PREFILL]
    return sorted(beyond(there, wanted))


# Decides which prefill cells a decode cell may call, and whom a prefill cell may be called by: cells of one place
# whose KV layouts are equal.
# Never two of different layouts, whatever a rollout is at: a decode cell without a prefill cell of its own layout
# does all by itself.


@dataclass(frozen=True, slots=True)
class PairingCell:
    """A cell apart that runs. `layout`: the fingerprint of what it hands over, never empty; `node`: its leader;
    `serves`: it takes new work."""

    id: str
    role: CellRole
    layout: str
    node: str
    serves: bool


def prefill_cells_of(decode: PairingCell, there: Iterable[PairingCell]) -> tuple[PairingCell, ...]:
    """Those of the cells of its place that this decode cell may call."""
    found = (
        one
        for one in there
        if one.role is CellRole.PREFILL and one.serves and one.layout and one.layout == decode.layout
    )
    return tuple(sorted(found, key=lambda one: one.id)[:PREFILL_CELLS_MAX])


def decode_nodes_of(prefill: PairingCell, there: Iterable[PairingCell]) -> tuple[str, ...]:
    """The nodes whose proxies may call this prefill cell: they may still do so while they drain."""
    found = {one.node for one in there if one.role is CellRole.DECODE and one.layout and one.layout == prefill.layout}
    return tuple(sorted(found)[:DECODE_NODES_MAX])


BROKEN = frozenset({CellState.FAILED, CellState.LOST})


class VersionPlan:
    """The versions and `roles` of one pass. `live` holds the cells that stay, by place."""

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
        """Of the deployments with an active rollout, by name."""
        return (self._progress[name] for name in sorted(self._progress))

    def lacking(self, deployment: str, region: str) -> int:
        """How many more cells of the region should move to the goal now. Cells on their way down count as moved."""
        progress = self._progress.get(deployment)
        if progress is None or not progress.is_moving or deployment in self._halted:
            return 0
        on_their_way = sum(cell.returns for cell in self.live.get((deployment, region), ()))
        return progress.quota(region) - self._at_goal[deployment, region] - on_their_way

    def of(self, cell: CellView) -> str:
        """The version that this cell runs if it is started now."""
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
        """The version that a cell is created for."""
        progress = self._progress.get(deployment)
        if progress is None:
            return self._fleet.deployments[deployment].version
        return progress.goal if progress.is_complete(region) else progress.rollout.from_version

    def create_at_goal(self, deployment: str, region: str) -> None:
        """A cell is created for the goal version."""
        self._at_goal[deployment, region] += 1

    def has_obsolete_target(self, cell: CellView) -> bool:
        """Whether a starting cell starts a version that is no longer wanted."""
        progress = self._progress.get(cell.deployment)
        if progress is None or cell.state is not CellState.STARTING:
            return False
        return cell.version not in {progress.goal, progress.rollout.from_version}

    def _may_move(self, cell: CellView, progress: RolloutProgress) -> bool:
        if cell.returns:
            return True
        return progress.is_complete(cell.region) or (progress.is_moving and cell.deployment not in self._halted)

    def _is_halted(self, progress: RolloutProgress) -> bool:
        """One failed start is enough to stop spreading, until that cell has proven that it can start."""
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
    """Whether a cell runs this version or will, not counting one that is on its way down."""
    return cell.version == version and cell.state is not CellState.DRAINING


def plan_updates(fleet: FleetView, versions: VersionPlan, ledger: Ledger, leaving: set[str]) -> Iterator[DrainCell]:
    """Cells to drain for their rollout, as many as may be down together."""
    for deployment in sorted(fleet.rollouts):
        progress = versions.progress(deployment)
        if progress is None or progress.is_surging or progress.deployment.problem:
            continue
        for region in progress.regions:
            idle = _not_serving(versions, deployment, region, progress.goal)
            count = versions.lacking(deployment, region) - idle
            for cell in _candidates(versions, progress, region, leaving):
                if count <= 0 or ledger.refusal(cell, DisruptionCause.ROLLOUT) is not None:
                    break
                ledger.charge(cell, DisruptionCause.ROLLOUT)
                count -= 1
                reason = f"rollout {progress.rollout.id} moves it to {progress.goal}"
                yield DrainCell(cell.id, cell.generation, DisruptionCause.ROLLOUT, reason, progress.rollout.id)


def _not_serving(versions: VersionPlan, deployment: str, region: str, goal: str) -> int:
    """Old cells that will take the goal version when they start: no serving cell need go down for them."""
    waiting = {CellState.PENDING, CellState.FAILED, CellState.LOST}
    cells = versions.live.get((deployment, region), ())
    return sum(cell.state in waiting and cell.version != goal for cell in cells)


def _candidates(versions: VersionPlan, progress: RolloutProgress, region: str, leaving: set[str]) -> Iterator[CellView]:
    """Serving cells of other versions, roles and instance types in turn, the oldest first."""
    place, goal = (progress.deployment.name, region), progress.goal
    cells = versions.live.get(place, ())
    old = [c for c in cells if c.state is CellState.READY and c.version != goal and c.id not in leaving]
    turn = in_turn(old, versions.roles.at(place, goal), versions.roles.wanted(place))
    return _types_in_turn(turn, cells, goal) if progress.deployment.further else turn


def _types_in_turn(turn: Iterable[CellView], cells: Iterable[CellView], goal: str) -> Iterator[CellView]:
    """So that a version is seen on each type early: next is one on that on which the fewest run it."""
    moved = Counter(cell.instance_type for cell in cells if cell.version == goal or cell.returns)
    left = list(turn)
    while left:
        cell = min(left, key=lambda one: moved[one.instance_type])
        left.remove(cell)
        moved[cell.instance_type] += 1
        yield cell
