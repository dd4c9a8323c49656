"""Operations that are under way, one row each or one for similar ones in a place, and things that wait for a person.
Reads only, in a constant number of queries. A source is the rows of a kind and what makes operations of them."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from itertools import chain
from typing import Any

from django.db.models import Count, Exists, F, Max, Min, OuterRef, Q, QuerySet, Subquery
from django.urls import reverse
from django.utils.http import urlencode

from accounts.models import Approval, ApprovalState
from fleet.agents.models import ApplicationCertificate
from fleet.autoscaling.models import ScalingSwitch
from fleet.cells.models import Cell, Disruption
from fleet.clouds.models import ImageMove
from fleet.faults.models import Incident
from fleet.machines.models import Machine, ProviderCall
from fleet.nodes.models import Node
from fleet.reconcile.planning.states import (
    AGENT_ROLLOUT_ACTIVE,
    CellState,
    DisruptionCause,
    IncidentState,
    MachineState,
    NodeState,
    ProviderAction,
    RolloutState,
)
from fleet.regions.planner import SOON
from fleet.releases.models import AgentRollout
from fleet.rollouts.models import Rollout
from fleet.rollouts.selectors import ACTIVE, rollouts_described, stage_label
from kernel.access import Access
from kernel.one_query import which_exist
from kernel.tones import Tone
from models_registry.imports.models import ModelImport
from models_registry.imports.planner import IMPORT_OPEN, ImportState
from traffic.region_shares.models import TrafficMatrix, TrafficOverride, TrafficShift
from traffic.region_shares.planning.autopilot import ShiftKind
from traffic.region_shares.planning.policy import EvacuationMode, OverrideKind
from traffic.region_shares.selectors.traffic import active_overrides
from traffic.usage.models import Budget
from traffic.usage.planning.counting import month_of

EACH_SHOWN = 20
"""Rows per kind; the full lists are one click away."""
STEPS_FOR = timedelta(seconds=30)
"""Shares count as moving this long after a change: three steps of the region autopilot."""
FAILED_FOR = timedelta(days=7)
"""Failed imports wait for a person this long."""

CELL_KINDS = {
    DisruptionCause.ROLLOUT.value: "Update",
    DisruptionCause.SCALE.value: "Scaling",
    DisruptionCause.REPAIR.value: "Repair",
    DisruptionCause.OPERATOR.value: "Drain",
    DisruptionCause.PREEMPTION.value: "Preemption",
    DisruptionCause.ROLE.value: "Change of roles",
}
"""Kind of operation by the cause of a cell's entry in the disruption ledger."""
MOVING_CELLS = (CellState.PENDING.value, CellState.STARTING.value, CellState.DRAINING.value)
CALL_KINDS = {
    ProviderAction.RESTART_AGENT.value: "Restart of agents",
    ProviderAction.REBOOT.value: "Reboot",
    ProviderAction.TERMINATE.value: "Termination",
}
"""Launches are listed as nodes that join."""
SHIFT_KINDS = {ShiftKind.RELIEF: "Relief of a region", ShiftKind.RETURN: "Return of requests", ShiftKind.STEP: "Shift"}


@dataclass(frozen=True, slots=True)
class Operation:
    """One row. `id` is unique on the page; `percent`: its progress, or None if unknown; `why`: its reason, or ""."""

    id: str
    kind: str
    what: str
    url: str
    text: str
    since: datetime
    tone: Tone = Tone.MOVING
    percent: float | None = None
    why: str = ""


Source = tuple[QuerySet[Any], Callable[[Any], Iterator[Operation]]]


def in_progress(now: datetime) -> tuple[Operation, ...]:
    """Everything under way: what people started first, then what the planners do."""
    kinds = [kind.value for kind in SHIFT_KINDS]
    live = Machine.objects.exclude(state=MachineState.GONE.value)
    return _operations(
        (active_overrides(now).filter(kind=OverrideKind.EVACUATION), _evacuations),
        (_rolling(), _rollouts),
        (TrafficShift.objects.filter(at__gte=now - STEPS_FOR, kind__in=kinds), _shifts),
        (Cell.objects.filter(state__in=MOVING_CELLS), _cells),
        (Node.objects.filter(state__in=NODE_KINDS), _nodes),
        (ProviderCall.objects.filter(action__in=CALL_KINDS), _provider_calls),
        (live.filter(Q(layout_changes=True) | Q(leaving=True) | Q(state__in=MACHINE_KINDS)), _machines),
        (ImageMove.objects.filter(ended_at=None), _images),
        (AgentRollout.objects.filter(state__in=AGENT_ROLLOUT_ACTIVE), _agent_upgrades),
        (ModelImport.objects.filter(state__in=IMPORT_OPEN), _imports),
    )


