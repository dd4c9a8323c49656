"""Stores evidence of faults, opens and closes incidents, and applies decisions about faulty nodes. Each change is one
compare-and-set with its event in one transaction. It never launches or terminates machines: the reconciler does that
for faulty nodes. A replacement counts the others under a lock held until the commit, so two racing reconcilers cannot
exceed the limits."""

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any

from django.db import connection, transaction
from django.db.models import Exists, F, OuterRef, Q

from engine_agent.protocol.signatures import FaultSignature, is_hard
from engine_agent.protocol.states import EngineState
from fleet.cells.models import CellMember
from fleet.faults.models import CellSighting, Incident, IncidentPart, Repair, Replacement, Signal, StepRecord
from fleet.faults.planning.liveness import CONDEMNED, COUNTED, ReplacementBudget, over_budget
from fleet.faults.planning.slow import NO_STEPS, cell_sums, clock_sums, window_between
from fleet.faults.planning.views import CLOSED_BY_PARTS, OF_CELLS, IncidentKind, PartNoun, Rule
from fleet.faults.services.parts import (
    Hit,
    failures_explained,
    has_open_parts,
    hit_by,
    incident_explaining,
    parts_add,
    parts_recovered,
)
from fleet.nodes.models import Node, NodeReport
from fleet.nodes.planner import machine_of
from fleet.nodes.services.events import cell_of, desired_changed, node_event
from fleet.reconcile.planning.decisions import (
    CloseIncident,
    CloseReplacement,
    CordonNode,
    NoteIncident,
    OpenIncident,
    ReplaceNode,
    RequestReplacement,
    UncordonNode,
)
from fleet.reconcile.planning.settings import FaultSettings
from fleet.reconcile.planning.states import NODE_ALLOWED, IncidentState, NodeState
from fleet.webhooks.planner import WebhookEvent
from fleet.webhooks.services import webhooks_notify
from kernel import live, wake_ups
from kernel.events import event_record
from kernel.leases import lease_during
from kernel.refusals import Conflict
from kernel.tones import Tone
from kernel.transitions import StaleDecision, compare_and_set_or_stale

STEP_WINDOWS_LEASE = "step-windows"
STEP_WINDOWS_LEASE_TTL_S = 30.0


SIGNATURES = frozenset(FaultSignature)


def hardware_fault_record(
    *, node: Node, cell: str, signature: str, summary: str, evidence: dict[str, Any], now: datetime
) -> None:
    """Stores a hardware fault that a node's agent saw. Other evidence, such as an engine exit, is ignored. A soft fault
    counts as a repair, because its engine is reloaded."""
    if signature not in SIGNATURES or node.state == NodeState.RETIRED:
        return
    with transaction.atomic():
        row, created = Signal.objects.get_or_create(
            node=node,
            signature=signature,
            settled_at=None,
            defaults={
                "instance_type": node.instance_type_id,
                "summary": summary,
                "evidence": evidence,
                "cell": cell,
                "first_at": now,
                "last_at": now,
            },
        )
        if not created:
            Signal.objects.filter(pk=row.pk).update(
                count=F("count") + 1, last_at=now, summary=summary, evidence=evidence, cell=cell
            )
        elif not is_hard(signature):
            repair_record(node=node.id, what="reload", reason=f"{signature}: {summary}", now=now)
        wake_ups.send("fleet.reconcile")


def hardware_faults_settle(*, now: datetime, **which: Any) -> int:
    """Settles the signals selected by `which` (node, signature, …). Returns their number."""
    return Signal.objects.filter(settled_at__isnull=True, **which).update(settled_at=now)


def cell_sightings_store(*, witness: str, down: dict[str, int], now: datetime) -> None:
    """Stores the cells, by generation, that an ingress (the `witness`) cannot reach. Replaces its previous report."""
    if down:
        CellSighting.objects.update_or_create(witness=witness, defaults={"seen_at": now, "down": down})
    else:
        CellSighting.objects.filter(witness=witness).exclude(down={}).update(seen_at=now, down={})


def repair_record(*, node: str, what: str, reason: str, now: datetime) -> None:
    """Counts a repair, so that a node with too many goes to an operator. Call it in the repair's transaction. `what`:
    `replacement`, `agent_restart` or `reload`."""
    Repair.objects.create(node_id=node, what=what, reason=reason, at=now)


