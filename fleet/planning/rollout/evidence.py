"""What a bake is judged by: which cells are compared, what they had counted when it began, and what since. Pure."""

from collections.abc import Callable, Iterable, Mapping

from fleet.planning.load.counters import CellCounters, pooled
from fleet.planning.rollout.gates import judge
from fleet.planning.rollout.versions import VersionPlan
from fleet.planning.rollout.waves import Course
from fleet.planning.snapshot import CellView, Finding, Verdict
from fleet.planning.states import CellState

CELLS_COMPARED = 100
"""Of each kind; more would not make the verdict better, only the rollout's row larger."""


def updated_cells(course: Course, versions: VersionPlan, region: str) -> list[CellView]:
    """Serving cells of the new version in a region."""
    cells = versions.live.get((course.deployment.name, region), ())
    return [cell for cell in cells if cell.state is CellState.READY and cell.version == course.rollout.to_version]


def control_cells(course: Course, versions: VersionPlan) -> list[CellView]:
    """Serving cells of other versions: those of the stage's region if there are any, else those of all."""
    by_region = {
        region: [
            cell
            for cell in versions.live.get((course.deployment.name, region), ())
            if cell.state is CellState.READY and cell.version != course.rollout.to_version
        ]
        for region in course.regions
    }
    return by_region[course.stage.region] or [cell for cells in by_region.values() for cell in cells]


def counters_now(course: Course, versions: VersionPlan) -> dict[str, CellCounters]:
    """What the cells to compare have counted until now."""
    updated = updated_cells(course, versions, course.stage.region)[:CELLS_COMPARED]
    control = control_cells(course, versions)[:CELLS_COMPARED]
    return {cell.id: cell.counters for cell in (*updated, *control) if cell.counters is not None}


def bake_verdict(course: Course, versions: VersionPlan, is_fresh: Callable[[CellView], bool]) -> Verdict:
    """The verdict over the bake that ends now. A cell without a fresh report gives no evidence, and no updated cell of
    any region may be without one: it may have stopped answering an hour after its own bake."""
    for region in course.regions:
        for cell in updated_cells(course, versions, region):
            if not is_fresh(cell):
                return Verdict(Finding.INCONCLUSIVE, f"{cell.id}, updated, has not reported lately that it is well")
    before = course.rollout.counters
    updated = _since(updated_cells(course, versions, course.stage.region), before)
    if not updated:
        return Verdict(Finding.INCONCLUSIVE, "no updated cell has reported what it served during the bake")
    old = control_cells(course, versions)
    control = _since(filter(is_fresh, old), before)
    if old and not control:
        return Verdict(Finding.INCONCLUSIVE, "no cell of the old version has reported what it served during the bake")
    return judge(pooled(updated), pooled(control) if old else None, course.rollout.policy.gate)


def _since(cells: Iterable[CellView], before: Mapping[str, CellCounters]) -> list[CellCounters]:
    """What each has counted since the bake began; cells that started anew meanwhile are left out."""
    found = (cell.counters.since(before[cell.id]) for cell in cells if cell.counters and cell.id in before)
    return [counted for counted in found if counted is not None]