def _operations(*sources: Source) -> tuple[Operation, ...]:
    """One query, and one to three for each kind that has rows: most have none."""
    found = which_exist(*(rows for rows, _ in sources))
    present = [operations(rows) for (rows, operations), has_rows in zip(sources, found, strict=True) if has_rows]
    return tuple(chain.from_iterable(present))


def _rolling() -> QuerySet[Rollout]:
    return rollouts_described().filter(state__in=ACTIVE).exclude(state=RolloutState.PAUSED.value)


def _evacuations(orders: QuerySet[TrafficOverride]) -> Iterator[Operation]:
    matrices = list(TrafficMatrix.objects.all())
    for order in orders:
        elsewhere = _served_elsewhere(order, matrices)
        known = "" if elsewhere is None else f"{elsewhere:.0f} % of its requests are served elsewhere, "
        yield Operation(
            id=f"evacuation-{order.pk}",
            kind="Evacuation" if order.mode == EvacuationMode.REAL else "Evacuation drill",
            what=f"{order.region_id} of {order.deployment_id or 'all deployments'}",
            url=reverse("traffic"),
            text=f"{known}until {order.expires_at:%Y-%m-%d %H:%M} UTC",
            since=order.created_at,
            tone=Tone.WARN if order.mode == EvacuationMode.REAL else Tone.MOVING,
            percent=elsewhere,
            why=order.why,
        )


def _served_elsewhere(order: TrafficOverride, matrices: Iterable[TrafficMatrix]) -> float | None:
    """Per cent of the requests that arrive in the region, weighed by demand; None without shares."""
    gone = total = 0.0
    for matrix in matrices:
        row = matrix.shares.get(order.region_id)
        if row is not None and order.deployment_id in {None, matrix.deployment_id}:
            demand = matrix.figures.get("regions", {}).get(order.region_id, {}).get("demand", 0.0) + 0.01
            gone += demand * (1 - row.get(order.region_id, 0.0))
            total += demand
    return 100 * gone / total if total else None


def _rollouts(rows: QuerySet[Rollout]) -> Iterator[Operation]:
    live = Cell.objects.filter(deployment__in={row.deployment_id for row in rows})
    grouped = live.exclude(state=CellState.STOPPED.value).order_by().values_list("deployment_id", "model_version_id")
    counted = {(deployment, version): cells for deployment, version, cells in grouped.annotate(cells=Count("pk"))}
    for row in rows:
        is_back = row.state == RolloutState.ROLLING_BACK
        goal = row.from_version if is_back else row.to_version
        total = sum(cells for (deployment, _), cells in counted.items() if deployment == row.deployment_id)
        done = counted.get((row.deployment_id, goal.pk), 0)
        yield Operation(
            id=f"rollout-{row.pk}",
            kind="Rollback" if is_back else "Rollout",
            what=f"{row.deployment_id} to {goal.reference}",
            url=reverse("rollout", args=(row.pk,)),
            text=f"{row.get_state_display().lower()}, {stage_label(row)}: {done} of {total} cells",
            since=row.created_at,
            tone=row.tone,
            percent=100 * done / total if total else None,
            why=row.reason,
        )


def _shifts(rows: QuerySet[TrafficShift]) -> Iterator[Operation]:
    """Deployments whose requests move in steps; steps of an evacuation are its own row."""
    newest: dict[str, TrafficShift] = {}
    for shift in rows.order_by("-id")[: 10 * EACH_SHOWN]:
        newest.setdefault(shift.deployment_id, shift)
    for name, shift in sorted(newest.items()):
        yield Operation(
            id=f"shift-{name}",
            kind=SHIFT_KINDS[ShiftKind(shift.kind)],
            what=name,
            url=reverse("traffic"),
            text=f"{100 * shift.moved:.0f} % of all requests changed region in the last step",
            since=shift.at,
            why=shift.reason,
        )


