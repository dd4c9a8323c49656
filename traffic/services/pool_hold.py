"""Keeps what ingresses are told of deployments that may have no cells: for how long a request waits for the first one,
when that is expected, and whether it may have machines at all. Only while the autoscaler would start one: else waiting
would be for nothing."""

from collections import defaultdict
from collections.abc import Iterable
from datetime import datetime

from fleet.models import Cell
from fleet.planning.autoscaling.policy import CellRange
from fleet.planning.hold import hold_s, may_be_empty, ready_at_s, stepped_s, withheld_by
from fleet.planning.states import CellState
from fleet.selectors.snapshot import claim_of
from kernel import hints
from traffic.models import PoolHold
from traffic.selectors.autoscaling import ScaledDeployment

_TOLD = ("for_s", "cold_start_s", "ready_at", "regions", "withheld")
_STARTS = (CellState.PENDING.value, CellState.STARTING.value)


def pool_holds_follow(*, scaled: Iterable[ScaledDeployment], now: datetime) -> bool:
    """Write what has changed; returns whether anything did, of which ingresses are then told."""
    held = {one.view.deployment: one for one in scaled if one.acting and may_be_empty(one.view.policy, _ranges(one))}
    there = {row.deployment_id: row for row in PoolHold.objects.all()}
    started = _started(held) if held else {}
    wanted = {name: _row(one, started.get(name, [])) for name, one in held.items()}
    gone = there.keys() - wanted.keys()
    changed = [row for name, row in wanted.items() if name not in there or not _is_same(row, there[name])]
    if gone:
        PoolHold.objects.filter(deployment__in=gone).delete()
    PoolHold.objects.bulk_create(
        changed,
        update_conflicts=True,
        unique_fields=["deployment"],
        update_fields=list(_TOLD),
    )
    if gone or changed:
        hints.ring("traffic.publish")
    return bool(gone or changed)


def _ranges(one: ScaledDeployment) -> list[CellRange]:
    return [place.range for place in one.view.places]


def _row(one: ScaledDeployment, started: list[datetime]) -> PoolHold:
    is_served = any(place.ready for place in one.view.places)
    return PoolHold(
        deployment_id=one.view.deployment,
        for_s=hold_s(one.view.policy, one.view.start_up_s),
        cold_start_s=stepped_s(one.view.start_up_s),
        ready_at=0 if is_served else ready_at_s(started, one.view.start_up_s),
        regions=sorted(place.region for place in one.view.places),
        withheld=withheld_by(claim_of(row) for row in one.rows.values()).value,
    )


def _is_same(row: PoolHold, other: PoolHold) -> bool:
    return all(getattr(row, name) == getattr(other, name) for name in _TOLD)


def _started(names: Iterable[str]) -> dict[str, list[datetime]]:
    """When the cells were created that start now."""
    started: dict[str, list[datetime]] = defaultdict(list)
    cells = Cell.objects.filter(deployment__in=list(names), state__in=_STARTS).order_by()
    for name, created_at in cells.values_list("deployment_id", "created_at"):
        started[name].append(created_at)
    return started
