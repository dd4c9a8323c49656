"""Plans shares of clients for operators, publishes weights as Route 53 records, and keeps ingresses in their load
balancer's target groups.

One Route 53 change deletes every record exactly as it was read, including the text record with the revision, and
creates all anew. Of concurrent writers one wins and the others change nothing, so changes by a person, a second control
plane or a restored database are detected and never overwritten. A pass may end anywhere: each attempt has a row with a
unique token before its call, and the text record then shows which attempt was carried out.

Target calls are idempotent, so their rows are written afterwards. A deregistered target keeps its row until the group's
delay has passed; its machine waits for that."""

import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Protocol

import msgspec
from django.db import IntegrityError, transaction
from django.db.models import Max, QuerySet

from engine_agent.protocol.ports import grpc_port, grpc_tls_port, tls_port
from fleet.clouds.aws.calls import CallFailed, Refused, Unanswered
from fleet.clouds.aws.calls import call as aws_call
from fleet.clouds.models import CloudRegion
from fleet.faults.services.incidents import incident_open, incidents_close
from fleet.machines.models import Machine
from fleet.reconcile.planning.states import CloudRegionState, MachineState
from fleet.regions.models import Region
from kernel import live, wake_ups
from kernel.events import event_record
from kernel.leases import lease_during
from kernel.refusals import Conflict, InvalidInput
from kernel.tones import Tone
from traffic.entry.models import Entry, EntryRevision, EntryTarget
from traffic.entry.planner import (
    RECORD_TYPE,
    EntrySettings,
    EntryView,
    HoldEntry,
    PublishedRecords,
    PublishEntry,
    RevisionState,
    Target,
    TargetIngress,
    is_same,
    plan_entry,
    plan_targets,
    records_of,
    swap,
    text_name,
    token_of,
)
from traffic.entry.selectors import PUBLISHED_STATES, EntrySpec, entry_regions, entry_spec, published_attempt
from traffic.region_shares.services.overrides import ENTRY_TASK
from traffic.routing.models import Ingress, IngressReport

MOST_SHARE = 1e6


def entry_shares_plan(*, name: str, shares: Mapping[str, float], actor: str, now: datetime) -> Entry:
    """Plans the shares of regions, in any unit; other regions have 1. The loop moves clients within minutes, by 5
    points or more. Repeating it changes nothing. Raises InvalidInput for an unknown region, a negative share, or no
    region above 0."""
    with transaction.atomic():
        entry = Entry.objects.select_for_update().get(name=name)
        planned = _checked_shares(shares)
        if planned == entry.shares:
            return entry
        entry.shares, entry.revision = planned, entry.revision + 1
        entry.actor, entry.changed_at = actor[:64], now
        entry.save(update_fields=["shares", "revision", "actor", "changed_at"])
        stated = ", ".join(f"{region} {share:g}" for region, share in sorted(planned.items())) or "all equal"
        event_record(
            kind="entry.planned",
            message=f"shares of {entry.name} planned by {actor}: {stated}",
            tone=Tone.MOVING,
            now=now,
            actor=actor[:64],
            detail={"shares": planned, "revision": entry.revision},
        )
        live.push("traffic")
        wake_ups.send(ENTRY_TASK)
    return entry


def entry_adopt(*, name: str, seen: str, actor: str, now: datetime) -> Entry:
    """Allows the loop to replace records that this control plane did not write. `seen` is their fingerprint. Raises
    Conflict if the records have changed, or nothing is to be replaced."""
    with transaction.atomic():
        entry = Entry.objects.select_for_update().get(name=name)
        if seen != entry.seen:
            raise Conflict(f"the records of {entry.name} are now {entry.seen or 'not read yet'}, not {seen}")
        if not entry.held:
            raise Conflict(f"{entry.name} is as wanted; there is nothing to adopt")
        Entry.objects.filter(pk=entry.pk).update(adopted=seen)
        event_record(
            kind="entry.adopted",
            message=f"records of {entry.name} may be replaced, by {actor}: {entry.held}",
            tone=Tone.WARN,
            now=now,
            actor=actor[:64],
            detail={"seen": seen, "weights": entry.seen_weights},
        )
        live.push("traffic")
        wake_ups.send(ENTRY_TASK)
    entry.adopted = seen
    return entry


