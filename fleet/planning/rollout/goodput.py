"""Holds a rollout whose version carries less than the one before, by stored benchmarks. Pure.

Both must have been measured under the same conditions: machines, software, workload, objective and seed. Of several
conditions the worst decides.
"""

from collections.abc import Sequence

from fleet.planning.policy import GatePolicy, GoodputMissing
from fleet.planning.snapshot import Finding, Verdict
from models_registry.planning.benchmark import ComparedGoodput


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
