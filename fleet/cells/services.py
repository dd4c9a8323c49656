"""Applies decisions and operators' requests about cells, each as one compare-and-set on (id, state, generation) with
its event, and keeps the disruption ledger. A charge holds the ledger's lock until the commit and counts again, so
racing reconcilers cannot exceed the budget (I10). Never decides what to do next: the reconciler does."""

import secrets
from collections import Counter
from datetime import datetime, timedelta
from typing import Any

from django.db import connection, transaction
from django.db.models import Count, F, QuerySet, Sum
from django.db.models.functions import Coalesce, Least

from engine_agent.protocol.states import CellRole
from fleet.cells.models import Cell, CellMember, Disruption
from fleet.deployments.models import Deployment, DeploymentRegion
from fleet.faults.models import Incident
from fleet.faults.planning.views import PartNoun
from fleet.faults.services.incidents import incident_open, incident_parts_recover, incidents_close
from fleet.nodes.models import Node
from fleet.nodes.services.events import desired_changed, pairs_changed
from fleet.reconcile.planning.decisions import CreateCell, DrainCell, ExplainCell, MoveCell, StartCell, StopCell
from fleet.reconcile.planning.settings import BudgetCounts, LedgerCounts, LedgerLimits, budget_refusal, refusal
from fleet.reconcile.planning.states import (
    CELL_ALLOWED,
    CELL_TONE,
    ROLLOUT_ACTIVE,
    ROLLOUT_MOVING,
    CellState,
    DisruptionCause,
    IncidentState,
    NodeState,
)
from fleet.rollouts.models import Rollout
from fleet.rollouts.selectors import policy_in_force
from kernel import live, wake_ups
from kernel.events import event_record
from kernel.refusals import Conflict
from kernel.transitions import StaleDecision, compare_and_set, compare_and_set_or_stale
from models_registry.versions.models import ModelVersion
from models_registry.versions.selectors import version_by_reference

LOCK = 0x53_57_4C_47
"""Key of PostgreSQL's advisory lock for the ledger of the whole fleet: "SWLG"."""


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
    """Opens an entry for a ready cell that is about to be drained, if the budget and its rollout still allow it.
    `forced`: overspends the budget, because the machine ends in any case. Raises StaleDecision if the budget or the
    rollout no longer allows it."""
    Deployment.objects.select_for_update().get(name=cell.deployment_id)  # nothing else scales it meanwhile
    _lock_ledger()
    if rollout is not None:
        _require_active_rollout(rollout, cell, cause)
    policy = policy_in_force(cell.deployment_id)
    standing = _ledger_counts(cell, policy.min_healthy_s, now, limits)
    refused = refusal(standing, cause, policy.max_unavailable, limits)
    if refused and not forced:
        raise StaleDecision(f"cell {cell.id} stays: {refused}")
    disruption_open(cell=cell, cause=cause, reason=reason, rollout=rollout, now=now)


def disruption_open(
    *, cell: Cell, cause: DisruptionCause, reason: str, now: datetime, rollout: int | None = None
) -> None:
    """Opens an entry without checking the budget. For operators' decisions, which count in all later charges."""
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
    """Closes the entry of a cell that is ready again or gone for good."""
    Disruption.objects.filter(cell_id=cell_id, closed_at__isnull=True).update(closed_at=now)


def layout_charge(*, machine: str, region: str, reason: str, now: datetime, limits: LedgerLimits) -> None:
    """Opens an entry for a machine whose spare nodes are about to be retired, in the caller's transaction. Raises
    StaleDecision if the budgets no longer allow it."""
    _lock_ledger()
    refused = budget_refusal(BudgetCounts(**_budget_counts(region, now, limits)), limits)
    if refused:
        raise StaleDecision(f"{machine} keeps its layout: {refused}")
    layout_disruption_open(machine=machine, region=region, reason=reason, now=now)


def layout_disruption_open(*, machine: str, region: str, reason: str, now: datetime) -> None:
    """Opens an entry without checking the budget. For operators' decisions, which count in all later charges."""
    values = {"region_id": region, "cause": DisruptionCause.LAYOUT.value, "reason": reason, "opened_at": now}
    Disruption.objects.get_or_create(machine_id=machine, closed_at=None, defaults=values)


def layout_disruption_close(*, machine: str, now: datetime) -> None:
    """Closes the entry of a machine that has its layout or is gone."""
    Disruption.objects.filter(machine_id=machine, closed_at__isnull=True).update(closed_at=now)


