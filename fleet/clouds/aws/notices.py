"""Reads the queues of cloud notices, and parses the EventBridge messages in them. Parsing is pure: text in, meaning
out. Both documented spellings of the Capacity Block event are accepted. A message can only announce that a machine
ends: a wrong one costs a replacement, and a lost one is found by polling."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any

import msgspec

from fleet.clouds.aws import calls
from fleet.reconcile.planning.states import NoticeKind

AT_ONCE = 10
WAIT_S = 1
"""A long poll asks all servers of the queue. Short, because the region's other steps wait for it."""


@dataclass(frozen=True, slots=True)
class Message:
    """`handle` deletes the message until its visibility time-out. `attributes`: those with a text, by name."""

    id: str
    handle: str
    body: str
    attributes: Mapping[str, str] = field(default_factory=dict)
    sent_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class QueueFacts:
    """`waiting`: about how many messages can be received. `has_dead_letters`: repeatedly received messages move to
    another queue."""

    waiting: int
    has_dead_letters: bool


def messages_receive(
    region: str, url: str, *, most: int = AT_ONCE, wait_s: int | None = None, visibility_s: int | None = None
) -> tuple[Message, ...]:
    """Receives up to `most` messages (ten at most). `visibility_s`: for how long other readers do not see them; the
    queue's own time if left out. Raises CallFailed if none was received."""
    asked: dict[str, Any] = {} if visibility_s is None else {"VisibilityTimeout": visibility_s}
    answer = calls.call(
        "sqs",
        "ReceiveMessage",
        region,
        QueueUrl=url,
        MaxNumberOfMessages=most,
        WaitTimeSeconds=WAIT_S if wait_s is None else wait_s,
        MessageAttributeNames=["All"],
        MessageSystemAttributeNames=["SentTimestamp"],
        **asked,
    )
    return tuple(_message_of(one) for one in answer.get("Messages", ()))


def _message_of(one: Mapping[str, Any]) -> Message:
    attributes = one.get("MessageAttributes") or {}
    texts = {name: value["StringValue"] for name, value in attributes.items() if "StringValue" in value}
    sent_ms = (one.get("Attributes") or {}).get("SentTimestamp")
    sent_at = datetime.fromtimestamp(int(sent_ms) / 1000, UTC) if sent_ms else None
    return Message(one["MessageId"], one["ReceiptHandle"], one["Body"], texts, sent_at)


def messages_delete(region: str, url: str, messages: Sequence[Message]) -> None:
    """Deletes messages. One that could not be deleted is received again, and is recognised then. Raises CallFailed if
    none was deleted, or the outcome is unknown."""
    if messages:
        entries = [{"Id": str(index), "ReceiptHandle": one.handle} for index, one in enumerate(messages)]
        calls.call("sqs", "DeleteMessageBatch", region, QueueUrl=url, Entries=entries)


def queue_facts(region: str, url: str) -> QueueFacts:
    """Reads a queue's attributes. Raises CallFailed if they were not read."""
    names = ["ApproximateNumberOfMessages", "RedrivePolicy"]
    attributes = calls.call("sqs", "GetQueueAttributes", region, QueueUrl=url, AttributeNames=names).get(
        "Attributes", {}
    )
    return QueueFacts(int(attributes.get("ApproximateNumberOfMessages", 0)), bool(attributes.get("RedrivePolicy")))


def object_read(region: str, bucket: str, key: str, *, owner: str, most: int, limit_s: float) -> bytes:
    """Reads an object of at most `most` bytes. The bucket must belong to the account `owner`, because bucket names can
    be taken by any account. Raises CallFailed if it was not read, or not within `limit_s`. Raises TooLong if it has
    more bytes."""
    answer = calls.call("s3", "GetObject", region, Bucket=bucket, Key=key, ExpectedBucketOwner=owner)
    return calls.body_read(answer["Body"], most=most, limit_s=limit_s)


INTERRUPTED_AFTER = timedelta(seconds=120)
"""Time between EC2's warning and the end of the machine."""
BLOCK_MACHINES_END_BEFORE = timedelta(minutes=30)
"""EC2 starts to terminate the machines of a Capacity Block this long before its end."""
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
    """Not a known announcement; the text says why."""


