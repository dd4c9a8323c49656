"""Decides which version a cell runs when it starts next, and which serving cells go down now to come back at another.
Pure; it counts what it has given out in this pass.

Without a rollout that is the deployment's own. With one, as many cells of a region as the stage asks for get the goal
version, and the others the one that the rollout comes from, whatever else they ran before. What serves is taken down as
far as that stage asks and the disruption ledger allows, and comes back on its own nodes.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

from fleet.planning.decisions import DrainCell
from fleet.planning.ledger import Ledger
from fleet.planning.roles.plan import Place, RolePlan, in_turn
from fleet.planning.rollout.waves import RolloutProgress, progress_of
from fleet.planning.snapshot import CellView, FleetView
from fleet.planning.states import CellState, DisruptionCause

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
