"""What a bake is judged by: which cells are compared, what they had counted when it began, and what since. Pure."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from fleet.planning.load.counters import CellCounters, pooled
from fleet.planning.policy import GatePolicy, GoodputMissing
from fleet.planning.role_split import answers
from fleet.planning.rollout.gates import judge
from fleet.planning.rollout.versions import VersionPlan
from fleet.planning.rollout.waves import RolloutProgress
from fleet.planning.snapshot import CellView, Finding, Verdict
from fleet.planning.states import CellState
from models_registry.planning.benchmark import ComparedGoodput

CELLS_COMPARED = 100
"""Of each kind; more would not make the verdict better, only the rollout's row larger."""


_GRAVEST_FIRST = (Finding.WORSE, Finding.INCONCLUSIVE, Finding.PASSED)


def updated_cells(progress: RolloutProgress, versions: VersionPlan, region: str) -> list[CellView]:
    """Serving cells of the new version in a region."""
    cells = versions.live.get((progress.deployment.name, region), ())
    return [cell for cell in cells if _is_serving(cell) and cell.version == progress.rollout.to_version]


def control_cells(progress: RolloutProgress, versions: VersionPlan) -> list[CellView]:
    """Serving cells of other versions: those of the stage's region if there are any, else those of all."""
    by_region = {
        region: [
            cell
            for cell in versions.live.get((progress.deployment.name, region), ())
            if _is_serving(cell) and cell.version != progress.rollout.to_version
        ]
        for region in progress.regions
    }
    return by_region[progress.stage.region] or [cell for cells in by_region.values() for cell in cells]


def counters_now(progress: RolloutProgress, versions: VersionPlan) -> dict[str, CellCounters]:
    """What the cells to compare have counted until now."""
    updated = updated_cells(progress, versions, progress.stage.region)[:CELLS_COMPARED]
    control = control_cells(progress, versions)[:CELLS_COMPARED]
    return {cell.id: cell.counters for cell in (*updated, *control) if cell.counters is not None}


def bake_verdict(progress: RolloutProgress, versions: VersionPlan, is_fresh: Callable[[CellView], bool]) -> Verdict:
    """The verdict over the bake that ends now. A cell without a fresh report gives no evidence, and no updated cell of
    any region may be without one: it may have stopped answering an hour after its own bake."""
    for region in progress.regions:
        for cell in updated_cells(progress, versions, region):
            if not is_fresh(cell):
                return Verdict(Finding.INCONCLUSIVE, f"{cell.id}, updated, has not reported lately that it is well")
    updated, old = updated_cells(progress, versions, progress.stage.region), control_cells(progress, versions)
    groups = [(updated, old)]
    if progress.deployment.further and updated:
        kinds = sorted({cell.instance_type for cell in updated})
        groups = [(_on(kind, updated), _on(kind, old)) for kind in kinds]
    verdicts = [_of_alike(progress, new, before, is_fresh) for new, before in groups]
    verdict = min(verdicts, key=lambda one: _GRAVEST_FIRST.index(one.finding))
    if verdict.finding is not Finding.PASSED:
        return verdict
    return goodput_objection(progress.rollout.goodput, progress.rollout.policy.gate) or verdict


def _of_alike(
    progress: RolloutProgress, updated: list[CellView], old: list[CellView], is_fresh: Callable[[CellView], bool]
) -> Verdict:
    """Of cells on the same machines: one on others is faster or slower whatever it runs."""
    before = progress.rollout.counters
    served = _since(updated, before)
    if not served:
        return Verdict(Finding.INCONCLUSIVE, "no updated cell has reported what it served during the bake")
    control = _since(filter(is_fresh, old), before)
    if old and not control:
        return Verdict(Finding.INCONCLUSIVE, "no cell of the old version has reported what it served during the bake")
    verdict = judge(pooled(served), pooled(control) if old else None, progress.rollout.policy.gate)
    where = f"on {updated[0].instance_type}: " if progress.deployment.further else ""
    return replace(verdict, reason=where + verdict.reason)


def _on(kind: str, cells: Iterable[CellView]) -> list[CellView]:
    return [cell for cell in cells if cell.instance_type == kind]


def _is_serving(cell: CellView) -> bool:
    """A prefill cell counts no answers: it is judged by those of the decode cells that it reads for."""
    return cell.state is CellState.READY and answers(cell.role)


def _since(cells: Iterable[CellView], before: Mapping[str, CellCounters]) -> list[CellCounters]:
    """What each has counted since the bake began; cells that started anew meanwhile are left out."""
    counters = (cell.counters.since(before[cell.id]) for cell in cells if cell.counters and cell.id in before)
    return [counted for counted in counters if counted is not None]


# Holds a rollout whose version carries less than the one before, by stored benchmarks.
# Both must have been measured under the same conditions: machines, software, workload, objective and seed. Of
# several conditions the worst decides.


def goodput_objection(compared: Sequence[ComparedGoodput], policy: GatePolicy) -> Verdict | None:
    """Why the rollout must not go on; None if it may, as far as benchmarks know."""
    if policy.goodput_ratio == 0:
        return None
    known = [pair for pair in compared if pair.before > 0]
    if not known:
        if policy.goodput_missing is GoodputMissing.GO_ON:
            return None
        reason = "no benchmark compares both versions; `switchyard bench run` measures them"
        return Verdict(Finding.INCONCLUSIVE, reason)
    worst = min(known, key=lambda pair: pair.after / pair.before)
    if worst.after >= policy.goodput_ratio * worst.before:
        return None
    share = worst.after / worst.before
    reason = (
        f"it carries {worst.after:.4g} requests/s a cell, {share:.2f} of the old version's {worst.before:.4g}, at "
        f"{worst.label}; {policy.goodput_ratio:g} is required"
    )
    return Verdict(Finding.INCONCLUSIVE, reason)