class _Event(msgspec.Struct, frozen=True, rename={"detail_type": "detail-type"}):
    id: str
    detail_type: str
    time: datetime
    detail: dict[str, Any]
    resources: list[str] = []


@dataclass(frozen=True, slots=True)
class Announcement:
    """`machines`: instance IDs, or all machines of `reservation`. `event_id` is the same in every copy."""

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
    """An announced event was carried out or withdrawn."""

    kind: NoticeKind
    at: datetime
    machines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Nothing:
    pass


def parse(body: str) -> Announcement | StateSeen | CalledOff | Nothing:
    """Returns the meaning of a message. Raises UnreadableNotice if it has none."""
    try:
        event = msgspec.json.decode(body, type=_Event)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise UnreadableNotice(f"not an EventBridge event: {error}") from error
    if event.time.tzinfo is None:
        raise UnreadableNotice("its time has no time zone")
    kind = event.detail_type
    if kind in INTERRUPTIONS:
        return _about_one(event, NoticeKind.INTERRUPTION, event.time + INTERRUPTED_AFTER)
    if kind == REBALANCE:
        return _about_one(event, NoticeKind.REBALANCE, None)
    if kind == STATE_CHANGE:
        return StateSeen(_instance_id(event), _detail_text(event.detail, "state"))
    if kind in BLOCK_ENDS:
        ends_at = _detail_time(event.detail, "end-date") - BLOCK_MACHINES_END_BEFORE
        reservation = _detail_text(event.detail, "capacity-reservation-id")
        return Announcement(event.id, NoticeKind.BLOCK_END, event.time, ends_at, kind, reservation=reservation)
    if kind == HEALTH:
        return _health_notice(event)
    raise UnreadableNotice(f"its detail-type is {kind[:80]!r}, which no rule of this install sends")


def block_end(end_date: datetime) -> datetime:
    """Returns when EC2 terminates the machines of a Capacity Block with this end."""
    return end_date - BLOCK_MACHINES_END_BEFORE


def scheduled_kind(code: str) -> NoticeKind:
    """Returns the kind of notice for a scheduled event's code or a Health event's type."""
    ends = any(word in code.lower() for word in ("retire", "stop"))
    return NoticeKind.RETIREMENT if ends else NoticeKind.MAINTENANCE


def _about_one(event: _Event, kind: NoticeKind, ends_at: datetime | None) -> Announcement:
    return Announcement(event.id, kind, event.time, ends_at, event.detail_type, (_instance_id(event),))


def _health_notice(event: _Event) -> Announcement | CalledOff | Nothing:
    """Retirement and maintenance of instances; events of other services are ignored."""
    code, detail = _detail_text(event.detail, "eventTypeCode"), event.detail
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
    ends_at = _detail_time(detail, "startTime") if detail.get("startTime") else None
    return Announcement(event.id, scheduled_kind(code), event.time, ends_at, code, machines)


def _instance_id(event: _Event) -> str:
    found = event.detail.get("instance-id") or next(iter(sorted(_from_arns(event.resources))), "")
    if not isinstance(found, str) or not found.startswith("i-"):
        raise UnreadableNotice(f"{event.detail_type}: it names no instance")
    return found


def _from_arns(arns: Iterable[str]) -> set[str]:
    return {arn.rpartition("/")[2] for arn in arns if "/i-" in arn} | {arn for arn in arns if arn.startswith("i-")}


def _detail_text(detail: Mapping[str, Any], name: str) -> str:
    value = detail.get(name)
    if not isinstance(value, str) or not value:
        raise UnreadableNotice(f"its detail has no {name}")
    return value[:TEXT_MOST]


def _detail_time(detail: Mapping[str, Any], name: str) -> datetime:
    """ISO 8601, as EC2 writes it, or RFC 1123, as Health does."""
    stated = _detail_text(detail, name)
    try:
        moment = datetime.fromisoformat(stated)
    except ValueError:
        try:
            moment = parsedate_to_datetime(stated)
        except ValueError as error:
            raise UnreadableNotice(f"its {name} is {stated[:80]!r}, which is not a time") from error
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
