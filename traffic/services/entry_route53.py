"""Publishes the weights of regions as records of Route 53, by compare and set inside Route 53 itself.

One batch deletes every record exactly as it was read, the text with the revision among them, and creates all anew. Of
several writers one wins and the others change nothing; a person's change, a second control plane and a restored
database are seen, and never overwritten. A pass may end anywhere: each attempt has its row, with a token of its own,
before its call, and what the text says afterwards tells which of them was carried out.
"""

import logging
import secrets
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Protocol

from django.db import IntegrityError, transaction
from django.db.models import Max

from fleet.providers.aws.calls import Refused, Unanswered
from fleet.providers.aws.calls import call as aws_call
from fleet.services.incident import incident_open, incidents_close
from kernel import live
from kernel.events import event_record
from kernel.leases import lease_release, lease_take, this_holder
from kernel.tones import Tone
from traffic.models import Entry, EntryRevision
from traffic.planning.entry import EntrySettings, EntryView, HoldEntry, PublishEntry, RevisionState, plan_entry
from traffic.planning.entry_records import RECORD_TYPE, Standing, is_same, records_of, swap, text_name, token_of
from traffic.selectors.entry import STANDS, EntryStated, entry_regions, entry_stated, standing_revision

SETTINGS = EntrySettings()
LEASE = "entry"
PASS_LIMIT_S = 120.0
"""A pass makes up to five calls, each with a limit of its own; after this another controller may try."""
LOOK_EVERY_S = 30.0
"""How often what stands there is read although nothing is to be changed: an account may make 5 requests a second."""
REVISIONS_KEPT = 200
FOREIGN = "entry-held"
"""Kind of the incident of an entry that waits for a person."""
HOME = "us-east-1"
"""Route 53 is one service for all regions; its calls are signed for this one."""
STALE = "InvalidChangeBatch"
"""Something in a batch is not as it stands there, or is not possible."""
BUSY = frozenset({"PriorRequestNotComplete", "Throttling", "ThrottlingException"})

log = logging.getLogger(__name__)


class AwsCall(Protocol):
    """As `fleet.providers.aws.calls.call`."""

    def __call__(self, service: str, operation: str, region: str, **params: Any) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class _Route53:
    """The calls that are needed, for one entry."""

    call: AwsCall
    stated: EntryStated

    def read(self) -> Standing:
        records = self._list(self.stated.name, RECORD_TYPE)
        text = self._list(text_name(self.stated.name), "TXT")
        return Standing(records, text[0] if text else None)

    def _list(self, name: str, kind: str) -> tuple[dict[str, Any], ...]:
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
        """Whether all of Route 53's servers know a change. One that it has forgotten is old."""
        try:
            answer = self.call("route53", "GetChange", HOME, Id=change_id)
        except Refused as refusal:
            if refusal.code == "NoSuchChange":
                return True
            raise
        return bool(answer["ChangeInfo"]["Status"] == "INSYNC")

    def change(self, changes: list[dict[str, Any]], comment: str) -> str:
        """Carry out a batch; the change's id."""
        batch = {"Comment": comment[:256], "Changes": changes}
        answer = self.call(
            "route53", "ChangeResourceRecordSets", HOME, HostedZoneId=self.stated.zone, ChangeBatch=batch
        )
        return str(answer["ChangeInfo"]["Id"])


def entry_run(*, now: datetime, call: AwsCall = aws_call) -> bool:
    """One pass. False: no region has an entry, or another controller is at it."""
    stated = entry_stated()
    if stated is None or (not stated.targets and not stated.problem):
        return False
    holder = this_holder()
    if lease_take(name=LEASE, holder=holder, ttl_s=PASS_LIMIT_S, now=now) is None:
        return False
    try:
        entry, _ = Entry.objects.get_or_create(name=stated.name)
        _note(entry, _pass(entry, stated, _Route53(call, stated), now), now)
    finally:
        lease_release(name=LEASE, holder=holder, now=now)
    return True


def _pass(entry: Entry, stated: EntryStated, route53: _Route53, now: datetime) -> HoldEntry | None:
    """Look, plan, publish. Why what is there stays though it is not what is wanted; None: it is."""
    if stated.problem:
        return HoldEntry(stated.problem, needs_person=True)
    if _is_quiet(entry, stated, now):
        return None
    try:
        standing = route53.read()
        view = _settled(entry, stated, route53, standing, now)
        decision = plan_entry(view, SETTINGS, now)
        if not isinstance(decision, PublishEntry):
            return decision
        return _publish(entry, stated, route53, standing, decision, now)
    except Unanswered as error:
        return HoldEntry(f"Route 53 did not answer: {error}", passing=True)
    except Refused as refusal:
        if refusal.code in BUSY:
            return HoldEntry(f"Route 53 is busy, and is asked again: {refusal.code}", passing=True)
        return HoldEntry(f"Route 53 refused: {refusal}", needs_person=True)


