"""Judges updated cells against cells of the old version at the same time, from what both counted during a bake.

Pure. A version is worse when a difference is both large (beyond the policy's ratio) and hardly chance. Too few samples
say nothing, and nothing is not enough to promote (I6).

What a bake is judged by: which cells are compared, what they had counted when it began, and what since. Pure.

The points of a rollout's charts as they are kept: appended in steps, merged into longer ones at a bound. Pure.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from engine_agent.protocol.metrics import BUCKETS_PER_DOUBLING, midpoint_s
from fleet.autoscaling.planning.role_split import answers
from fleet.deployments.planner import GatePolicy, GoodputMissing
from fleet.load.planner import (
    CellCounters,
    Counts,
    count_above,
    greater_by_chance,
    more_by_chance,
    pooled,
    quantile_bucket,
    total,
)
from fleet.reconcile.planning.snapshot import CellView, Finding, Verdict
from fleet.reconcile.planning.states import CellState
from fleet.rollouts.planning.versions import VersionPlan
from fleet.rollouts.planning.waves import RolloutProgress
from models_registry.benchmarks.planning.workload import ComparedGoodput

Numbers = dict[str, float | None]


def judge(updated: CellCounters, control: CellCounters | None, policy: GatePolicy) -> Verdict:
    """What the bake proves. `control` None: no cell of the old version serves any more.

    Then there is nothing to compare with at the same time, and health alone, which the caller has seen to, decides.
    """
    numbers: Numbers = {"requests": updated.requests, "errors": updated.errors}
    if control is None:
        reason = f"no cell of the old version is left to compare with; healthy, with {updated.errors} errors in"
        return Verdict(Finding.PASSED, f"{reason} {updated.requests} requests", numbers)
    numbers |= {"control_requests": control.requests, "control_errors": control.errors}
    sides = {"time to first token": (updated.ttft, control.ttft), "time between tokens": (updated.itl, control.itl)}
    errors = _errors(updated, control, policy)
    findings = [_latency(name, *pair, policy, numbers) for name, pair in sides.items()]
    worse = [worsening for worsening in (errors, *(finding.worse for finding in findings)) if worsening]
    if worse:
        return Verdict(Finding.WORSE, "; ".join(worse), numbers)
    lacking = [finding.lacking for finding in findings if finding.lacking]
    lacking += _few("requests", updated.requests, control.requests, policy)
    if lacking:
        return Verdict(Finding.INCONCLUSIVE, "; ".join(lacking), numbers)
    return Verdict(Finding.PASSED, f"no worse than the old version over {updated.requests} requests", numbers)


@dataclass(frozen=True, slots=True)
class _Finding:
    worse: str = ""
    lacking: str = ""


def _errors(updated: CellCounters, control: CellCounters, policy: GatePolicy) -> str:
    if not updated.requests or not control.requests:
        return ""
    share, usual = updated.errors / updated.requests, control.errors / control.requests
    chance = more_by_chance(updated.errors, updated.requests, control.errors, control.requests)
    if share <= policy.error_ratio * usual or chance >= policy.significance:
        return ""
    return f"{share:.1%} of requests failed, {usual:.1%} with the old version"


def _latency(name: str, updated: Counts, control: Counts, policy: GatePolicy, numbers: Numbers) -> _Finding:
    key = name.replace(" ", "_")
    numbers |= {f"{key}_samples": total(updated), f"{key}_control_samples": total(control)}
    if lacking := _few(f"samples of {name}", total(updated), total(control), policy):
        return _Finding(lacking=lacking[0])
    findings = []
    for label, q in (("median", 0.50), ("p95", 0.95)):
        here, there = quantile_bucket(updated, q), quantile_bucket(control, q)
        ratio = 2 ** ((here - there) / BUCKETS_PER_DOUBLING)
        numbers |= {
            f"{key}_{label}_ms": round(midpoint_s(here) * 1000, 3),
            f"{key}_{label}_control_ms": round(midpoint_s(there) * 1000, 3),
        }
        chance = greater_by_chance(updated, control) if q == 0.50 else _tail_by_chance(updated, control, there)
        if ratio > policy.latency_ratio and chance < policy.significance:
            findings.append(f"{label} {name} is {ratio:.2f} times the old version's")
    return _Finding(worse="; ".join(findings))


def _tail_by_chance(updated: Counts, control: Counts, bucket: int) -> float:
    """Whether it is chance that so many more of the updated cells' samples lie beyond the old version's quantile."""
    return more_by_chance(count_above(updated, bucket), total(updated), count_above(control, bucket), total(control))


def _few(what: str, updated: int, control: int, policy: GatePolicy) -> list[str]:
    if min(updated, control) >= policy.min_samples:
        return []
    return [f"{updated} {what} of updated and {control} of old cells, {policy.min_samples} of each are needed"]


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


Values = Sequence[float | None]
Lines = Mapping[str, Mapping[str, Values]]
"""Measure -> version -> values."""
NEW, OLD = "new", "old"
MOST_POINTS = 960
"""Of a line: four hours in steps of 15 s. Six lines of them are some 40 KB."""
MERGED_BY: Mapping[str, Callable[[Sequence[float]], float]] = {"ttft": max, "itl": max, "errors": fmean}
"""Measure -> what stands for several values: the worst latency, the mean of shares."""


def length_of(lines: Lines) -> int:
    """How many steps the lines have; all have as many."""
    return max((len(values) for versions in lines.values() for values in versions.values()), default=0)


def merged(lines: Lines, count: int) -> dict[str, dict[str, list[float | None]]]:
    """The same with `count` steps as one; the last one may be of fewer."""
    return {
        measure: {
            version: [_merge(measure, values[place : place + count]) for place in range(0, len(values), count)]
            for version, values in versions.items()
        }
        for measure, versions in lines.items()
    }


def appended(lines: Lines, more: Lines) -> dict[str, dict[str, list[float | None]]]:
    """The lines with more steps behind them."""
    return {
        measure: {version: [*lines.get(measure, {}).get(version, ()), *values] for version, values in versions.items()}
        for measure, versions in more.items()
    }


def _merge(measure: str, values: Values) -> float | None:
    known = [value for value in values if value is not None]
    return MERGED_BY[measure](known) if known else None