def _lock_ledger() -> None:
    """Until the commit, no other worker charges the ledger."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [LOCK])


def _require_active_rollout(rollout: int, cell: Cell, cause: DisruptionCause) -> None:
    """Locks the rollout until the commit and checks that it may still move cells. Its surplus cells may stop while it
    is paused."""
    state = Rollout.objects.select_for_update().values_list("state", flat=True).get(pk=rollout)
    if state not in (ROLLOUT_MOVING if cause is DisruptionCause.ROLLOUT else ROLLOUT_ACTIVE):
        raise StaleDecision(f"cell {cell.pk} stays: rollout {rollout} is {state}")


def _ledger_counts(cell: Cell, min_healthy_s: float, now: datetime, limits: LedgerLimits) -> LedgerCounts:
    proven = now - timedelta(seconds=min_healthy_s)
    there = Cell.objects.filter(deployment_id=cell.deployment_id, state=CellState.READY.value, state_since__lte=proven)
    available = _by_region(there)
    wanted = dict(_places().filter(deployment_id=cell.deployment_id).values_list("region_id", "in_force"))
    return LedgerCounts(
        wanted=sum(wanted.values()),
        available=available.total(),
        open=Disruption.objects.filter(closed_at__isnull=True, deployment_id=cell.deployment_id).count(),
        wanted_here=wanted.get(cell.region_id, 0),
        available_here=available[cell.region_id],
        **_budget_counts(cell.region_id, now, limits),
        is_available=cell.state == CellState.READY and cell.state_since <= proven,
        available_prefill=there.filter(role=CellRole.PREFILL.value).count(),
        is_prefill=cell.role == CellRole.PREFILL,
    )


def _places() -> "QuerySet[Any]":
    return DeploymentRegion.objects.annotate(in_force=Least("cells", Coalesce("cells_granted", "cells")))


def _budget_counts(region: str, now: datetime, limits: LedgerLimits) -> dict[str, int]:
    """The fields of `BudgetCounts`."""
    sums = _places().order_by().values_list("region_id").annotate(in_region=Sum("in_force"))
    wanted = {name: int(cells) for name, cells in sums}
    too_old = now - timedelta(seconds=limits.layout_counts_s)
    entries = Disruption.objects.filter(closed_at__isnull=True).exclude(cause=DisruptionCause.SCALE.value)
    budgeted = _by_region(entries.exclude(cause=DisruptionCause.LAYOUT.value, opened_at__lt=too_old))
    return {
        "region_wanted": wanted.get(region, 0),
        "region_open": budgeted[region],
        "fleet_wanted": sum(wanted.values()),
        "fleet_open": budgeted.total(),
    }


def _by_region(rows: "QuerySet[Any]") -> Counter[str]:
    counted = rows.order_by().values_list("region_id").annotate(count=Count("id"))
    return Counter(dict(counted))


ROUTING_TASK = "traffic.publish"


def cell_create(decision: CreateCell, *, now: datetime) -> None:
    """Creates a pending cell. Its number comes from the deployment and is never reused."""
    with transaction.atomic():
        deployment = Deployment.objects.select_for_update().get(name=decision.deployment)
        cell_id = f"{deployment.name}-{decision.region}-{deployment.next_ordinal}"
        deployment.next_ordinal += 1
        deployment.save(update_fields=["next_ordinal"])
        cell = Cell.objects.create(
            id=cell_id,
            deployment=deployment,
            region_id=decision.region,
            instance_type_id=decision.instance_type,
            model_version_id=_version_id(decision.version) or deployment.model_version_id,
            role=decision.role.value,
            state=CellState.PENDING.value,
            reason=decision.reason,
            created_at=now,
            state_since=now,
        )
        _cell_event(cell, CellState.PENDING, decision.reason, now)


def cell_start(decision: StartCell, *, now: datetime) -> None:
    """Starts a new generation on the given nodes, in one transaction (I4, I5). Raises StaleDecision if the cell or a
    node has changed since the decision. Raises IntegrityError if one of the nodes has joined another cell meanwhile."""
    changes: dict[str, Any] = {"model_version_id": version} if (version := _version_id(decision.version)) else {}
    if decision.role is not None:
        changes["role"] = decision.role.value
    with transaction.atomic():
        _change_state(
            decision,
            CellState.STARTING,
            now,
            generation=F("generation") + 1,
            secret=secrets.token_hex(32),
            restarts=F("restarts") + 1,
            unrouted_at=None,
            failed_by="",
            **changes,
        )
        before = set(CellMember.objects.filter(cell_id=decision.cell).values_list("node_id", flat=True))
        _lock_usable(decision, before)
        CellMember.objects.filter(cell_id=decision.cell).delete()
        CellMember.objects.bulk_create(
            CellMember(cell_id=decision.cell, node_id=node, rank=rank) for rank, node in enumerate(decision.nodes)
        )
        Node.objects.filter(id__in=decision.nodes).update(spare_since=None)
        Node.objects.filter(id__in=before - set(decision.nodes)).update(spare_since=now)
        desired_changed([*decision.nodes, *before])


def _lock_usable(decision: StartCell, before: set[str]) -> None:
    """Locks the nodes until the commit, in a fixed order. A cordon excludes only new members."""
    nodes = Node.objects.select_for_update().filter(id__in={*decision.nodes, *before}).order_by("id")
    usable = {node.id for node in nodes if node.state == NodeState.READY and (node.id in before or not node.cordoned)}
    if gone := [node for node in decision.nodes if node not in usable]:
        raise StaleDecision(f"cell {decision.cell}: {', '.join(gone)} can no longer be used")


def _version_id(reference: str) -> int | None:
    """The ID of the version that a decision names, or None if it names none. Raises StaleDecision if the version no
    longer exists."""
    if not reference:
        return None
    version = version_by_reference(ModelVersion.objects.all(), reference)
    if version is None:
        raise StaleDecision(f"there is no model version {reference}")
    return version.pk


def cell_drain_charged(decision: DrainCell, *, now: datetime, limits: LedgerLimits | None = None) -> None:
    """Drains a ready cell and charges the disruption ledger. Raises StaleDecision if the cell has changed since the
    decision, or the ledger has no budget left."""
    with transaction.atomic():
        seen = Cell.objects.get(id=decision.cell)
        disruption_charge(
            cell=seen,
            cause=decision.cause,
            reason=decision.reason,
            rollout=decision.rollout,
            now=now,
            limits=limits or LedgerLimits(),
            forced=decision.forced,
        )
        cell = _change_state(decision, CellState.DRAINING, now)
        desired_changed(CellMember.objects.filter(cell=cell).values_list("node_id", flat=True))


def cell_move(decision: MoveCell, *, now: datetime) -> None:
    """Changes a cell's state within its generation, with routing, desired states and incidents. Raises StaleDecision if
    the cell has changed since the decision."""
    changes: dict[str, Any] = {"restarts": 0} if decision.to is CellState.READY else {}
    changes["failed_by"] = decision.failed_by
    with transaction.atomic():
        cell = _change_state(decision, decision.to, now, **changes)
        desired_changed(CellMember.objects.filter(cell=cell).values_list("node_id", flat=True))
        if decision.to is CellState.READY:
            disruption_close(cell_id=cell.id, now=now)
            resolution = f"ready again at generation {cell.generation}"
            incident_parts_recover(PartNoun.CELL, [cell.id], resolution=resolution, now=now)
            incidents_close(cell=cell.id, node__in=_nodes_not_faulty(cell.id), resolution=resolution, now=now)
        elif decision.to in {CellState.FAILED, CellState.LOST} and decision.seen is not CellState.DRAINING:
            incident_open(
                kind=f"cell-{decision.to}",
                subject=cell.id,
                summary=f"Cell {cell.id} {decision.to}: {decision.reason}",
                evidence={"generation": cell.generation, "was": decision.seen, "reason": decision.reason},
                now=now,
                region=cell.region_id,
                deployment=cell.deployment_id,
                cell=cell.id,
            )


def cell_stop(decision: StopCell, *, now: datetime) -> None:
    """Stops a cell and returns its nodes to the spares. Raises StaleDecision if the cell has changed since the
    decision."""
    with transaction.atomic():
        cell = _change_state(decision, CellState.STOPPED, now)
        nodes = list(CellMember.objects.filter(cell=cell).values_list("node_id", flat=True))
        CellMember.objects.filter(cell=cell).delete()
        Node.objects.filter(id__in=nodes).update(spare_since=now)
        desired_changed(nodes)
        disruption_close(cell_id=cell.id, now=now)
        incident_parts_recover(PartNoun.CELL, [cell.id], resolution=decision.reason, now=now)
        incidents_close(cell=cell.id, resolution=decision.reason, now=now)


def _nodes_not_faulty(cell_id: str) -> list[str]:
    """Nodes in a cell's open incidents; "" if one names none. The incident of a node that is out of use stays open
    until the node is repaired or retired."""
    open_ones = Incident.objects.filter(cell=cell_id, state=IncidentState.OPEN.value)
    named = set(open_ones.values_list("node", flat=True))
    faulty = Node.objects.filter(id__in=named, state=NodeState.FAULTY.value)
    return sorted(named - set(faulty.values_list("id", flat=True)))


def cell_explain(decision: ExplainCell, *, now: datetime) -> None:
    """Records a new reason for the cell's state in the row and the timeline. Raises StaleDecision if the cell has
    changed since the decision."""
    with transaction.atomic():
        rows = Cell.objects.filter(id=decision.cell, state=decision.seen.value, generation=decision.generation)
        compare_and_set_or_stale(rows, what=f"cell {decision.cell}", reason=decision.reason)
        _cell_event(Cell.objects.get(id=decision.cell), decision.seen, decision.reason, now)


def cell_mark_unrouted(*, cell_id: str, generation: int, now: datetime) -> bool:
    """Records that every ingress has acknowledged a table that sends this cell no new requests."""
    rows = Cell.objects.filter(
        id=cell_id, generation=generation, state=CellState.DRAINING.value, unrouted_at__isnull=True
    )
    with transaction.atomic():
        if rows.update(unrouted_at=now) == 0:
            return False
        wake_ups.send("fleet.reconcile")
    return True


def _change_state(
    decision: StartCell | DrainCell | MoveCell | StopCell, to: CellState, now: datetime, **changes: Any
) -> Cell:
    seen = CellState.READY if isinstance(decision, DrainCell) else decision.seen
    if to not in CELL_ALLOWED[seen]:
        raise ValueError(f"a cell cannot go from {seen} to {to}")
    rows = Cell.objects.filter(id=decision.cell, state=seen.value, generation=decision.generation)
    compare_and_set_or_stale(
        rows, what=f"cell {decision.cell}", state=to.value, reason=decision.reason, state_since=now, **changes
    )
    cell = Cell.objects.get(id=decision.cell)
    _cell_event(cell, to, decision.reason, now)
    pairs_changed(cell)
    return cell


def _cell_event(cell: Cell, to: CellState, reason: str, now: datetime) -> None:
    event_record(now=now, **_event_fields(cell, to, reason))
    live.push("cells", cell.id)
    wake_ups.send(ROUTING_TASK)


def _event_fields(cell: Cell, to: CellState, reason: str, actor: str = "switchyard", **detail: Any) -> dict[str, Any]:
    return {
        "kind": f"cell.{to}",
        "message": f"{cell.id} is {to}: {reason}",
        "tone": CELL_TONE[to],
        "actor": actor,
        "region": cell.region_id,
        "deployment": cell.deployment_id,
        "cell": cell.id,
        "detail": {"generation": cell.generation, **detail},
    }


DRAINABLE = frozenset({CellState.READY})
RESTARTABLE = frozenset({CellState.READY, CellState.FAILED})


def cell_drain(*, cell_id: str, actor: str, now: datetime, why: str = "") -> None:
    """Drains a ready cell: it gets no new requests; those in flight finish within the deployment's deadline. Raises
    Conflict if the cell is not ready, or changed meanwhile."""
    _change_by_operator(cell_id, "drain", DRAINABLE, CellState.DRAINING, actor, why, now)


def cell_restart(*, cell_id: str, actor: str, now: datetime, why: str = "") -> None:
    """Restarts a cell with a new generation. Requests in flight are cut off. A failed cell skips its remaining
    back-off. Raises Conflict if the cell is neither ready nor failed, or changed meanwhile."""
    _change_by_operator(cell_id, "restart", RESTARTABLE, CellState.FAILED, actor, why, now, restarts=0)


def _change_by_operator(
    cell_id: str,
    action: str,
    from_states: frozenset[CellState],
    to: CellState,
    actor: str,
    why: str,
    now: datetime,
    **changes: Any,
) -> None:
    cell = Cell.objects.get(id=cell_id)
    seen = CellState(cell.state)
    if seen not in from_states:
        allowed = " or ".join(sorted(from_states))
        raise Conflict(f"cell {cell.id} is {seen}; {action} needs a cell that is {allowed}")
    reason = f"{action} requested by {actor}" + (f": {why}" if why else "")
    if seen is not to:
        changes["state_since"] = now
    rows = Cell.objects.filter(id=cell.id, state=seen.value, generation=cell.generation)
    with transaction.atomic():
        event = _event_fields(cell, to, reason, actor, action=action, was=cell.state)
        if not compare_and_set(rows, event=event, now=now, state=to.value, reason=reason, **changes):
            raise Conflict(f"cell {cell.id} changed while {action} was decided; check it and try again")
        if seen is CellState.READY:
            disruption_open(cell=cell, cause=DisruptionCause.OPERATOR, reason=reason, now=now)
        desired_changed(CellMember.objects.filter(cell=cell).values_list("node_id", flat=True))
        pairs_changed(cell)
        live.push("cells", cell.id)
        wake_ups.send("fleet.reconcile")
        wake_ups.send(ROUTING_TASK)