def _cells(rows: QuerySet[Cell]) -> Iterator[Operation]:
    """Cells on their way by place and cause. Updates belong to the row of their rollout."""
    rolling = set(_rolling().values_list("deployment_id", flat=True))
    cause = Disruption.objects.filter(cell=OuterRef("pk"), closed_at__isnull=True).values("cause")[:1]
    moving = rows.annotate(cause=Subquery(cause)).order_by()
    grouped = moving.values("deployment_id", "region_id", "cause").annotate(
        since=Min("state_since"),
        cell=Min("id"),
        reason=Min("reason"),
        **{state: Count("pk", filter=Q(state=state)) for state in MOVING_CELLS},
    )
    for row in grouped.order_by("since"):
        if row["cause"] != DisruptionCause.ROLLOUT or row["deployment_id"] not in rolling:
            yield _cells_operation(row)


def _cells_operation(row: Mapping[str, Any]) -> Operation:
    counts = {state: row[state] for state in MOVING_CELLS if row[state]}
    is_one = sum(counts.values()) == 1
    place = f"{row['deployment_id']} in {row['region_id']}"
    where = urlencode({"deployment": row["deployment_id"], "region": row["region_id"]})
    return Operation(
        id=f"cells-{row['deployment_id']}-{row['region_id']}-{row['cause'] or 'start'}",
        kind=CELL_KINDS.get(row["cause"] or "", "Drain" if set(counts) == {CellState.DRAINING.value} else "Start"),
        what=row["cell"] if is_one else place,
        url=reverse("cell", args=(row["cell"],)) if is_one else f"{reverse('cells')}?{where}",
        text=", ".join(f"{count} {state}" for state, count in counts.items()) if not is_one else next(iter(counts)),
        since=row["since"],
        tone=Tone.WARN if set(counts) == {CellState.PENDING.value} else Tone.MOVING,
        why=row["reason"] if is_one else "",
    )


NODE_KINDS = {NodeState.JOINING.value: "Launch", NodeState.SUSPECT.value: "Check"}


def _nodes(nodes: QuerySet[Node]) -> Iterator[Operation]:
    """Launches, and nodes in doubt, by region and instance type."""
    rows = nodes.order_by().values("state", "region_id", "instance_type_id")
    for row in rows.annotate(nodes=Count("pk"), since=Min("state_since"), node=Min("id"), reason=Max("reason")):
        is_one = row["nodes"] == 1
        where = urlencode({"region": row["region_id"], "state": row["state"]})
        yield Operation(
            id=f"nodes-{row['state']}-{row['region_id']}-{row['instance_type_id']}",
            kind=NODE_KINDS[row["state"]],
            what=row["node"] if is_one else f"{row['nodes']} nodes in {row['region_id']}",
            url=reverse("node", args=(row["node"],)) if is_one else f"{reverse('nodes')}?{where}",
            text=f"{row['state']}, {row['instance_type_id']}",
            since=row["since"],
            tone=Tone.WARN if row["state"] == NodeState.SUSPECT else Tone.MOVING,
            why=row["reason"] if is_one else "",
        )


def _provider_calls(rows: QuerySet[ProviderCall]) -> Iterator[Operation]:
    calls = rows.order_by().values("action", "node__region_id")
    for row in calls.annotate(nodes=Count("pk"), since=Min("requested_at"), node=Min("node_id"), reason=Max("reason")):
        region, is_one = row["node__region_id"], row["nodes"] == 1
        where = urlencode({"region": region})
        yield Operation(
            id=f"calls-{row['action']}-{region}",
            kind=CALL_KINDS[row["action"]],
            what=row["node"] if is_one else f"{row['nodes']} machines in {region}",
            url=reverse("node", args=(row["node"],)) if is_one else f"{reverse('nodes')}?{where}",
            text="ordered from the provider",
            since=row["since"],
            why=row["reason"] if is_one else "",
        )