def _is_quiet(entry: Entry, stated: EntryStated, now: datetime) -> bool:
    """Nothing is to be changed or waited for, and what stands there was read just now."""
    if entry.looked_at is None or entry.held or now - entry.looked_at >= timedelta(seconds=LOOK_EVERY_S):
        return False
    newest = entry.revisions.order_by("-revision").first()
    if newest is None or newest.state != RevisionState.IN_FORCE:
        return False
    return plan_entry(_view(entry, stated, newest, now), SETTINGS, now) is None


def _view(
    entry: Entry, stated: EntryStated, stands: EntryRevision | None, now: datetime, foreign: str = ""
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


def _settled(entry: Entry, stated: EntryStated, route53: _Route53, standing: Standing, now: datetime) -> EntryView:
    """Note what became of our attempts, by what stands there; what is then to be decided upon."""
    entry.seen, entry.seen_weights, entry.looked_at = standing.fingerprint, standing.weights, now
    entry.save(update_fields=["seen", "seen_weights", "looked_at"])
    token = token_of(standing.value)
    ours = entry.revisions.filter(token=token).first() if token else None
    if ours is not None and is_same(ours.records, standing.records):
        _note_standing(entry, ours, route53, now)
        return _view(entry, stated, ours, now)
    if entry.adopted and entry.adopted == standing.fingerprint:
        return _view(entry, stated, None, now)
    return _view(entry, stated, standing_revision(entry), now, _foreign(entry, standing, ours))


def _foreign(entry: Entry, standing: Standing, ours: EntryRevision | None) -> str:
    """What stands there that is not ours; "" if nothing does and we never wrote anything."""
    if ours is not None:
        what = f"the records of {entry.name} are not those that revision {ours.revision} wrote"
    elif standing.text is not None:
        what = f"{text_name(entry.name)} says {standing.value[:200]}, which this control plane did not write"
    elif standing.records:
        what = f"{entry.name} has {len(standing.records)} address records that this control plane did not write"
    elif entry.revisions.exclude(state=RevisionState.LOST.value).exclude(state=RevisionState.SENDING.value).exists():
        what = f"the records of {entry.name} are gone"
    else:
        return ""
    return f"{what}: `switchyard entry adopt` replaces them by ours"


def _note_standing(entry: Entry, ours: EntryRevision, route53: _Route53, now: datetime) -> None:
    """`ours` was carried out, and no other stands there."""
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
    """No other attempt stands there."""
    others = entry.revisions.exclude(pk=stands.pk)
    lost = {"state": RevisionState.LOST.value, "settled_at": now, "trouble": "it was not carried out"}
    others.filter(state=RevisionState.SENDING.value).update(**lost)
    replaced = {"state": RevisionState.REPLACED.value, "settled_at": now}
    others.filter(state__in=[each.value for each in STANDS]).update(**replaced)


def _publish(
    entry: Entry, stated: EntryStated, route53: _Route53, standing: Standing, decision: PublishEntry, now: datetime
) -> HoldEntry | None:
    """Write the attempt down, make it, and note its answer."""
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
        if refusal.code == STALE:  # it is not as it was a moment ago: the next pass reads it again
            return HoldEntry(f"nothing was changed, for Route 53 refused the batch: {refusal.text[:300]}", passing=True)
        raise
    with transaction.atomic():
        row.change_id, row.state = change_id, RevisionState.PENDING.value
        row.save(update_fields=["change_id", "state"])
        _note_others(entry, row, now)
        Entry.objects.filter(pk=entry.pk).update(adopted="")
        _forget_old(entry, row.revision)
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


def _forget_old(entry: Entry, revision: int) -> None:
    entry.revisions.filter(revision__lte=revision - REVISIONS_KEPT).delete()


def _note(entry: Entry, hold: HoldEntry | None, now: datetime) -> None:
    """Keep why it is held; the begin and end of a hold are events, and one that waits for a person is an incident."""
    held = hold.reason if hold else ""
    changes: dict[str, Any] = {"held": held, "held_since": (entry.held_since or now) if held else None}
    with transaction.atomic():
        Entry.objects.filter(pk=entry.pk).update(**changes)
        if bool(held) != bool(entry.held):
            message = f"{entry.name}: {f'left as it is, {held}' if held else 'as wanted again'}"
            kind, tone = ("entry.held", Tone.WARN) if held else ("entry.released", Tone.OK)
            event_record(kind=kind, message=message, tone=tone, now=now)
            live.push("traffic")
        if hold is not None and hold.needs_person:
            log.warning("entry %s: %s", entry.name, held)
            incident_open(kind=FOREIGN, subject=entry.name, summary=f"{entry.name}: {held}", evidence={}, now=now)
        elif hold is None or not hold.passing:
            incidents_close(kind=FOREIGN, subject=entry.name, resolution="nothing is in its way any more", now=now)
