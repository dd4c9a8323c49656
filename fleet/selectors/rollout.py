"""Rollouts as planners take them and as they are shown."""

from collections.abc import Mapping
from typing import Any

import msgspec
from django.db.models import QuerySet

from fleet.models import Deployment, NodeReport, Rollout
from fleet.planning.load.counters import CellCounters, counters_of
from fleet.planning.policy import UpdatePolicy, parse_policy
from fleet.planning.snapshot import FailedStart, RolloutView
from fleet.planning.states import ROLLOUT_ACTIVE, RolloutState
from fleet.selectors.load import load_stored
from models_registry.selectors.benchmark import goodput_compared

ACTIVE = sorted(state.value for state in ROLLOUT_ACTIVE)


def rollouts_described() -> QuerySet[Rollout]:
    """Rollouts, newest first, with their versions and deployment: one query."""
    return Rollout.objects.select_related("from_version", "to_version", "deployment")


def active_rollouts() -> list[Rollout]:
    """Those that planners work on: one query, and one for each whose gate asks for benchmarks."""
    rows = list(rollouts_described().filter(state__in=ACTIVE))
    for row in rows:
        if (row.policy.get("gate") or {}).get("goodput_ratio"):
            kind = row.deployment.instance_types[0]
            row.compared_goodput = goodput_compared(row.from_version, row.to_version, kind)
    return rows


def policy_in_force(deployment: str) -> UpdatePolicy:
    """What may be done to a deployment now: its rollout's copy while one is active, else its own."""
    rollout = Rollout.objects.filter(deployment_id=deployment, state__in=ACTIVE).first()
    return parse_policy(rollout.policy) if rollout else Deployment.objects.get(name=deployment).policy()


def rollout_view(rollout: Rollout) -> RolloutView:
    """The row as the pure planners take it."""
    return RolloutView(
        id=rollout.pk,
        deployment=rollout.deployment_id,
        from_version=rollout.from_version.reference,
        to_version=rollout.to_version.reference,
        state=RolloutState(rollout.state),
        stage=rollout.stage,
        region_order=tuple(rollout.region_order),
        policy=parse_policy(rollout.policy),
        revision=rollout.revision,
        state_since=rollout.state_since,
        reason=rollout.reason,
        failed=msgspec.convert(rollout.failed, tuple[FailedStart, ...]),
        counters=counters_stored(rollout.counters),
        goodput=rollout.compared_goodput,
    )


def counters_stored(stored: Mapping[str, Any]) -> dict[str, CellCounters]:
    """Cell -> what it had counted; JSON has made text of the numbers of buckets."""
    rows = {
        cell: [counted[name] for name in CellCounters.__struct_fields__ if name in counted]
        for cell, counted in stored.items()
    }
    return msgspec.convert(rows, dict[str, CellCounters], strict=False)


def counters_reported(report: NodeReport | None) -> CellCounters | None:
    """What a leader's last report says that its cell has counted in this generation."""
    if report is None or report.load is None:
        return None
    return counters_of(load_stored(report.load), report.generation)