MACHINE_KINDS = {
    MachineState.JOINING.value: ("Join", "enrolled, not connected yet"),
    MachineState.WIPING.value: ("Wipe", "wiping"),
    MachineState.LEAVING.value: ("Removal", "leaving"),
}


def _machines(rows: QuerySet[Machine]) -> Iterator[Operation]:
    """Machines that join, get another layout, or are emptied."""
    for row in rows.order_by("state_since", "id")[:EACH_SHOWN]:
        kind, text = MACHINE_KINDS.get(row.state, ("Removal", "its nodes leave first"))
        if row.layout_changes:
            kind, text = "Re-slicing", f"its layout becomes {row.next_layout or 'one node'}"
        yield Operation(
            id=f"machine-{row.pk}",
            kind=kind,
            what=row.pk,
            url=reverse("machine", args=(row.pk,)),
            text=text,
            since=row.state_since,
            why=row.reason,
        )


def _images(rows: QuerySet[ImageMove]) -> Iterator[Operation]:
    for row in rows.order_by("asked_at")[:EACH_SHOWN]:
        yield Operation(
            id=f"image-{row.pk}",
            kind="Change of image",
            what=f"{row.instance_type_id} in {row.region_id}",
            url=f"{reverse('region', args=(row.region_id,))}#region-images",
            text=f"{row.state}: {len(row.booted)} nodes are ready on it",
            since=row.asked_at,
            why=row.reason,
        )


def _agent_upgrades(rows: QuerySet[AgentRollout]) -> Iterator[Operation]:
    settled_moves = Count("moves", filter=Q(moves__settled_at__isnull=False))
    for row in rows.select_related("target").annotate(agents=Count("moves"), settled=settled_moves):
        settled: int = getattr(row, "settled", 0)
        agents: int = getattr(row, "agents", 0)
        yield Operation(
            id=f"agents-{row.pk}",
            kind="Upgrade of agents",
            what=f"to {row.target}",
            url=f"{reverse('machines')}#agents",
            text=f"ring {row.ring + 1} of {row.rings}: {settled} of {agents} agents are healthy",
            since=row.created_at,
            tone=row.tone,
            percent=100 * settled / agents if agents else None,
            why=row.reason,
        )


def _imports(rows: QuerySet[ModelImport]) -> Iterator[Operation]:
    for row in rows.order_by("id")[:EACH_SHOWN]:
        yield Operation(
            id=f"import-{row.pk}",
            kind="Import",
            what=row.source,
            url=reverse("import", args=(row.pk,)),
            text=f"{row.fetched} of {row.size}" if row.bytes_total else row.state,
            since=row.created_at,
            percent=row.percent if row.bytes_total else None,
            why=row.reason,
        )


def needs_a_person(now: datetime, access: Access) -> tuple[Operation, ...]:
    """Operations that wait for a person. Certificates only for operators."""
    ending = (ApplicationCertificate.objects.filter(not_after__lte=now + SOON), partial(_certificates, now))
    return _operations(
        (Approval.objects.filter(state=ApprovalState.PENDING.value, expires_at__gt=now), _approvals),
        (rollouts_described().filter(state=RolloutState.PAUSED.value), _paused_rollouts),
        (ScalingSwitch.objects.filter(paused=True), _paused_scaling),
        (Incident.objects.filter(state=IncidentState.OPEN.value, shadow=False, evidence__waits__gt=""), _waiting),
        *((ending,) if access.operate else ()),
        (Budget.objects.filter(month=month_of(now)).filter(Q(level__gt=0) | Q(stopped=True)), _budgets),
        (Machine.objects.exclude(state=MachineState.GONE.value).exclude(broken={}), _broken_machines),
        (_imports_failed(now), _failed_imports),
    )


def _approvals(rows: QuerySet[Approval]) -> Iterator[Operation]:
    for row in rows.order_by("id")[:EACH_SHOWN]:
        yield Operation(
            id=f"approval-{row.pk}",
            kind="Approval",
            what=row.summary,
            url=reverse("approvals"),
            text=f"requested by {row.requested_by}, until {row.expires_at:%Y-%m-%d %H:%M} UTC",
            since=row.requested_at,
            why=row.why,
        )


