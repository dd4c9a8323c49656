"""What AWS announces of machines, as EventBridge puts it into a region's queue. Pure: a text in, its meaning out.

Both spellings of the Capacity Block event are documented. Nothing here is believed further than that a machine ends:
what a message says wrongly costs a replacement, and what is lost is found by polling.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any

import msgspec

from fleet.planning.states import NoticeKind

INTERRUPTED_AFTER = timedelta(seconds=120)
"""From a warning of EC2 until it ends the machine."""
BLOCK_MACHINES_END_BEFORE = timedelta(minutes=30)
"""EC2 begins to end the machines of a Capacity Block so long before its end."""
INTERRUPTIONS = frozenset(
    {
        "EC2 Spot Instance Interruption Warning",
        "EC2 Capacity Reservation Instance Interruption Warning",
    }
)
REBALANCE = "EC2 Instance Rebalance Recommendation"
BLOCK_ENDS = frozenset(
    {"Capacity Block Reservation Expiration Warning", "Capacity Block Expiration Warning"},
)
STATE_CHANGE = "EC2 Instance State-change Notification"
HEALTH = "AWS Health Event"
TEXT_MOST = 500


class UnreadableNotice(ValueError):
    """No announcement that we know; the text says what is wrong with it."""


class _Event(msgspec.Struct, frozen=True, rename={"detail_type": "detail-type"}):
    id: str
    detail_type: str
    time: datetime
    detail: dict[str, Any]
    resources: list[str] = []


@dataclass(frozen=True, slots=True)
class Announcement:
    """`machines`: ids of instances; or all of `reservation`. `event_id` is the same however often it comes."""

    event_id: str
    kind: NoticeKind
    at: datetime
    ends_at: datetime | None
    text: str
    machines: tuple[str, ...] = ()
    reservation: str = ""


@dataclass(frozen=True, slots=True)
class StateSeen:
    machine: str
    state: str


@dataclass(frozen=True, slots=True)
class CalledOff:
    """What was announced of machines is over, by being done or withdrawn."""

    kind: NoticeKind
    at: datetime
    machines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Nothing:
    pass


def parse(body: str) -> Announcement | StateSeen | CalledOff | Nothing:
    """The meaning of one message.

    Raises:
        UnreadableNotice: it has none.
    """
    try:
        event = msgspec.json.decode(body, type=_Event)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise UnreadableNotice(f"no event of EventBridge: {error}") from error
    if event.time.tzinfo is None:
        raise UnreadableNotice("its time has no zone")
    kind = event.detail_type
    if kind in INTERRUPTIONS:
        return _about_one(event, NoticeKind.INTERRUPTION, event.time + INTERRUPTED_AFTER)
    if kind == REBALANCE:
        return _about_one(event, NoticeKind.REBALANCE, None)
    if kind == STATE_CHANGE:
        return StateSeen(_instance(event), _text(event.detail, "state"))
    if kind in BLOCK_ENDS:
        ends_at = _time(event.detail, "end-date") - BLOCK_MACHINES_END_BEFORE
        reservation = _text(event.detail, "capacity-reservation-id")
        return Announcement(event.id, NoticeKind.BLOCK_END, event.time, ends_at, kind, reservation=reservation)
    if kind == HEALTH:
        return _health(event)
    raise UnreadableNotice(f"its detail-type is {kind[:80]!r}, which no rule of ours sends")


def block_end(end_date: datetime) -> datetime:
    """When the machines of a Capacity Block with this end are ended."""
    return end_date - BLOCK_MACHINES_END_BEFORE


def scheduled_kind(code: str) -> NoticeKind:
    """What a scheduled event's code, or the type of a Health event, says of a machine."""
    ends = any(word in code.lower() for word in ("retire", "stop"))
    return NoticeKind.RETIREMENT if ends else NoticeKind.MAINTENANCE


def _about_one(event: _Event, kind: NoticeKind, ends_at: datetime | None) -> Announcement:
    return Announcement(event.id, kind, event.time, ends_at, event.detail_type, (_instance(event),))


def _health(event: _Event) -> Announcement | CalledOff | Nothing:
    """Retirement and maintenance of instances; those of other services need nothing."""
    code, detail = _text(event.detail, "eventTypeCode"), event.detail
    is_ours = code.startswith("AWS_EC2_") and any(
        word in code for word in ("RETIREMENT", "MAINTENANCE", "REBOOT", "STOP")
    )
    if not is_ours:
        return Nothing()
    affected: Iterable[Any] = detail.get("affectedEntities") or ()
    named = [str(one["entityValue"]) for one in affected if isinstance(one, Mapping) and "entityValue" in one]
    machines = tuple(sorted({name for name in named if name.startswith("i-")} or _from_arns(event.resources)))
    if detail.get("statusCode") == "closed":
        return CalledOff(scheduled_kind(code), event.time, machines)
    ends_at = _time(detail, "startTime") if detail.get("startTime") else None
    return Announcement(event.id, scheduled_kind(code), event.time, ends_at, code, machines)


def _instance(event: _Event) -> str:
    found = event.detail.get("instance-id") or next(iter(sorted(_from_arns(event.resources))), "")
    if not isinstance(found, str) or not found.startswith("i-"):
        raise UnreadableNotice(f"{event.detail_type}: it names no instance")
    return found


def _from_arns(arns: Iterable[str]) -> set[str]:
    return {arn.rpartition("/")[2] for arn in arns if "/i-" in arn} | {arn for arn in arns if arn.startswith("i-")}


def _text(detail: Mapping[str, Any], name: str) -> str:
    value = detail.get(name)
    if not isinstance(value, str) or not value:
        raise UnreadableNotice(f"its detail has no {name}")
    return value[:TEXT_MOST]


def _time(detail: Mapping[str, Any], name: str) -> datetime:
    """ISO 8601, as EC2 writes it, or RFC 1123, as Health does."""
    stated = _text(detail, name)
    try:
        moment = datetime.fromisoformat(stated)
    except ValueError:
        try:
            moment = parsedate_to_datetime(stated)
        except ValueError as error:
            raise UnreadableNotice(f"its {name} is {stated[:80]!r}, which is no time") from error
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
