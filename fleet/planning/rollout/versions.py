"""Decides which version a cell runs when it starts next. Pure; it counts what it has given out in this pass.

Without a rollout that is the deployment's own. With one, as many cells of a region as the stage asks for get the goal
version, and the others the one that the rollout comes from, whatever else they ran before.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable

from fleet.planning.rollout.waves import Course, course_of
from fleet.planning.snapshot import CellView, FleetView
from fleet.planning.states import CellState

Place = tuple[str, str]
"""Deployment, region."""
BROKEN = frozenset({CellState.FAILED, CellState.LOST})


class VersionPlan:
    """The versions of one pass. `live` holds the cells that stay, by place."""

    def __init__(self, fleet: FleetView) -> None:
        self._fleet = fleet
        self._courses = {
            name: course
            for name, deployment in fleet.deployments.items()
            if (course := course_of(deployment, fleet.rollouts.get(name)))
        }
        self.live: dict[Place, list[CellView]] = defaultdict(list)
        for cell in fleet.cells.values():
            if not cell.is_leaving:
                self.live[cell.deployment, cell.region].append(cell)
        self._at_goal: Counter[Place] = Counter()
        for name, course in self._courses.items():
            for region in course.regions:
                cells = self.live.get((name, region), ())
                self._at_goal[name, region] = sum(is_at(cell, course.goal) for cell in cells)
        self._halted = {name for name, course in self._courses.items() if self._is_halted(course)}

    def course(self, deployment: str) -> Course | None:
        return self._courses.get(deployment)

    def courses(self) -> Iterable[Course]:
        """Of the deployments with an active rollout, by name."""
        return (self._courses[name] for name in sorted(self._courses))

    def lacking(self, deployment: str, region: str) -> int:
        """How many more cells of the region should move to the goal now. Cells on their way down count as moved."""
        course = self._courses.get(deployment)
        if course is None or not course.is_moving or deployment in self._halted:
            return 0
        on_their_way = sum(cell.returns for cell in self.live.get((deployment, region), ()))
        return course.quota(region) - self._at_goal[deployment, region] - on_their_way

    def of(self, cell: CellView) -> str:
        """The version that this cell runs if it is started now."""
        course = self._courses.get(cell.deployment)
        if course is None:
            return self._fleet.deployments[cell.deployment].version
        if is_at(cell, course.goal):
            return course.goal
        place = (cell.deployment, cell.region)
        if self._may_move(cell, course) and self._at_goal[place] < course.quota(cell.region):
            self._at_goal[place] += 1
            return course.goal
        return course.rollout.from_version

    def of_new(self, deployment: str, region: str) -> str:
        """The version that a cell is created for."""
        course = self._courses.get(deployment)
        if course is None:
            return self._fleet.deployments[deployment].version
        return course.goal if course.is_complete(region) else course.rollout.from_version

    def create_at_goal(self, deployment: str, region: str) -> None:
        """A cell is created for the goal version."""
        self._at_goal[deployment, region] += 1

    def is_misled(self, cell: CellView) -> bool:
        """Whether a starting cell starts a version that nobody wants any more."""
        course = self._courses.get(cell.deployment)
        if course is None or cell.state is not CellState.STARTING:
            return False
        return cell.version not in {course.goal, course.rollout.from_version}

    def _may_move(self, cell: CellView, course: Course) -> bool:
        if cell.returns:
            return True
        return course.is_complete(cell.region) or (course.is_moving and cell.deployment not in self._halted)

    def _is_halted(self, course: Course) -> bool:
        """One failed start is enough to stop spreading, until that cell has proven that it can start."""
        if course.is_returning:
            return False
        failed = {start.cell for start in course.rollout.failed}
        cells = (cell for region in course.regions for cell in self.live.get((course.deployment.name, region), ()))
        return any(
            is_at(cell, course.goal)
            and cell.state is not CellState.READY
            and (cell.state is CellState.FAILED or cell.id in failed)
            for cell in cells
        )


def is_at(cell: CellView, version: str) -> bool:
    """Whether a cell runs this version or will, not counting one that is on its way down."""
    return cell.version == version and cell.state is not CellState.DRAINING