def _checked_shares(shares: Mapping[str, float]) -> dict[str, float]:
    there = set(Region.objects.values_list("name", flat=True))
    for region, share in shares.items():
        if region not in there:
            message = f"there is no region {region}; there are: {', '.join(sorted(there))}"
            raise InvalidInput(field=f"shares.{region}", rule="region", message=message)
        if not 0 <= share <= MOST_SHARE:
            message = f"the share of {region} is {share:g}; it must be from 0 to {MOST_SHARE:g}"
            raise InvalidInput(field=f"shares.{region}", rule="share", message=message)
    if there and not any(shares.get(region, 1.0) for region in there):
        raise InvalidInput(field="shares", rule="none", message="at least one region must get clients")
    return {region: float(share) for region, share in shares.items()}


SETTINGS = EntrySettings()
LEASE = "entry"
PASS_LIMIT_S = 120.0
"""A pass makes up to five calls, each with its own limit; after this time another controller may try."""
LOOK_EVERY_S = 30.0
"""How often unchanged records are read: an account may make 5 requests per second."""
REVISIONS_KEPT = 200
FOREIGN = "entry-held"
"""Kind of the incident about an entry that waits for an operator."""
HOME = "us-east-1"
"""Route 53 is global; its calls are signed for this region."""
STALE = "InvalidChangeBatch"
"""A record of the change is not as it was read, or the change is invalid."""
BUSY = frozenset({"PriorRequestNotComplete", "Throttling", "ThrottlingException"})

log = logging.getLogger(__name__)


class AwsCall(Protocol):
    """Same signature as `fleet.clouds.aws.calls.call`."""

    def __call__(self, service: str, operation: str, region: str, **params: Any) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class _Route53:
    call: AwsCall
    stated: EntrySpec

    def read(self) -> PublishedRecords:
        records = self._list_records(self.stated.name, RECORD_TYPE)
        text = self._list_records(text_name(self.stated.name), "TXT")
        return PublishedRecords(records, text[0] if text else None)

    def _list_records(self, name: str, kind: str) -> tuple[dict[str, Any], ...]:
        start: dict[str, Any] = {"StartRecordName": name, "StartRecordType": kind}
        found: list[dict[str, Any]] = []
        while start:
            answer = self.call("route53", "ListResourceRecordSets", HOME, HostedZoneId=self.stated.zone, **start)
            sets = answer["ResourceRecordSets"]
            mine = [each for each in sets if each["Name"].lower().rstrip(".") == name and each["Type"] == kind]
            found += mine
            goes_on = bool(answer.get("IsTruncated")) and len(mine) == len(sets)
            start = {
                f"Start{key}": answer[f"Next{key}"]
                for key in ("RecordName", "RecordType", "RecordIdentifier")
                if goes_on and answer.get(f"Next{key}")
            }
        return tuple(found)

    def is_in_sync(self, change_id: str) -> bool:
        """Whether all of Route 53's servers have a change. A change that it no longer knows is old."""
        try:
            answer = self.call("route53", "GetChange", HOME, Id=change_id)
        except Refused as refusal:
            if refusal.code == "NoSuchChange":
                return True
            raise
        return bool(answer["ChangeInfo"]["Status"] == "INSYNC")

    def change(self, changes: list[dict[str, Any]], comment: str) -> str:
        batch = {"Comment": comment[:256], "Changes": changes}
        answer = self.call(
            "route53", "ChangeResourceRecordSets", HOME, HostedZoneId=self.stated.zone, ChangeBatch=batch
        )
        return str(answer["ChangeInfo"]["Id"])


def entry_run(*, now: datetime, call: AwsCall = aws_call) -> bool:
    """Runs one pass. Returns False if no region has an entry or another controller runs it."""
    stated = entry_spec()
    if stated is None or (not stated.targets and not stated.problem):
        return False
    with lease_during(name=LEASE, ttl_s=PASS_LIMIT_S, now=now) as is_ours:
        if not is_ours:
            return False
        entry, _ = Entry.objects.get_or_create(name=stated.name)
        _record_hold(entry, _run_pass(entry, stated, _Route53(call, stated), now), now)
    return True


