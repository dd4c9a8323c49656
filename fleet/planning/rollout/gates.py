"""Judges updated cells against cells of the old version at the same time, from what both counted during a bake.

Pure. A version is worse when a difference is both large (beyond the policy's ratio) and hardly chance. Too few samples
say nothing, and nothing is not enough to promote (I6).
"""

from dataclasses import dataclass

from engine_agent.protocol.metrics import BUCKETS_PER_DOUBLING, midpoint_s
from fleet.planning.load.counters import CellCounters
from fleet.planning.load.statistics import (
    Counts,
    count_above,
    greater_by_chance,
    more_by_chance,
    quantile_bucket,
    total,
)
from fleet.planning.policy import GatePolicy
from fleet.planning.snapshot import Finding, Verdict

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
