"""Decides which serving cells go down now to come back at another version. Pure.

Cells that do not serve need no decision here: they take their version when they start. What serves is taken down as
far as the stage of its rollout asks and the disruption ledger allows, and comes back on its own nodes.
"""

from collections.abc import Iterator

from fleet.planning.decisions import DrainCell
from fleet.planning.ledger import Ledger
from fleet.planning.rollout.versions import VersionPlan
from fleet.planning.snapshot import CellView, FleetView
from fleet.planning.states import CellState, DisruptionCause


def plan_updates(fleet: FleetView, versions: VersionPlan, ledger: Ledger, leaving: set[str]) -> Iterator[DrainCell]:
    """Cells to drain for their rollout, as many as may be down together."""
    for deployment in sorted(fleet.rollouts):
        course = versions.course(deployment)
        if course is None or course.is_surging or course.deployment.problem:
            continue
        for region in course.regions:
            idle = _not_serving(versions, deployment, region, course.goal)
            count = versions.lacking(deployment, region) - idle
            for cell in _candidates(versions, deployment, region, course.goal, leaving):
                if count <= 0 or ledger.refusal(cell, DisruptionCause.ROLLOUT) is not None:
                    break
                ledger.charge(cell, DisruptionCause.ROLLOUT)
                count -= 1
                reason = f"rollout {course.rollout.id} moves it to {course.goal}"
                yield DrainCell(cell.id, cell.generation, DisruptionCause.ROLLOUT, reason, course.rollout.id)


def _not_serving(versions: VersionPlan, deployment: str, region: str, goal: str) -> int:
    """Old cells that will take the goal version when they start: nobody need go down in their stead."""
    waiting = {CellState.PENDING, CellState.FAILED, CellState.LOST}
    cells = versions.live.get((deployment, region), ())
    return sum(cell.state in waiting and cell.version != goal for cell in cells)


def _candidates(versions: VersionPlan, deployment: str, region: str, goal: str, leaving: set[str]) -> list[CellView]:
    """Serving cells of other versions, the oldest first."""
    cells = versions.live.get((deployment, region), ())
    old = [c for c in cells if c.state is CellState.READY and c.version != goal and c.id not in leaving]
    return sorted(old, key=lambda cell: (cell.created_at, cell.id))