def _run_pass(entry: Entry, stated: EntrySpec, route53: _Route53, now: datetime) -> HoldEntry | None:
    """Reads, plans, publishes. Returns why the records are not as wanted, or None."""
    if stated.problem:
        return HoldEntry(stated.problem, needs_person=True)
    if _is_quiet(entry, stated, now):
        return None
    try:
        standing = route53.read()
        view = _settle_attempts(entry, stated, route53, standing, now)
        decision = plan_entry(view, SETTINGS, now)
        if not isinstance(decision, PublishEntry):
            return decision
        return _publish_weights(entry, stated, route53, standing, decision, now)
    except Unanswered as error:
        return HoldEntry(f"Route 53 did not answer: {error}", passing=True)
    except Refused as refusal:
        if refusal.code in BUSY:
            return HoldEntry(f"Route 53 is busy, retrying: {refusal.code}", passing=True)
        return HoldEntry(f"Route 53 refused: {refusal}", needs_person=True)


def _is_quiet(entry: Entry, stated: EntrySpec, now: datetime) -> bool:
    if entry.looked_at is None or entry.held or now - entry.looked_at >= timedelta(seconds=LOOK_EVERY_S):
        return False
    newest = entry.revisions.order_by("-revision").first()
    if newest is None or newest.state != RevisionState.IN_FORCE:
        return False
    return plan_entry(_entry_view(entry, stated, newest, now), SETTINGS, now) is None


def _entry_view(
    entry: Entry, stated: EntrySpec, stands: EntryRevision | None, now: datetime, foreign: str = ""
) -> EntryView:
    numbered = entry.revisions.aggregate(most=Max("revision"))["most"] or 0
    return EntryView(
        regions=tuple(entry_regions(entry, stated, stands, now)),
        weights=stands.weights if stands else {},
        revision=stands.revision if stands else 0,
        numbered=numbered,
        changed_at=stands.at if stands else None,
        pending_since=stands.at if stands and stands.state == RevisionState.PENDING else None,
        foreign=foreign,
    )


def _settle_attempts(
    entry: Entry, stated: EntrySpec, route53: _Route53, standing: PublishedRecords, now: datetime
) -> EntryView:
    """Resolves the outcomes of attempts from the records as read, and returns the planner's view."""
    entry.seen, entry.seen_weights, entry.looked_at = standing.fingerprint, standing.weights, now
    entry.save(update_fields=["seen", "seen_weights", "looked_at"])
    token = token_of(standing.value)
    ours = entry.revisions.filter(token=token).first() if token else None
    if ours is not None and is_same(ours.records, standing.records):
        _note_standing(entry, ours, route53, now)
        return _entry_view(entry, stated, ours, now)
    if entry.adopted and entry.adopted == standing.fingerprint:
        return _entry_view(entry, stated, None, now)
    return _entry_view(entry, stated, published_attempt(entry), now, _foreign_problem(entry, standing, ours))


def _foreign_problem(entry: Entry, standing: PublishedRecords, ours: EntryRevision | None) -> str:
    """Describes records that this control plane did not write; "" if there are none."""
    if ours is not None:
        what = f"the records of {entry.name} are not those that revision {ours.revision} wrote"
    elif standing.text is not None:
        what = f"{text_name(entry.name)} contains {standing.value[:200]}, which this control plane did not write"
    elif standing.records:
        what = f"{entry.name} has {len(standing.records)} address records that this control plane did not write"
    elif entry.revisions.exclude(state=RevisionState.LOST.value).exclude(state=RevisionState.SENDING.value).exists():
        what = f"the records of {entry.name} were deleted"
    else:
        return ""
    return f"{what}: `switchyard entry adopt` replaces them"


def _note_standing(entry: Entry, ours: EntryRevision, route53: _Route53, now: datetime) -> None:
    if ours.state == RevisionState.IN_FORCE:
        return
    waits_s = (now - ours.at).total_seconds()
    in_sync = route53.is_in_sync(ours.change_id) if ours.change_id else waits_s >= SETTINGS.pending_limit_s
    state = RevisionState.IN_FORCE if in_sync else RevisionState.PENDING
    if state == ours.state:
        return
    with transaction.atomic():
        ours.state, ours.settled_at = state.value, now if in_sync else None
        ours.save(update_fields=["state", "settled_at"])
        _note_others(entry, ours, now)
        if in_sync:
            message = f"{entry.name} revision {ours.revision} is in force on all servers"
            event_record(kind="entry.in_force", message=message, tone=Tone.OK, now=now)
        live.push("traffic")