def step_windows_cut(*, now: datetime) -> int:
    """Closes the window of every rank that has entered a new one, so that ranks are compared over the same time. A
    window that was closed too late is dropped. Returns the number of ranks that reported."""
    settings = FaultSettings()
    with lease_during(name=STEP_WINDOWS_LEASE, ttl_s=STEP_WINDOWS_LEASE_TTL_S, now=now) as is_ours:
        if not is_ours:
            return 0
        return _cut_windows(int(now.timestamp() // settings.step_window_s), settings)


def _cut_windows(index: int, settings: FaultSettings) -> int:
    StepRecord.objects.filter(node__state=NodeState.RETIRED.value).delete()
    known = {record.node_id: record for record in StepRecord.objects.all()}
    reports: Any = NodeReport.objects.filter(state=EngineState.READY.value, connected=True)
    of_cells = Q(node__member__rank=0, load__work__has_key="steps")
    of_devices = Q(telemetry__accelerators__contains=[{"kind": "nvidia"}])
    reports = reports.filter(Q(steps__isnull=False) | of_devices | of_cells)
    of_load = ("node__member__rank", "load__itl_counts", "load__work")
    columns_read = ("node_id", "cell", "generation", "steps", "telemetry__accelerators", *of_load)
    changed, seen = [], 0
    for node, cell, generation, steps, accelerators, *load in reports.values_list(*columns_read):
        totals = {**(steps or NO_STEPS), "devices": clock_sums(accelerators)}
        if steps is None and (sums := cell_sums(*load)):
            totals["of_cell"] = sums
        seen += 1
        record = known.get(node)
        if record is None or (record.cell, record.generation) != (cell, generation):
            changed.append(StepRecord(node_id=node, cell=cell, generation=generation, index=index, totals=totals))
        elif record.index < index:
            if record.index == index - 1 and (window := window_between(record.totals, totals)):
                record.windows = [*record.windows, {"index": record.index, **window}][-settings.step_windows :]
            record.index, record.totals = index, totals
            changed.append(record)
    columns = ["cell", "generation", "index", "totals", "windows"]
    StepRecord.objects.bulk_create(changed, update_conflicts=True, unique_fields=["node"], update_fields=columns)
    return seen


SWITCHYARD = "switchyard"
OF_SEVERAL_NODES = (IncidentKind.MACHINE, IncidentKind.HARDWARE, IncidentKind.SOFT, IncidentKind.SLOW)
"""Kinds of incidents that may be about all nodes of a machine or of a device; then their evidence names the nodes."""


def incident_open(
    *, kind: str, subject: str, summary: str, evidence: Mapping[str, Any], now: datetime, **columns: Any
) -> Incident:
    """Opens an incident, or returns the open one for (kind, subject). `columns`: region, deployment, cell, node, …

    One fault is one incident: the failure of a cell joins the incident of its node, and the incident of a failed cell
    becomes the one of its node once that is found. Nothing is notified twice."""
    hit = hit_by(kind, evidence, columns)
    with transaction.atomic():
        is_known = Incident.objects.filter(kind=kind, subject=subject, state=IncidentState.OPEN.value).exists()
        if kind in OF_CELLS and not is_known and (explaining := incident_explaining(columns.get("cell", ""))):
            return _join_incident(explaining, summary, hit, columns, now)
        explained = failures_explained(kind, hit, columns.get("region", ""), now)
        if explained and not is_known:
            incident, created = explained.pop(0), False
            named = {"deployment": "", "cell": "", "node": "", **columns}
            changes = {"kind": kind, "subject": subject, "summary": summary, "seen_at": now, **named}
            _explain_incident(incident, {**changes, "evidence": {**evidence, "first_seen_as": incident.summary}}, now)
        else:
            defaults = {"summary": summary, "evidence": dict(evidence), "opened_at": now, "seen_at": now, **columns}
            incident, created = Incident.objects.get_or_create(
                kind=kind, subject=subject, state=IncidentState.OPEN.value, defaults=defaults
            )
        for other in explained:
            parts_add(incident, [(PartNoun.CELL, other.cell)] if other.cell else [], now)
            _close_incident(other, f"part of incident {incident.pk}", SWITCHYARD, now)
        if hit.parts:
            parts_add(incident, hit.parts, now)
        if created:
            _record_incident_event(incident, "incident.opened", summary, incident.tone, now, SWITCHYARD)
            webhooks_notify(event=WebhookEvent.INCIDENT_OPENED, body=incident_body(incident), now=now)
    return incident


def _join_incident(incident: Incident, summary: str, hit: Hit, columns: Mapping[str, Any], now: datetime) -> Incident:
    """Adds the failure of a cell to an open incident."""
    parts_add(incident, hit.parts, now)
    incident.cell = incident.cell or columns.get("cell", "")
    incident.deployment = incident.deployment or columns.get("deployment", "")
    incident.save(update_fields=["cell", "deployment"])
    _record_incident_event(incident, "incident.joined", f"{summary}: part of incident {incident.pk}", Tone.BAD, now)
    return incident


def _explain_incident(incident: Incident, changes: Mapping[str, Any], now: datetime) -> None:
    """The incident of a failed cell becomes the one of the fault that explains it, under its number."""
    before = incident.summary
    for name, value in changes.items():
        setattr(incident, name, value)
    incident.save(update_fields=list(changes))
    _record_incident_event(incident, "incident.explained", f"{before}. Its cause: {incident.summary}", Tone.BAD, now)


def incident_open_decided(decision: OpenIncident, *, now: datetime) -> None:
    incident_open(
        kind=decision.kind,
        subject=decision.subject,
        summary=decision.summary,
        evidence=decision.evidence,
        now=now,
        region=decision.region,
        deployment=decision.deployment,
        cell=decision.cell,
        node=decision.node,
        cohort=decision.cohort,
        shadow=decision.shadow,
    )


def incident_note(decision: NoteIncident, *, now: datetime) -> None:
    """Records that its fault is still present. Raises StaleDecision if it is closed."""
    with transaction.atomic():
        rows = Incident.objects.filter(pk=decision.incident, state=IncidentState.OPEN.value)
        changes = {"summary": decision.summary, "evidence": dict(decision.evidence), "seen_at": now}
        compare_and_set_or_stale(rows, what=f"incident {decision.incident}", **changes)
        live.push("incidents")


def incident_close(decision: CloseIncident, *, now: datetime) -> None:
    """Closes an incident whose fault is gone. Raises StaleDecision if it is closed, or its fault was seen again
    meanwhile."""
    with transaction.atomic():
        rows = Incident.objects.filter(pk=decision.incident, state=IncidentState.OPEN.value)
        incident = rows.select_for_update().first()
        unseen = incident is not None and (incident.seen_at or incident.opened_at) == decision.seen_at
        compare_and_set_or_stale(rows if unseen else rows.none(), what=f"incident {decision.incident}", seen_at=now)
        if incident is not None:
            _close_incident(incident, decision.reason, SWITCHYARD, now)


def incident_dismiss(*, incident_id: int, actor: str, now: datetime, why: str = "") -> None:
    """Closes an incident that needs no repair, settles its evidence, and mutes it for an hour unless there is new
    evidence. Raises Conflict if it is closed already."""
    with transaction.atomic():
        incident = Incident.objects.select_for_update().get(pk=incident_id)
        if incident.state != IncidentState.OPEN:
            raise Conflict(f"incident {incident.pk} is {incident.state}; only an open one can be dismissed")
        incident.muted_until = now + timedelta(seconds=FaultSettings().muted_s)
        if incident.node:
            hardware_faults_settle(node_id=incident.node, now=now)
        elif incident.kind in OF_SEVERAL_NODES:
            hardware_faults_settle(node_id__in=incident.evidence.get("nodes", []), now=now)
        elif incident.cell:
            members = CellMember.objects.filter(cell_id=incident.cell).values_list("node_id", flat=True)
            hardware_faults_settle(node_id__in=list(members), now=now)
        _close_incident(incident, f"dismissed by {actor}" + (f": {why}" if why else ""), actor, now)
        wake_ups.send("fleet.reconcile")


def incidents_close(*, resolution: str, now: datetime, **which: Any) -> int:
    """Closes the open incidents selected by `which` (cell, node, kind, …). Returns their number. The loss of a node
    stays open until its node and its cells have recovered."""
    is_held = Q(kind__in=CLOSED_BY_PARTS) & Q(has_open_parts())
    with transaction.atomic():
        rows = Incident.objects.select_for_update(of=("self",)).filter(state=IncidentState.OPEN.value, **which)
        incidents = list(rows.exclude(is_held))
        for incident in incidents:
            _close_incident(incident, resolution, SWITCHYARD, now)
    return len(incidents)


def incident_parts_recover(noun: PartNoun, names: Iterable[str], *, resolution: str, now: datetime) -> None:
    """Records that nodes or cells have recovered, and closes the losses and failures of which no part is down."""
    with transaction.atomic():
        for incident in parts_recovered(noun, names, now):
            if incident.kind in CLOSED_BY_PARTS and not incident.parts.filter(recovered_at__isnull=True).exists():
                _close_incident(incident, resolution, SWITCHYARD, now)
        live.push("incidents")


def incident_body(incident: Incident) -> dict[str, Any]:
    return {
        "id": incident.pk,
        "kind": incident.kind,
        "severity": incident.severity.value,
        "subject": incident.subject,
        "state": str(incident.state),
        "shadow": incident.shadow,
        "summary": incident.summary,
        "resolution": incident.resolution,
        "region": incident.region,
        "deployment": incident.deployment,
        "cell": incident.cell,
        "node": incident.node,
        "evidence": incident.evidence,
        "opened_at": incident.opened_at.isoformat(),
        "closed_at": incident.closed_at.isoformat() if incident.closed_at else None,
    }


def _close_incident(incident: Incident, resolution: str, actor: str, now: datetime) -> None:
    incident.state, incident.closed_at, incident.resolution = IncidentState.CLOSED.value, now, resolution
    incident.closed_by = actor
    incident.save(update_fields=["state", "closed_at", "resolution", "closed_by", "muted_until"])
    incident.parts.filter(recovered_at__isnull=True).update(recovered_at=now)
    _record_incident_event(incident, "incident.closed", f"{incident.summary}: {resolution}", Tone.OK, now, actor)
    webhooks_notify(event=WebhookEvent.INCIDENT_CLOSED, body=incident_body(incident), now=now)


def _record_incident_event(
    incident: Incident, kind: str, message: str, tone: Tone, now: datetime, actor: str = SWITCHYARD
) -> None:
    event_record(
        kind=kind,
        message=message,
        tone=tone,
        now=now,
        actor=actor,
        region=incident.region,
        deployment=incident.deployment,
        cell=incident.cell,
        node=incident.node,
        detail={"incident": incident.pk},
    )
    live.push("incidents")


LOCK = 0x53_57_52_50
"""Key of PostgreSQL's advisory lock for replacements: "SWRP"."""


def node_cordon_faulty(decision: CordonNode, *, now: datetime) -> None:
    """Excludes a suspected node from new placements. Raises StaleDecision if it is cordoned or retired already."""
    with transaction.atomic():
        rows = Node.objects.filter(id=decision.node, cordoned=False).exclude(state=NodeState.RETIRED)
        compare_and_set_or_stale(
            rows, what=f"node {decision.node}", cordoned=True, cordoned_for_notice=decision.for_notice
        )
        node = Node.objects.get(id=decision.node)
        node_event(node, "node.cordoned", f"{node.id} cordoned: {decision.reason}", now=now, tone=Tone.WARN)


def node_uncordon_called_off(decision: UncordonNode, *, now: datetime) -> None:
    """Raises StaleDecision if it was cordoned for another reason, or is out of use already."""
    with transaction.atomic():
        rows = Node.objects.filter(id=decision.node, cordoned=True, cordoned_for_notice=True)
        rows = rows.exclude(state__in=[NodeState.RETIRED.value, *(state.value for state in CONDEMNED)])
        compare_and_set_or_stale(rows, what=f"node {decision.node}", cordoned=False, cordoned_for_notice=False)
        node = Node.objects.get(id=decision.node)
        node_event(node, "node.uncordoned", f"{node.id} uncordoned: {decision.reason}", now=now, tone=Tone.OK)


def node_replace(decision: ReplaceNode, *, now: datetime, settings: FaultSettings | None = None) -> None:
    """Takes a node out of use: marks it faulty and cordoned. Its cell is lost and gets another node. Raises
    StaleDecision if the node changed its state or its cell since the decision, or too many others are being
    replaced."""
    if NodeState.FAULTY not in NODE_ALLOWED[decision.seen]:
        raise ValueError(f"a node cannot go from {decision.seen} to faulty")
    with transaction.atomic():
        _check_replacement_budget(decision, settings or FaultSettings())
        rows = Node.objects.filter(id=decision.node, state=decision.seen.value, state_since=decision.since)
        compare_and_set_or_stale(
            rows,
            what=f"node {decision.node}",
            state=NodeState.FAULTY.value,
            cordoned=True,
            reason=decision.reason,
            state_since=now,
        )
        if cell_of(decision.node) != decision.cell:
            raise StaleDecision(f"node {decision.node} has moved to another cell")
        node = Node.objects.get(id=decision.node)
        node_event(node, f"node.{NodeState.FAULTY}", f"{node.id} is faulty: {decision.reason}", now=now)
        desired_changed([node.id])
        replacement_begin(node=node.id, cell=decision.cell, rule=decision.rule, reason=decision.reason, now=now)
        repair_record(node=node.id, what="replacement", reason=decision.reason, now=now)
        wake_ups.send("fleet.reconcile")


def replacement_begin(*, node: str, cell: str, rule: Rule, reason: str, now: datetime) -> None:
    """Starts a replacement, scheduled or not. Call it in the transaction that takes the node out of use."""
    if Replacement.objects.filter(node_id=node, closed_at__isnull=True).update(begun_at=now, cell=cell):
        return
    _create_replacement(node, cell, rule, reason, now, SWITCHYARD, begun_at=now)


def replacement_schedule(decision: RequestReplacement, *, now: datetime) -> None:
    """Schedules a replacement: the node's cell is drained first. Raises StaleDecision if the node is in another cell or
    already being replaced, or too many other nodes are."""
    with transaction.atomic():
        _check_replacement_budget(decision, FaultSettings())
        node = Node.objects.select_for_update().get(id=decision.node)
        if cell_of(node.id) != decision.cell or is_replaced(node.id):
            raise StaleDecision(f"node {node.id} is replaced already, or in another cell")
        _create_replacement(node.id, decision.cell, decision.rule, decision.reason, now, SWITCHYARD)
        message = f"{node.id} is to be replaced: {decision.reason}"
        node_event(node, "node.replacement", message, now=now, tone=Tone.MOVING)


def replacement_close(decision: CloseReplacement, *, now: datetime) -> None:
    """Raises StaleDecision if it was closed already."""
    with transaction.atomic():
        rows = Replacement.objects.filter(pk=decision.replacement, closed_at__isnull=True)
        compare_and_set_or_stale(
            rows, what=f"replacement {decision.replacement}", closed_at=now, resolution=decision.reason
        )
        row = Replacement.objects.select_related("node").get(pk=decision.replacement)
        node_event(row.node, "node.replaced", f"Replacement of {row.node_id}: {decision.reason}", now=now, tone=Tone.OK)


def is_replaced(node: str) -> bool:
    return Replacement.objects.filter(node_id=node, closed_at__isnull=True).exists()


def _check_replacement_budget(decision: ReplaceNode | RequestReplacement, settings: FaultSettings) -> None:
    """Holds a lock until the commit, so that no other worker begins a replacement. Skips a scheduled replacement, which
    was counted before, and a machine that its provider ends. Counts machines, because a fault of one hits all of its
    nodes."""
    node_id, cell = decision.node, decision.cell
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [LOCK])
    if is_replaced(node_id) or decision.rule is Rule.NOTICE:
        return
    node = Node.objects.get(id=node_id)
    pool = Node.objects.filter(region_id=node.region_id, instance_type_id=node.instance_type_id)
    work = Replacement.objects.filter(closed_at__isnull=True)
    mine = machine_of(node.id, node.topology)
    others = dict(work.filter(cell=cell).values_list("node_id", "node__topology")) if cell else {}
    under_way = work.filter(node__in=pool).exclude(rule=Rule.NOTICE).values_list("node_id", "node__topology")
    counted = pool.filter(state__in=[state.value for state in COUNTED]).values_list("id", "topology")
    underway = ReplacementBudget(
        pool=(node.region_id, node.instance_type_id),
        open=len({machine_of(*each) for each in under_way} - {mine}),
        pool_size=len({machine_of(*each) for each in counted}),
        cell=cell,
        peer=next((name for name, place in others.items() if machine_of(name, place) != mine), ""),
    )
    if refusal := over_budget(underway, settings):
        raise StaleDecision(f"node {node_id} stays: {refusal}")


def _create_replacement(
    node: str, cell: str, rule: Rule, reason: str, now: datetime, actor: str, **columns: Any
) -> Replacement:
    part = IncidentPart.objects.filter(incident=OuterRef("pk"), noun=PartNoun.NODE.value, name=node)
    about = Q(node=node) | Q(Exists(part)) | Q(kind__in=OF_SEVERAL_NODES, evidence__nodes__contains=node)
    incident = Incident.objects.filter(about, state=IncidentState.OPEN.value, shadow=False).first()
    return Replacement.objects.create(
        node_id=node, cell=cell, rule=rule, reason=reason, actor=actor, incident=incident, opened_at=now, **columns
    )


def replacement_request(*, node: Node, cell: str, actor: str, reason: str, now: datetime) -> Replacement:
    """Records an operator's request. Call it in the request's transaction."""
    return _create_replacement(node.id, cell, Rule.OPERATOR, reason, now, actor)
