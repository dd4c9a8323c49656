"""Charges disruptions, in the transaction of the step that takes a cell down, and closes them when it is over (I10).

A charge by the rules holds the ledger's lock until the commit and counts again: what the planner saw may be
gone, and two reconcilers that race cannot spend the same budget.
"""

from collections import Counter
from datetime import datetime, timedelta
from typing import Any

from django.db import connection
from django.db.models import Count, QuerySet, Sum
from django.db.models.functions import Coalesce, Least

from engine_agent.protocol.states import CellRole
from fleet.models import Cell, Deployment, DeploymentRegion, Disruption, Rollout
from fleet.planning.ledger import LedgerCounts, LedgerLimits, refusal
from fleet.planning.states import ROLLOUT_ACTIVE, ROLLOUT_MOVING, CellState, DisruptionCause
from fleet.selectors.rollout import policy_in_force
from kernel.transitions import StaleDecision

LOCK = 0x53_57_4C_47
"""Key of PostgreSQL's advisory lock: "SWLG", the ledger of the whole fleet."""


def disruption_charge(
    *,
    cell: Cell,
    cause: DisruptionCause,
    reason: str,
    rollout: int | None,
    now: datetime,
    limits: LedgerLimits,
    forced: bool = False,
) -> None:
    """Open an entry for a ready cell that is about to go down, if the budget still allows it, and its rollout, if it is
    one's, is still active and, where the cell is to go to another version, neither paused nor baking. `forced`: its
    machine ends in any case, so the budget is overspent.

    Raises:
        StaleDecision: they do not any more.
    """
    _lock(cell.deployment_id)
    if rollout is not None:
        _require_going(rollout, cell, cause)
    policy = policy_in_force(cell.deployment_id)
    standing = _standing(cell, policy.min_healthy_s, now)
    refused = refusal(standing, cause, policy.max_unavailable, limits)
    if refused and not forced:
        raise StaleDecision(f"cell {cell.id} stays: {refused}")
    disruption_open(cell=cell, cause=cause, reason=reason, rollout=rollout, now=now)


def disruption_open(
    *, cell: Cell, cause: DisruptionCause, reason: str, now: datetime, rollout: int | None = None
) -> None:
    """Open an entry without checking the budget: an operator's decision stands, and counts for every later charge."""
    Disruption.objects.get_or_create(
        cell=cell,
        closed_at=None,
        defaults={
            "deployment_id": cell.deployment_id,
            "region_id": cell.region_id,
            "cause": cause.value,
            "reason": reason,
            "rollout_id": rollout,
            "opened_at": now,
        },
    )


def disruption_close(*, cell_id: str, now: datetime) -> None:
    """The cell is ready again, or gone for good."""
    Disruption.objects.filter(cell_id=cell_id, closed_at__isnull=True).update(closed_at=now)


def _lock(deployment: str) -> None:
    """Until the commit no other worker charges, and none scales this deployment."""
    Deployment.objects.select_for_update().get(name=deployment)
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [LOCK])


def _require_going(rollout: int, cell: Cell, cause: DisruptionCause) -> None:
    """Until the commit nobody ends or pauses it. Who paused, aborted or superseded it before is obeyed, whatever a pass
    saw. A surplus of its cells may go while it is paused."""
    state = Rollout.objects.select_for_update().values_list("state", flat=True).get(pk=rollout)
    if state not in (ROLLOUT_MOVING if cause is DisruptionCause.ROLLOUT else ROLLOUT_ACTIVE):
        raise StaleDecision(f"cell {cell.pk} stays: rollout {rollout} is {state}")


def _standing(cell: Cell, min_healthy_s: float, now: datetime) -> LedgerCounts:
    proven = now - timedelta(seconds=min_healthy_s)
    there = Cell.objects.filter(deployment_id=cell.deployment_id, state=CellState.READY.value, state_since__lte=proven)
    available = _by_region(there)
    places = DeploymentRegion.objects.annotate(in_force=Least("cells", Coalesce("cells_granted", "cells")))
    wanted = dict(places.filter(deployment_id=cell.deployment_id).values_list("region_id", "in_force"))
    sums = places.order_by().values_list("region_id").annotate(in_region=Sum("in_force"))
    wanted_of_all = {region: int(cells) for region, cells in sums}
    entries = Disruption.objects.filter(closed_at__isnull=True)
    budgeted = _by_region(entries.exclude(cause=DisruptionCause.SCALE.value))
    return LedgerCounts(
        wanted=sum(wanted.values()),
        available=available.total(),
        open=entries.filter(deployment_id=cell.deployment_id).count(),
        wanted_here=wanted.get(cell.region_id, 0),
        available_here=available[cell.region_id],
        region_wanted=wanted_of_all.get(cell.region_id, 0),
        region_open=budgeted[cell.region_id],
        fleet_wanted=sum(wanted_of_all.values()),
        fleet_open=budgeted.total(),
        is_available=cell.state == CellState.READY and cell.state_since <= proven,
        available_prefill=there.filter(role=CellRole.PREFILL.value).count(),
        is_prefill=cell.role == CellRole.PREFILL,
    )


def _by_region(rows: "QuerySet[Any]") -> Counter[str]:
    counted = rows.order_by().values_list("region_id").annotate(count=Count("id"))
    return Counter(dict(counted))