def _note_others(entry: Entry, stands: EntryRevision, now: datetime) -> None:
    others = entry.revisions.exclude(pk=stands.pk)
    lost = {"state": RevisionState.LOST.value, "settled_at": now, "trouble": "it was not carried out"}
    others.filter(state=RevisionState.SENDING.value).update(**lost)
    replaced = {"state": RevisionState.REPLACED.value, "settled_at": now}
    others.filter(state__in=[each.value for each in PUBLISHED_STATES]).update(**replaced)


def _publish_weights(
    entry: Entry,
    stated: EntrySpec,
    route53: _Route53,
    standing: PublishedRecords,
    decision: PublishEntry,
    now: datetime,
) -> HoldEntry | None:
    refused = entry.revisions.filter(trouble__startswith=STALE, at__gt=now - timedelta(seconds=LOOK_EVERY_S)).first()
    if refused is not None:
        return HoldEntry(f"Route 53 refused revision {refused.revision}: {refused.trouble}", needs_person=True)
    records = records_of(entry.name, decision.weights, stated.targets)
    token = secrets.token_hex(16)
    try:
        with transaction.atomic():
            row = EntryRevision.objects.create(
                entry=entry, revision=decision.revision, token=token, weights=dict(decision.weights),
                records=list(records), state=RevisionState.SENDING.value, reason=decision.reason, at=now,
            )  # fmt: skip
    except IntegrityError:
        return HoldEntry("another controller is publishing", passing=True)
    changes = swap(entry.name, standing, records, row.revision, token)
    try:
        change_id = route53.change(changes, f"Switchyard revision {row.revision}: {decision.reason}")
    except Refused as refusal:
        row.state, row.trouble, row.settled_at = RevisionState.LOST.value, str(refusal)[:400], now
        row.save(update_fields=["state", "trouble", "settled_at"])
        if refusal.code == STALE:  # it has changed since it was read: the next pass reads it again
            return HoldEntry(f"nothing changed, because Route 53 refused it: {refusal.text[:300]}", passing=True)
        raise
    with transaction.atomic():
        row.change_id, row.state = change_id, RevisionState.PENDING.value
        row.save(update_fields=["change_id", "state"])
        _note_others(entry, row, now)
        Entry.objects.filter(pk=entry.pk).update(adopted="")
        entry.revisions.filter(revision__lte=row.revision - REVISIONS_KEPT).delete()
        shares = ", ".join(f"{region} {weight / 2.55:.0f} %" for region, weight in sorted(decision.weights.items()))
        event_record(
            kind="entry.published",
            message=f"{entry.name} revision {row.revision}: {decision.reason}: {shares}",
            tone=Tone.MOVING,
            now=now,
            detail={"weights": dict(decision.weights), "revision": row.revision},
        )
        live.push("traffic")
    return None


def _record_hold(entry: Entry, hold: HoldEntry | None, now: datetime) -> None:
    """Records why the entry is held. Start and end are events; a hold that needs an operator opens an incident."""
    held = hold.reason if hold else ""
    changes: dict[str, Any] = {"held": held, "held_since": (entry.held_since or now) if held else None}
    with transaction.atomic():
        Entry.objects.filter(pk=entry.pk).update(**changes)
        if bool(held) != bool(entry.held):
            message = f"{entry.name}: {f'unchanged, {held}' if held else 'as wanted again'}"
            kind, tone = ("entry.held", Tone.WARN) if held else ("entry.released", Tone.OK)
            event_record(kind=kind, message=message, tone=tone, now=now)
            live.push("traffic")
        if hold is not None and hold.needs_person:
            log.warning("entry %s: %s", entry.name, held)
            incident_open(kind=FOREIGN, subject=entry.name, summary=f"{entry.name}: {held}", evidence={}, now=now)
        elif hold is None or not hold.passing:
            incidents_close(kind=FOREIGN, subject=entry.name, resolution="nothing blocks it any longer", now=now)


PORT_OF_GROUP = {"tls": tls_port, "grpc": grpc_tls_port, "plain_grpc": grpc_port}
"""Port of an ingress in the region's target groups of these names; in others its port for applications."""
OF_GRPC = frozenset({"grpc", "plain_grpc"})
DRAINED = frozenset({"unused", ""})
"""States of a target without streams; "" means that the group does not know it."""


