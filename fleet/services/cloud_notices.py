"""Keeps what a cloud announced of machines, once each, and settles what is over. Steps of `cloud_upkeep`.

Three ways lead here: the region's queue, DescribeInstanceStatus, and the ends of Capacity Blocks. Each alone is late or
silent at times. What follows is decided by `fleet.planning.faults.notices`.
"""

import logging
from collections.abc import Mapping
from datetime import datetime, timedelta

from django.db import transaction
from django.db.models import QuerySet

from fleet.models import CapacityPool, CloudNotice, CloudRegion, Machine, Node
from fleet.planning.pools import Market
from fleet.planning.presence import ENDED
from fleet.planning.states import MachineState, NoticeKind, NoticeSource
from fleet.providers.aws.calls import CallFailed
from fleet.providers.aws.listing import seen_store
from fleet.providers.aws.notices import Announcement, Nothing, StateSeen, UnreadableNotice, block_end, parse
from fleet.providers.aws.queue import Message, messages_delete, messages_receive
from fleet.providers.aws.reservations import reservations_read
from fleet.providers.aws.statuses import Statuses, region_statuses
from fleet.services.node_event import node_event
from kernel import hints, live
from kernel.tones import Tone

PROVIDER = "aws"
KEPT = timedelta(days=30)
"""How long settled notices stay."""
TEXT_MOST = 500
ROUNDS = 20
"""Of ten messages each, in one step."""

log = logging.getLogger(__name__)


def notice_record(
    *,
    machine: Machine,
    kind: NoticeKind,
    source: NoticeSource,
    at: datetime,
    ends_at: datetime | None,
    text: str,
    event_key: str,
    now: datetime,
) -> bool:
    """Keep one announcement. Returns False where it is known: it may come twice, and by several ways."""
    with transaction.atomic():
        row, created = CloudNotice.objects.get_or_create(
            event_key=event_key[:200],
            defaults={
                "machine": machine, "kind": kind, "source": source, "at": at, "ends_at": ends_at,
                "text": text[:TEXT_MOST],
            },
        )  # fmt: skip
        if not created:
            return False
        node = Node.objects.filter(id=machine.runs).first()
        if node is not None:
            until = f" until {ends_at:%Y-%m-%d %H:%M:%S} UTC" if ends_at else ""
            node_event(node, "node.notice", f"{node.id}: {kind}{until}: {row.text}", now=now, tone=Tone.WARN)
        live.push("machines")
        hints.ring("fleet.reconcile")
    return True


# --- the queue ----------------------------------------------------------------------------------------------------


def cloud_queue(cloud: CloudRegion, now: datetime) -> None:
    """Take what is in the region's queue. A message that makes no sense stays there, and goes to the dead letters after
    it was received as often as its queue says."""
    url = cloud.base.get("queue_url", "")
    if not url:
        return
    try:
        for _ in range(ROUNDS):
            messages = messages_receive(cloud.aws_region, url)
            done = [message for message in messages if _take(cloud, message, now)]
            messages_delete(cloud.aws_region, url, done)
            if not messages:
                return
    except CallFailed as error:
        log.warning("the queue of region %s was not read: %s", cloud.pk, error)


def _take(cloud: CloudRegion, message: Message, now: datetime) -> bool:
    """Whether the message is done with. It is deleted after the rows are written, so a crash between has it twice."""
    try:
        meaning = parse(message.body)
    except UnreadableNotice as error:
        log.warning("message %s of region %s is left for its dead letters: %s", message.id, cloud.pk, error)
        return False
    match meaning:
        case StateSeen(machine, state):
            seen_store({machine: state}, now)
        case Announcement():
            announcement_store(cloud, meaning, now)
        case Nothing():
            pass
    return True


def announcement_store(cloud: CloudRegion, said: Announcement, now: datetime) -> int:
    """One notice for each machine of ours that it is about. Returns how many were new."""
    rows = _machines(cloud)
    rows = rows.filter(reservation=said.reservation) if said.reservation else rows.filter(provider_id__in=said.machines)
    return sum(
        notice_record(
            machine=machine,
            kind=said.kind,
            source=NoticeSource.EVENTS,
            at=said.at,
            ends_at=said.ends_at,
            text=said.text,
            event_key=f"{said.event_id}/{machine.provider_id}",
            now=now,
        )
        for machine in rows
    )


