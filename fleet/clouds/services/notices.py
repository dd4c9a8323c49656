"""Stores what a cloud announces about machines, one row for each, and settles notices that are over. Sources are the
region's queue, DescribeInstanceStatus and the ends of Capacity Blocks; nodes report their own metadata to
`node_notices`. Each source may be late or silent, and all write the same rows. `fleet.faults.planning.notices` decides
the consequences."""

import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta

from django.db import transaction
from django.db.models import Q, QuerySet

from fleet.capacity.planning.pools import Market
from fleet.clouds.aws.calls import CallFailed, Refused
from fleet.clouds.aws.listing import ScheduledEvent, Statuses, region_statuses, reservations_read, states_store
from fleet.clouds.aws.notices import (
    Announcement,
    CalledOff,
    Message,
    Nothing,
    StateSeen,
    UnreadableNotice,
    block_end,
    messages_delete,
    messages_receive,
    parse,
)
from fleet.clouds.models import CapacityPool, CloudNotice, CloudRegion
from fleet.faults.services.incidents import incident_open, incidents_close
from fleet.machines.models import Machine
from fleet.machines.planner import ENDED, Statement
from fleet.machines.services.reports import notice_record
from fleet.nodes.models import Node
from fleet.reconcile.planning.states import MachineState, NoticeKind, NoticeSource

PROVIDER = "aws"
KEPT = timedelta(days=30)
"""How long settled notices stay."""
SCHEDULED = [NoticeKind.RETIREMENT.value, NoticeKind.MAINTENANCE.value]
ROUNDS = 20
"""Of ten messages each, in one step."""
UNREAD = "notices-unread"
"""Kind of the incident of a region whose queue cannot be read."""

Handle = Callable[[CloudRegion, Sequence[Message], datetime], list[Message]]

log = logging.getLogger(__name__)


# --- the queue ----------------------------------------------------------------------------------------------------


def cloud_queue(cloud: CloudRegion, now: datetime) -> None:
    """Reads the queue of what EC2 announces."""
    queue_read(cloud, now, _handle_messages)


def queue_read(cloud: CloudRegion, now: datetime, handle: Handle) -> None:
    """Reads the region's queue. `handle` returns the messages to delete: others stay and move to the dead letters after
    the queue's number of receives."""
    url = cloud.base.get("queue_url", "")
    if not url:
        return
    try:
        for _ in range(ROUNDS):
            messages = messages_receive(cloud.aws_region, url)
            done = handle(cloud, messages, now) if messages else []
            messages_delete(cloud.aws_region, url, done)
            if not messages:
                break
    except CallFailed as error:
        log.warning("the queue of region %s was not read: %s", cloud.pk, error)
        if isinstance(error, Refused) and not error.is_for_now:
            summary = (
                f"The queue of notices of {cloud.pk} cannot be read, so the ends of machines are noticed late: {error}"
            )
            incident_open(kind=UNREAD, subject=cloud.pk, summary=summary, evidence={}, now=now, region=cloud.pk)
        return
    incidents_close(kind=UNREAD, subject=cloud.pk, resolution="it is read again", now=now)


def _handle_messages(cloud: CloudRegion, messages: Sequence[Message], now: datetime) -> list[Message]:
    return [message for message in messages if _handle_message(cloud, message, now)]


def _handle_message(cloud: CloudRegion, message: Message, now: datetime) -> bool:
    """Whether to delete the message. It is deleted after the rows are written, so a crash in between processes it
    twice."""
    try:
        meaning = parse(message.body)
    except UnreadableNotice as error:
        log.warning("message %s of region %s is left for the dead letters: %s", message.id, cloud.pk, error)
        return False
    match meaning:
        case StateSeen(machine, state):
            states_store({machine: state}, now)
        case Announcement():
            announcement_store(cloud, meaning, now)
        case CalledOff():
            _called_off(cloud, meaning, now)
        case Nothing():
            pass
    return True


def announcement_store(cloud: CloudRegion, announcement: Announcement, now: datetime) -> int:
    """Stores one notice for each of our machines in an announcement. Returns the number of new ones."""
    rows = _cloud_machines(cloud)
    rows = (
        rows.filter(reservation=announcement.reservation)
        if announcement.reservation
        else rows.filter(provider_id__in=announcement.machines)
    )
    return sum(
        notice_record(
            machine=machine,
            kind=announcement.kind,
            source=NoticeSource.EVENTS,
            statement=Statement(announcement.event_id, announcement.at, announcement.ends_at),
            text=announcement.text,
            now=now,
        )
        for machine in rows
    )


def _called_off(cloud: CloudRegion, called_off: CalledOff, now: datetime) -> None:
    word = Statement("", called_off.at, over=True)
    for machine in _cloud_machines(cloud).filter(provider_id__in=called_off.machines):
        notice_record(machine=machine, kind=called_off.kind, source=NoticeSource.EVENTS, statement=word, now=now)


