"""Decides after a bake whether updated cells are worse than cells of the old version, from what both counted at the
same time and from stored benchmarks. A version is worse if a difference is beyond the policy's ratio and unlikely by
chance. Too few samples never promote it (I6). Also merges the points of a rollout's charts."""

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


def gate_verdict(updated: CellCounters, control: CellCounters | None, policy: GatePolicy) -> Verdict:
    """The gate's verdict. `control` is None if no cell of the old version serves; then only health counts, which the
    caller has checked."""
    numbers: Numbers = {"requests": updated.requests, "errors": updated.errors}
    if control is None:
        reason = f"no cell of the old version is left; healthy, with {updated.errors} errors in"
        return Verdict(Finding.PASSED, f"{reason} {updated.requests} requests", numbers)
    numbers |= {"control_requests": control.requests, "control_errors": control.errors}
    sides = {"time to first token": (updated.ttft, control.ttft), "time between tokens": (updated.itl, control.itl)}
    errors = _errors_worsening(updated, control, policy, numbers)
    findings = [_latency_finding(name, *pair, policy, numbers) for name, pair in sides.items()]
    worse = [worsening for worsening in (errors, *(finding.worse for finding in findings)) if worsening]
    if worse:
        return Verdict(Finding.WORSE, "; ".join(worse), numbers)
    lacking = [finding.lacking for finding in findings if finding.lacking]
    lacking += _too_few("requests", updated.requests, control.requests, policy)
    if lacking:
        return Verdict(Finding.INCONCLUSIVE, "; ".join(lacking), numbers)
    return Verdict(Finding.PASSED, f"no worse than the old version over {updated.requests} requests", numbers)


@dataclass(frozen=True, slots=True)
class _LatencyFinding:
    worse: str = ""
    lacking: str = ""


def _errors_worsening(updated: CellCounters, control: CellCounters, policy: GatePolicy, numbers: Numbers) -> str:
    if not updated.requests or not control.requests:
        return ""
    share, usual = updated.errors / updated.requests, control.errors / control.requests
    chance = more_by_chance(updated.errors, updated.requests, control.errors, control.requests)
    numbers["errors_chance"] = round(chance, 6)
    if share <= policy.error_ratio * usual or chance >= policy.significance:
        return ""
    return f"{share:.1%} of requests failed, {usual:.1%} with the old version"


def _latency_finding(
    name: str, updated: Counts, control: Counts, policy: GatePolicy, numbers: Numbers
) -> _LatencyFinding:
    key = name.replace(" ", "_")
    numbers |= {f"{key}_samples": total(updated), f"{key}_control_samples": total(control)}
    if lacking := _too_few(f"samples of {name}", total(updated), total(control), policy):
        return _LatencyFinding(lacking=lacking[0])
    findings = []
    for label, q in (("median", 0.50), ("p95", 0.95)):
        here, there = quantile_bucket(updated, q), quantile_bucket(control, q)
        ratio = 2 ** ((here - there) / BUCKETS_PER_DOUBLING)
        chance = greater_by_chance(updated, control) if q == 0.50 else _tail_by_chance(updated, control, there)
        numbers |= {
            f"{key}_{label}_ms": round(midpoint_s(here) * 1000, 3),
            f"{key}_{label}_control_ms": round(midpoint_s(there) * 1000, 3),
            f"{key}_{label}_chance": round(chance, 6),
        }
        if ratio > policy.latency_ratio and chance < policy.significance:
            findings.append(f"{label} {name} is {ratio:.2f} times the old version's")
    return _LatencyFinding(worse="; ".join(findings))


def _tail_by_chance(updated: Counts, control: Counts, bucket: int) -> float:
    """Probability that so many samples of updated cells exceed the old version's quantile by chance."""
    return more_by_chance(count_above(updated, bucket), total(updated), count_above(control, bucket), total(control))


def _too_few(what: str, updated: int, control: int, policy: GatePolicy) -> list[str]:
    if min(updated, control) >= policy.min_samples:
        return []
    return [f"{updated} {what} of updated and {control} of old cells, at least {policy.min_samples} of each needed"]


CELLS_COMPARED = 100
"""Per side. More cells would enlarge the rollout's row without a better verdict."""


_WORST_FIRST = (Finding.WORSE, Finding.INCONCLUSIVE, Finding.PASSED)


def updated_cells(progress: RolloutProgress, versions: VersionPlan, region: str) -> list[CellView]:
    """Serving cells of the new version in a region."""
    cells = versions.live.get((progress.deployment.name, region), ())
    return [cell for cell in cells if _is_serving(cell) and cell.version == progress.rollout.to_version]


def control_cells(progress: RolloutProgress, versions: VersionPlan) -> list[CellView]:
    """Serving cells of other versions, in the stage's region or, if it has none, in all regions."""
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
    updated = updated_cells(progress, versions, progress.stage.region)[:CELLS_COMPARED]
    control = control_cells(progress, versions)[:CELLS_COMPARED]
    return {cell.id: cell.counters for cell in (*updated, *control) if cell.counters is not None}