def entry_targets_follow(*, now: datetime, call: AwsCall = aws_call) -> None:
    """Runs one pass over all regions with target groups."""
    for cloud in CloudRegion.objects.filter(state=CloudRegionState.READY.value).select_related("region"):
        try:
            groups = cloud.stated_base().target_groups
        except msgspec.ValidationError:
            continue
        if not groups:
            continue
        with lease_during(name=f"targets:{cloud.pk}", ttl_s=PASS_LIMIT_S, now=now) as is_ours:
            if not is_ours:
                continue
            EntryTarget.objects.filter(region=cloud.region_id).exclude(group__in=list(groups.values())).delete()
            ingresses = _target_ingresses(cloud.region_id)
            try:
                for name, group in sorted(groups.items()):
                    serving = ingresses if cloud.region.grpc or name not in OF_GRPC else []
                    _follow_group(cloud, group, _at_port_of(name, serving), call, now)
            except CallFailed as error:
                log.warning("targets of %s stay unchanged: %s", cloud.pk, error)


def _at_port_of(name: str, ingresses: Sequence[TargetIngress]) -> list[TargetIngress]:
    """Returns the ingresses with the port of this group."""
    port_of = PORT_OF_GROUP.get(name)
    return [replace(each, port=port_of(each.port)) for each in ingresses] if port_of else list(ingresses)


def _follow_group(
    cloud: CloudRegion, group: str, ingresses: Sequence[TargetIngress], call: AwsCall, now: datetime
) -> None:
    rows = list(EntryTarget.objects.filter(region=cloud.region_id, group=group))
    plan = plan_targets([group], ingresses, [row.view() for row in rows])
    for target in plan.forget:
        _target_rows(target).delete()
    for target in plan.register:
        _call_on(target, "RegisterTargets", cloud, call)
        stated = {"address": target.address, "port": target.port, "registered_at": now, "deregistered_at": None}
        EntryTarget.objects.update_or_create(
            ingress=target.ingress, group=target.group, defaults={"region_id": cloud.region_id, **stated}
        )
        _target_event(cloud, f"{target.ingress} gets clients of the load balancer at port {target.port}", Tone.OK, now)
    for target in plan.deregister:
        _call_on(target, "DeregisterTargets", cloud, call)
        _target_rows(target).update(deregistered_at=now)
        message = f"{target.ingress} gets no new clients of the load balancer at port {target.port}"
        _target_event(cloud, message, Tone.MOVING, now)
    for row in rows:
        if row.deregistered_at is not None and _is_drained(row, cloud, call):
            row.delete()


def _target_ingresses(region: str) -> list[TargetIngress]:
    leaving = set(
        Machine.objects.filter(region_id=region, leaving=True)
        .exclude(state=MachineState.GONE)
        .exclude(runs="")
        .values_list("runs", flat=True)
    )
    found = []
    for ingress in Ingress.objects.filter(region_id=region).select_related("report"):
        report: IngressReport | None = getattr(ingress, "report", None)
        ready = report is not None and report.connected and report.revision > 0
        found.append(TargetIngress(ingress.id, ingress.address, ingress.port, ready, ingress.id in leaving))
    return found


def _is_drained(row: EntryTarget, cloud: CloudRegion, call: AwsCall) -> bool:
    """A target that the group has forgotten or calls unused has no streams."""
    found = _call_on(row.view(), "DescribeTargetHealth", cloud, call)["TargetHealthDescriptions"]
    states = [each["TargetHealth"]["State"] for each in found]
    return all(state in DRAINED for state in states)


def _call_on(target: Target, action: str, cloud: CloudRegion, call: AwsCall) -> Any:
    where = [{"Id": target.address, "Port": target.port}]
    return call("elbv2", action, cloud.aws_region, TargetGroupArn=target.group, Targets=where)


def _target_rows(target: Target) -> QuerySet[EntryTarget]:
    return EntryTarget.objects.filter(ingress=target.ingress, group=target.group)


def _target_event(cloud: CloudRegion, message: str, tone: Tone, now: datetime) -> None:
    event_record(kind="ingress.target", message=message, tone=tone, now=now, region=cloud.region_id)
    live.push("traffic", cloud.region_id)