def _paused_rollouts(rows: QuerySet[Rollout]) -> Iterator[Operation]:
    for row in rows.order_by("state_since")[:EACH_SHOWN]:
        yield Operation(
            id=f"paused-{row.pk}",
            kind="Paused rollout",
            what=f"{row.deployment_id} to {row.to_version.reference}",
            url=reverse("rollout", args=(row.pk,)),
            text="resume it, or roll it back",
            since=row.state_since,
            tone=Tone.WARN,
            why=row.reason,
        )


def _paused_scaling(switches: QuerySet[ScalingSwitch]) -> Iterator[Operation]:
    for switch in switches:
        yield Operation(
            id="scaling-paused",
            kind="Autoscaler",
            what="The autoscaler is paused",
            url=reverse("deployments"),
            text=f"by {switch.actor}",
            since=switch.changed_at,
            tone=Tone.WARN,
            why=switch.why,
        )


def _waiting(rows: QuerySet[Incident]) -> Iterator[Operation]:
    """Open incidents for which nothing is replaced, with the reason."""
    for row in rows.order_by("opened_at")[:EACH_SHOWN]:
        yield Operation(
            id=f"waits-{row.pk}",
            kind="Incident",
            what=row.summary,
            url=reverse("incident", args=(row.pk,)),
            text="nothing is replaced for it",
            since=row.opened_at,
            tone=Tone.WARN,
            why=str(row.evidence["waits"]),
        )


def _certificates(now: datetime, rows: QuerySet[ApplicationCertificate]) -> Iterator[Operation]:
    for row in rows.order_by("not_after")[:EACH_SHOWN]:
        has_ended = row.not_after <= now
        yield Operation(
            id=f"certificate-{row.pk}",
            kind="Certificate",
            what=row.name,
            url=f"{reverse('traffic')}#certificates",
            text=f"{'expired' if has_ended else 'expires'} at {row.not_after:%Y-%m-%d %H:%M} UTC",
            since=row.changed_at,
            tone=Tone.BAD if has_ended else Tone.WARN,
            why=", ".join(row.names[:3]),
        )


def _budgets(rows: QuerySet[Budget]) -> Iterator[Operation]:
    """Budgets that reached an alert or refuse keys."""
    for row in rows.order_by("-level", "pk")[:EACH_SHOWN]:
        yield Operation(
            id=f"budget-{row.pk}",
            kind="Budget",
            what=row.subject,
            url=f"{reverse('usage')}#usage-budgets",
            text="used up: its keys are refused" if row.stopped else f"{row.level} % are used",
            since=row.stopped_at or row.changed_at,
            tone=Tone.BAD if row.stopped else Tone.WARN,
        )


def _broken_machines(rows: QuerySet[Machine]) -> Iterator[Operation]:
    for row in rows.order_by("state_since", "id")[:EACH_SHOWN]:
        yield Operation(
            id=f"broken-{row.pk}",
            kind="Repair",
            what=row.pk,
            url=reverse("machine", args=(row.pk,)),
            text=f"no node uses {', '.join(sorted(row.broken))}",
            since=row.state_since,
            tone=Tone.WARN,
            why="; ".join(str(why) for _, why in sorted(row.broken.items())),
        )


def _imports_failed(now: datetime) -> QuerySet[ModelImport]:
    """Failed imports without a later one of the same source."""
    later = ModelImport.objects.filter(source=OuterRef("source"), pk__gt=OuterRef("pk"))
    failed = ModelImport.objects.filter(state=ImportState.FAILED.value, ended_at__gt=now - FAILED_FOR)
    return failed.exclude(Exists(later))


def _failed_imports(rows: QuerySet[ModelImport]) -> Iterator[Operation]:
    for row in rows.order_by(F("ended_at").desc())[:EACH_SHOWN]:
        yield Operation(
            id=f"failed-import-{row.pk}",
            kind="Failed import",
            what=row.source,
            url=reverse("import", args=(row.pk,)),
            text="retry or cancel it",
            since=row.ended_at or row.created_at,
            tone=Tone.BAD,
            why=row.reason,
        )
