"""Charges disruptions, in the transaction of the step that takes a cell down, and closes them when it is over (I10).

A charge by the rules holds the ledger's lock until the commit and counts again: what the planner saw may be
gone, and two reconcilers that race cannot spend the same budget.

Applies decisions about cells, each as one compare-and-set on (id, state, generation) with its event.

What operators do with one cell: drain it, or restart it. Each is one compare-and-set with its event.

The reconciler does the rest: it makes up for a draining cell, stops it once idle, and starts a failed one again.
"""

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
from fleet.faults.services.incidents import incident_open, incidents_close
from fleet.nodes.models import Node
from fleet.nodes.services.events import desired_changed, pairs_changed
from fleet.reconcile.planning.decisions import CreateCell, DrainCell, ExplainCell, MoveCell, StartCell, StopCell
from fleet.reconcile.planning.settings import LedgerCounts, LedgerLimits, refusal
from fleet.reconcile.planning.states import (
    CELL_ALLOWED,
    CELL_TONE,
    ROLLOUT_ACTIVE,
    ROLLOUT_MOVING,
    CellState,
    DisruptionCause,
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


ROUTING_TASK = "traffic.publish"


def cell_create(decision: CreateCell, *, now: datetime) -> None:
    """Record one more cell of a deployment. Its number is taken from the deployment and never used again."""
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
    """Begin a new generation on the decided nodes, in one transaction (I4, I5).

    Raises:
        StaleDecision: the cell or a node is no longer what the decision saw.
        IntegrityError: one of the nodes has joined another cell meanwhile.
    """
    changes: dict[str, Any] = {"model_version_id": version} if (version := _version_id(decision.version)) else {}
    if decision.role is not None:
        changes["role"] = decision.role.value
    with transaction.atomic():
        _move(
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
    """Hold the nodes until the commit, in one order for all. A cordon keeps away new members and no others."""
    nodes = Node.objects.select_for_update().filter(id__in={*decision.nodes, *before}).order_by("id")
    usable = {node.id for node in nodes if node.state == NodeState.READY and (node.id in before or not node.cordoned)}
    if gone := [node for node in decision.nodes if node not in usable]:
        raise StaleDecision(f"cell {decision.cell}: {', '.join(gone)} can no longer be used")


def _version_id(reference: str) -> int | None:
    """Row of the version that a decision names; None where it names none.

    Raises:
        StaleDecision: there is none of this name any more.
    """
    if not reference:
        return None
    version = version_by_reference(ModelVersion.objects.all(), reference)
    if version is None:
        raise StaleDecision(f"there is no model version {reference}")
    return version.pk


def cell_drain_charged(decision: DrainCell, *, now: datetime, limits: LedgerLimits | None = None) -> None:
    """Take a ready cell down for a reason of the fleet's own, charged to the disruption ledger.

    Raises:
        StaleDecision: the cell is no longer what the decision saw, or the ledger has no budget left.
    """
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
        cell = _move(decision, CellState.DRAINING, now)
        desired_changed(CellMember.objects.filter(cell=cell).values_list("node_id", flat=True))


def cell_move(decision: MoveCell, *, now: datetime) -> None:
    """Change a cell's state within its generation, with what follows: routing, desired state, incidents.

    Raises:
        StaleDecision: the cell is no longer what the decision saw.
    """
    changes: dict[str, Any] = {"restarts": 0} if decision.to is CellState.READY else {}
    changes["failed_by"] = decision.failed_by
    with transaction.atomic():
        cell = _move(decision, decision.to, now, **changes)
        desired_changed(CellMember.objects.filter(cell=cell).values_list("node_id", flat=True))
        if decision.to is CellState.READY:
            disruption_close(cell_id=cell.id, now=now)
            incidents_close(cell=cell.id, resolution=f"ready again at generation {cell.generation}", now=now)
        elif decision.to in {CellState.FAILED, CellState.LOST} and decision.seen is not CellState.DRAINING:
            incident_open(
                kind=f"cell-{decision.to}",
                subject=cell.id,
                summary=f"Cell {cell.id} {decision.to}: {decision.reason}",
                evidence={"generation": cell.generation, "was": decision.seen},
                now=now,
                region=cell.region_id,
                deployment=cell.deployment_id,
                cell=cell.id,
            )


def cell_stop(decision: StopCell, *, now: datetime) -> None:
    """End a cell and give its nodes back as spares.

    Raises:
        StaleDecision: the cell is no longer what the decision saw.
    """
    with transaction.atomic():
        cell = _move(decision, CellState.STOPPED, now)
        nodes = list(CellMember.objects.filter(cell=cell).values_list("node_id", flat=True))
        CellMember.objects.filter(cell=cell).delete()
        Node.objects.filter(id__in=nodes).update(spare_since=now)
        desired_changed(nodes)
        disruption_close(cell_id=cell.id, now=now)
        incidents_close(cell=cell.id, resolution=decision.reason, now=now)


def cell_explain(decision: ExplainCell, *, now: datetime) -> None:
    """Write into the timeline why a cell is as it is. Its state and its age stay.

    Raises:
        StaleDecision: the cell is no longer what the decision saw.
    """
    with transaction.atomic():
        rows = Cell.objects.filter(id=decision.cell, state=decision.seen.value, generation=decision.generation)
        compare_and_set_or_stale(rows, what=f"cell {decision.cell}", reason=decision.reason)
        _cell_event(Cell.objects.get(id=decision.cell), decision.seen, decision.reason, now)


def cell_mark_unrouted(*, cell_id: str, generation: int, now: datetime) -> bool:
    """Record that every ingress has acknowledged a table that sends this cell nothing new."""
    rows = Cell.objects.filter(
        id=cell_id, generation=generation, state=CellState.DRAINING.value, unrouted_at__isnull=True
    )
    with transaction.atomic():
        if rows.update(unrouted_at=now) == 0:
            return False
        wake_ups.send("fleet.reconcile")
    return True


def _move(decision: StartCell | DrainCell | MoveCell | StopCell, to: CellState, now: datetime, **changes: Any) -> Cell:
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
    event_record(
        kind=f"cell.{to}",
        message=f"{cell.id} is {to}: {reason}",
        tone=CELL_TONE[to],
        now=now,
        region=cell.region_id,
        deployment=cell.deployment_id,
        cell=cell.id,
        detail={"generation": cell.generation},
    )
    live.push("cells", cell.id)
    wake_ups.send(ROUTING_TASK)


DRAINABLE = frozenset({CellState.READY})
RESTARTABLE = frozenset({CellState.READY, CellState.FAILED})


def cell_drain(*, cell_id: str, actor: str, now: datetime, why: str = "") -> None:
    """Take a ready cell out of service: no new requests, those in flight finish or meet the deployment's deadline.

    Raises:
        Conflict: the cell is not ready, or changed while this was decided.
    """
    _act(cell_id, "drain", DRAINABLE, CellState.DRAINING, actor, why, now)


def cell_restart(*, cell_id: str, actor: str, now: datetime, why: str = "") -> None:
    """Fail a cell on purpose, so that it starts again as a whole with a new generation. Requests in flight are cut.

    A cell that failed already starts again without the rest of its back-off.

    Raises:
        Conflict: the cell is neither ready nor failed, or changed while this was decided.
    """
    _act(cell_id, "restart", RESTARTABLE, CellState.FAILED, actor, why, now, restarts=0)


def _act(
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
        event = _event(cell, action, to, reason, actor)
        if not compare_and_set(rows, event=event, now=now, state=to.value, reason=reason, **changes):
            raise Conflict(f"cell {cell.id} changed while {action} was decided; check it and try again")
        if seen is CellState.READY:
            disruption_open(cell=cell, cause=DisruptionCause.OPERATOR, reason=reason, now=now)
        desired_changed(CellMember.objects.filter(cell=cell).values_list("node_id", flat=True))
        pairs_changed(cell)
        live.push("cells", cell.id)
        wake_ups.send("fleet.reconcile")
        wake_ups.send(ROUTING_TASK)


def _event(cell: Cell, action: str, to: CellState, reason: str, actor: str) -> dict[str, Any]:
    return {
        "kind": f"cell.{to}",
        "message": f"{cell.id} is {to}: {reason}",
        "tone": CELL_TONE[to],
        "actor": actor,
        "region": cell.region_id,
        "deployment": cell.deployment_id,
        "cell": cell.id,
        "detail": {"action": action, "was": cell.state, "generation": cell.generation},
    }