def _cloud_machines(cloud: CloudRegion) -> "QuerySet[Machine]":
    return Machine.objects.filter(provider=PROVIDER, region_id=cloud.pk).exclude(state=MachineState.GONE)


# --- polling ------------------------------------------------------------------------------------------------------


def cloud_statuses(cloud: CloudRegion, now: datetime) -> None:
    """Reads state, checks and scheduled events of all machines: finds missed events, and those that are over."""
    try:
        statuses = region_statuses(cloud.aws_region)
    except CallFailed as error:
        log.warning("statuses of region %s were not read: %s", cloud.pk, error)
        return
    ours = {machine.provider_id: machine for machine in _cloud_machines(cloud)}
    states_store({name: state for name, state in statuses.states.items() if name in ours}, now)
    _store_scheduled(cloud, statuses, ours, now)
    _store_impaired(cloud, statuses, ours, now)
    notices_settle(cloud, now)


def _store_scheduled(cloud: CloudRegion, statuses: Statuses, ours: Mapping[str, Machine], now: datetime) -> None:
    """The first event of each kind counts. Unlisted events were done or withdrawn."""
    first: dict[tuple[str, NoticeKind], ScheduledEvent] = {}
    for event in sorted(statuses.events, key=lambda event: event.not_before):
        if event.machine in ours:
            first.setdefault((event.machine, event.kind), event)
    for (name, kind), event in first.items():
        statement = Statement(f"{event.id}/{event.not_before:%Y%m%dT%H%M%S}", now, event.not_before)
        text = f"{event.code}: {event.text}"
        notice_record(
            machine=ours[name], kind=kind, source=NoticeSource.STATUS, statement=statement, text=text, now=now
        )
    for row in _open_by_status(cloud).filter(kind__in=SCHEDULED).select_related("machine"):
        name = row.machine.provider_id
        if name in statuses.states and (name, row.kind) not in first:
            _settle_notice(row, now)


def _store_impaired(cloud: CloudRegion, statuses: Statuses, ours: Mapping[str, Machine], now: datetime) -> None:
    for name, since in statuses.impaired.items():
        if name in ours:
            notice_record(
                machine=ours[name],
                kind=NoticeKind.IMPAIRED,
                source=NoticeSource.STATUS,
                statement=Statement("impaired", now),
                text="its status checks fail",
                since=since,
                now=now,
            )
    for row in _open_by_status(cloud).filter(kind=NoticeKind.IMPAIRED).select_related("machine"):
        if row.machine.provider_id in statuses.states and row.machine.provider_id not in statuses.impaired:
            _settle_notice(row, now)


def _open_by_status(cloud: CloudRegion) -> "QuerySet[CloudNotice]":
    return CloudNotice.objects.filter(
        settled_at=None, machine__region_id=cloud.pk, evidence__has_key=NoticeSource.STATUS.value
    )


def _settle_notice(row: CloudNotice, now: datetime) -> None:
    word = Statement("", now, over=True)
    notice_record(machine=row.machine, kind=NoticeKind(row.kind), source=NoticeSource.STATUS, statement=word, now=now)


def notices_settle(cloud: CloudRegion, now: datetime) -> None:
    """Settles notices of machines that are gone, and deletes those settled long ago."""
    here = CloudNotice.objects.filter(machine__region_id=cloud.pk)
    over = here.filter(Q(machine__state=MachineState.GONE) | Q(machine__cloud_state__in=ENDED), settled_at=None)
    with transaction.atomic():  # not called off: its node stays cordoned
        Node.objects.filter(id__in=over.values("machine__runs")).update(cordoned_for_notice=False)
        over.update(settled_at=now)
    here.filter(settled_at__lt=now - KEPT).delete()


def cloud_reservations(cloud: CloudRegion, now: datetime) -> None:
    """Reads free machines of reservations and ends of Capacity Blocks, and stores notices for machines in those."""
    pools = CapacityPool.objects.filter(region_id=cloud.pk).exclude(reservation="")
    ids = set(pools.values_list("reservation", flat=True))
    try:
        reservations = reservations_read(cloud.aws_region, ids) if ids else ()
    except CallFailed as error:
        log.warning("reservations of region %s were not read: %s", cloud.pk, error)
        return
    for reservation in reservations:
        ends_at = reservation.ends_at if reservation.is_block else None
        pools.filter(reservation=reservation.id).update(free=reservation.free, ends_at=ends_at)
        if ends_at is None:
            continue
        end = block_end(ends_at)
        for machine in _cloud_machines(cloud).filter(reservation=reservation.id, market=Market.BLOCK):
            notice_record(
                machine=machine,
                kind=NoticeKind.BLOCK_END,
                source=NoticeSource.BLOCK,
                statement=Statement(f"{reservation.id}/{end:%Y%m%dT%H%M%S}", now, end),
                text=f"{reservation.id} ends at {ends_at:%Y-%m-%d %H:%M} UTC",
                now=now,
            )