def _machines(cloud: CloudRegion) -> "QuerySet[Machine]":
    return Machine.objects.filter(provider=PROVIDER, region_id=cloud.pk).exclude(state=MachineState.GONE)


# --- polling ------------------------------------------------------------------------------------------------------


def cloud_statuses(cloud: CloudRegion, now: datetime) -> None:
    """See state, checks and scheduled events of all machines: what events missed, and what is over."""
    try:
        statuses = region_statuses(cloud.aws_region)
    except CallFailed as error:
        log.warning("statuses of region %s were not read: %s", cloud.pk, error)
        return
    ours = {machine.provider_id: machine for machine in _machines(cloud)}
    seen_store({name: state for name, state in statuses.states.items() if name in ours}, now)
    _store_scheduled(cloud, statuses, ours, now)
    _store_impaired(statuses, ours, now)
    notices_settle(cloud, now)


def _store_scheduled(cloud: CloudRegion, statuses: Statuses, ours: Mapping[str, Machine], now: datetime) -> None:
    """An event that is no longer listed was done or withdrawn. A changed time makes another one of it."""
    there = set()
    for event in statuses.events:
        if event.machine in ours:
            key = f"status/{event.id}/{event.machine}/{event.not_before:%Y%m%dT%H%M%S}"
            there.add(key)
            notice_record(
                machine=ours[event.machine],
                kind=event.kind,
                source=NoticeSource.STATUS,
                at=now,
                ends_at=event.not_before,
                text=f"{event.code}: {event.text}",
                event_key=key,
                now=now,
            )
    listed = [name for name in statuses.states if name in ours]
    gone = CloudNotice.objects.filter(
        source=NoticeSource.STATUS, settled_at=None, machine__region_id=cloud.pk, machine__provider_id__in=listed
    ).exclude(kind=NoticeKind.IMPAIRED)
    gone.exclude(event_key__in=there).update(settled_at=now)


def _store_impaired(statuses: Statuses, ours: Mapping[str, Machine], now: datetime) -> None:
    open_now = CloudNotice.objects.filter(source=NoticeSource.STATUS, kind=NoticeKind.IMPAIRED, settled_at=None)
    known = dict(open_now.filter(machine__provider_id__in=ours).values_list("machine__provider_id", "pk"))
    for name, since in statuses.impaired.items():
        if name in ours and name not in known:
            notice_record(
                machine=ours[name],
                kind=NoticeKind.IMPAIRED,
                source=NoticeSource.STATUS,
                at=since or now,
                ends_at=None,
                text="its status checks fail",
                event_key=f"impaired/{name}/{now:%Y%m%dT%H%M%S}",
                now=now,
            )
    well = [pk for name, pk in known.items() if name in statuses.states and name not in statuses.impaired]
    CloudNotice.objects.filter(pk__in=well).update(settled_at=now)


def notices_settle(cloud: CloudRegion, now: datetime) -> None:
    """What was said of machines that are gone is over; what has been over for long is forgotten."""
    here = CloudNotice.objects.filter(machine__region_id=cloud.pk)
    unsettled = here.filter(settled_at=None)
    unsettled.filter(machine__state=MachineState.GONE).update(settled_at=now)
    unsettled.filter(machine__cloud_state__in=ENDED).update(settled_at=now)
    here.filter(settled_at__lt=now - KEPT).delete()


def cloud_reservations(cloud: CloudRegion, now: datetime) -> None:
    """How much is left in reservations, when Capacity Blocks end, and what that means for the machines in them."""
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
        key = f"block/{reservation.id}/{end:%Y%m%dT%H%M%S}"
        in_it = CloudNotice.objects.filter(
            source=NoticeSource.BLOCK, settled_at=None, machine__reservation=reservation.id
        )
        in_it.exclude(event_key__startswith=key).update(settled_at=now)
        for machine in _machines(cloud).filter(reservation=reservation.id, market=Market.BLOCK):
            notice_record(
                machine=machine,
                kind=NoticeKind.BLOCK_END,
                source=NoticeSource.BLOCK,
                at=now,
                ends_at=end,
                text=f"{reservation.id} ends at {ends_at:%Y-%m-%d %H:%M} UTC",
                event_key=f"{key}/{machine.provider_id}",
                now=now,
            )