def bake_verdict(progress: RolloutProgress, versions: VersionPlan, is_fresh: Callable[[CellView], bool]) -> Verdict:
    """The verdict at the end of a bake. Every updated cell of every region needs a recent report, because a cell may
    stop answering long after its own bake."""
    for region in progress.regions:
        for cell in updated_cells(progress, versions, region):
            if not is_fresh(cell):
                return Verdict(Finding.INCONCLUSIVE, f"{cell.id}, updated, has not reported recently")
    updated, old = updated_cells(progress, versions, progress.stage.region), control_cells(progress, versions)
    groups = [(updated, old)]
    if progress.deployment.further and updated:
        kinds = sorted({cell.instance_type for cell in updated})
        groups = [(_on_type(kind, updated), _on_type(kind, old)) for kind in kinds]
    verdicts = [_verdict_on_type(progress, new, before, is_fresh) for new, before in groups]
    verdict = min(verdicts, key=lambda one: _WORST_FIRST.index(one.finding))
    if verdict.finding is not Finding.PASSED:
        return verdict
    return goodput_objection(progress.rollout.goodput, progress.rollout.policy.gate) or verdict


def _verdict_on_type(
    progress: RolloutProgress, updated: list[CellView], old: list[CellView], is_fresh: Callable[[CellView], bool]
) -> Verdict:
    """Compares cells on the same instance type, because speed depends on the machine."""
    before = progress.rollout.counters
    served = _counted_since(updated, before)
    if not served:
        return Verdict(Finding.INCONCLUSIVE, "no updated cell has reported what it served during the bake")
    control = _counted_since(filter(is_fresh, old), before)
    if old and not control:
        return Verdict(Finding.INCONCLUSIVE, "no cell of the old version has reported what it served during the bake")
    verdict = gate_verdict(pooled(served), pooled(control) if old else None, progress.rollout.policy.gate)
    where = f"on {updated[0].instance_type}: " if progress.deployment.further else ""
    return replace(verdict, reason=where + verdict.reason)


def _on_type(kind: str, cells: Iterable[CellView]) -> list[CellView]:
    return [cell for cell in cells if cell.instance_type == kind]


def _is_serving(cell: CellView) -> bool:
    """Excludes prefill cells. They count no answers and are judged by their decode cells."""
    return cell.state is CellState.READY and answers(cell.role)


def _counted_since(cells: Iterable[CellView], before: Mapping[str, CellCounters]) -> list[CellCounters]:
    """Each cell's counters since the bake began, without cells that restarted meanwhile."""
    counters = (cell.counters.since(before[cell.id]) for cell in cells if cell.counters and cell.id in before)
    return [counted for counted in counters if counted is not None]


def goodput_objection(compared: Sequence[ComparedGoodput], policy: GatePolicy) -> Verdict | None:
    """The objection of stored benchmarks if the new version has less goodput, or None. Both versions must have been
    measured under the same machines, software, workload, objective and seed; the worst condition decides."""
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
        f"its goodput is {worst.after:.4g} requests/s per cell, {share:.2f} of the old version's {worst.before:.4g}, "
        f"at {worst.label}; {policy.goodput_ratio:g} is required"
    )
    return Verdict(Finding.INCONCLUSIVE, reason)


Values = Sequence[float | None]
Lines = Mapping[str, Mapping[str, Values]]
"""Measure -> version -> values."""
NEW, OLD = "new", "old"
MAX_POINTS = 960
"""Per line: four hours in steps of 15 s. Six lines take about 40 KB."""
MERGED_BY: Mapping[str, Callable[[Sequence[float]], float]] = {"ttft": max, "itl": max, "errors": fmean}
"""Measure -> how several values are merged: worst latency, mean of shares."""


def length_of(lines: Lines) -> int:
    """Number of steps, the same in every line."""
    return max((len(values) for versions in lines.values() for values in versions.values()), default=0)


def merged(lines: Lines, count: int) -> dict[str, dict[str, list[float | None]]]:
    """Merges every `count` steps into one; the last may cover fewer."""
    return {
        measure: {
            version: [_merge_values(measure, values[place : place + count]) for place in range(0, len(values), count)]
            for version, values in versions.items()
        }
        for measure, versions in lines.items()
    }


def appended(lines: Lines, more: Lines) -> dict[str, dict[str, list[float | None]]]:
    return {
        measure: {version: [*lines.get(measure, {}).get(version, ()), *values] for version, values in versions.items()}
        for measure, versions in more.items()
    }


def _merge_values(measure: str, values: Values) -> float | None:
    known = [value for value in values if value is not None]
    return MERGED_BY[measure](known) if known else None
