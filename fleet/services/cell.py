"""Applies decisions about cells, each as one compare-and-set on (id, state, generation) with its event."""

import secrets
from datetime import datetime
from typing import Any

from django.db import transaction
from django.db.models import F

from fleet.models import Cell, CellMember, Deployment, Node
from fleet.planning.decisions import CreateCell, DrainCell, ExplainCell, MoveCell, StartCell, StopCell
from fleet.planning.ledger import LedgerLimits
from fleet.planning.states import CELL_ALLOWED, CELL_TONE, CellState, NodeState
from fleet.services.desired import desired_changed, pairs_changed
from fleet.services.incident import incident_open, incidents_close
from fleet.services.ledger import disruption_charge, disruption_close
from kernel import live, wake_ups
from kernel.events import event_record
from kernel.transitions import StaleDecision, compare_and_set_or_stale
from models_registry.models import ModelVersion
from models_registry.selectors.model import version_by_reference

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
