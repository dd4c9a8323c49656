"""Decides the life of a near-real-time request: its time limit, the meaning of an answer, and when to retry. Also
parses messages of request queues and decides which queues may be declared and how many messages to receive. Pure. A
request ends once, in one of four states; until then it is retried as long as that can help. A message decides what is
requested, never on whose behalf."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

import msgspec

from kernel.decoding import decode_json


class AsyncState(StrEnum):
    """`sending`: leased by a sender."""

    QUEUED = "queued"
    SENDING = "sending"
    DONE = "done"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


OPEN = frozenset({AsyncState.QUEUED, AsyncState.SENDING})
ENDED = frozenset(AsyncState) - OPEN
ERROR_CODES = {
    AsyncState.FAILED: "failed",
    AsyncState.EXPIRED: "deadline_exceeded",
    AsyncState.CANCELLED: "cancelled",
}


@dataclass(frozen=True, slots=True)
class AsyncSettings:
    """Limits of near-real-time requests. Seconds unless the name says otherwise."""

    default_limit_s: float = 900.0
    """The SLO of near-real-time work is in minutes (docs/design/applications.md#serving-classes)."""
    longest_limit_s: float = 86_400.0
    kept_s: float = 86_400.0
    """How long an outcome can be fetched after its end."""
    unpublished_kept_s: float = 604_800.0
    """The same for one that its results topic has not taken: a week."""
    max_body_bytes: int = 1024 * 1024
    """About 250,000 tokens of text."""
    max_answer_bytes: int = 4 * 1024 * 1024
    inline_bytes: int = 2048
    """Longer bodies and answers are stored outside PostgreSQL (docs/bench/near_realtime.md)."""
    max_open_per_tenant: int = 20_000
    max_sending_per_tenant: int = 128
    """Over all senders; a lower concurrency limit of the key applies."""
    max_sending: int = 256
    """Of one sender: a quarter of a GiB if all bodies are as long as allowed."""
    lease_s: float = 15.0
    """Detects a dead sender after this time; a live one renews three times within it."""
    renew_every_s: float = 3.0
    poll_s: float = 0.25
    """Poll interval for new and cancelled requests."""
    settle_pause_s: float = 0.05
    """Outcomes within this time are recorded in one statement."""
    settle_at_once: int = 64
    quiet_after_s: float = 60.0
    quiet_poll_s: float = 1.0
    """Poll interval after `quiet_after_s` without a request."""
    first_retry_s: float = 0.5
    longest_retry_s: float = 30.0
    max_failures: int = 5
    """Attempts that an engine may have started without finishing; this keeps one request from killing every engine."""


class AttemptResponse(msgspec.Struct, frozen=True):
    """Result of an attempt. `status` None: no answer. `sent` False: no engine can have started it. `retry_after_s` is
    the responder's value; `reason` says why there is no answer."""

    status: int | None
    body: bytes = b""
    sent: bool = True
    retry_after_s: float | None = None
    reason: str = ""


class Verdict(msgspec.Struct, frozen=True):
    """Meaning of an attempt. With state QUEUED it is retried at `due_at`; otherwise it ends in this state."""

    state: AsyncState
    reason: str = ""
    due_at: datetime | None = None
    counts: bool = False


_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])
"""Reads an object without its values, in a tenth of the time. It does not check that texts are UTF-8."""
UNSENT = frozenset({401, 408, 409, 425, 429, 503})
"""No engine started it: the ingress does not know the key yet, a timeout before the engine, or overload."""
MOVED = 300


def evaluate_attempt(received: AttemptResponse, *, attempts: int, failures: int, deadline_at: datetime, now: datetime,
          settings: AsyncSettings) -> Verdict:  # fmt: skip
    """Returns the meaning of the `attempts`th attempt after `failures` that counted."""
    if is_complete_answer(received):
        return Verdict(AsyncState.DONE)
    reason = received.reason or _error_text(received)
    if now >= deadline_at:
        return Verdict(AsyncState.EXPIRED, f"the deadline passed; the last attempt: {reason}")
    if received.status is not None and MOVED <= received.status < 500 and received.status not in UNSENT:
        return Verdict(AsyncState.FAILED, reason)
    counts = received.sent and received.status not in UNSENT
    if counts and failures + 1 >= settings.max_failures:
        return Verdict(AsyncState.FAILED, f"{failures + 1} attempts failed; the last: {reason}", counts=True)
    wait_s = max(retry_after_s(attempts, settings), min(received.retry_after_s or 0.0, settings.longest_retry_s))
    return Verdict(AsyncState.QUEUED, reason, now + timedelta(seconds=wait_s), counts)


def is_complete_answer(received: AttemptResponse) -> bool:
    """Whether this is an engine's complete answer. Truncated or invalid JSON is not, nor is JSON too deep to read."""
    if received.status is None or not 200 <= received.status < MOVED:
        return False
    try:
        _MEMBERS.decode(received.body)
        if received.body.isascii():
            return True
    except (msgspec.MsgspecError, RecursionError):
        pass  # it may have NaN, which engines answer
    try:
        return isinstance(json.loads(received.body), dict)
    except (ValueError, RecursionError):
        return False


def retry_after_s(attempts: int, settings: AsyncSettings) -> float:
    return float(min(settings.first_retry_s * 2.0 ** min(attempts - 1, 20), settings.longest_retry_s))


def limit_of(asked_ms: str | None, settings: AsyncSettings) -> float:
    """Returns the time limit in seconds that a request's header asks for. Raises ValueError unless it is a whole number
    of milliseconds in range; the text says what is valid."""
    if asked_ms is None:
        return settings.default_limit_s
    longest_ms = round(settings.longest_limit_s * 1000)
    if not asked_ms.isascii() or not asked_ms.isdecimal() or not 0 < int(asked_ms[:12]) <= longest_ms:
        raise ValueError(f"must be a whole number of milliseconds from 1 to {longest_ms}, not {asked_ms[:40]!r}")
    return int(asked_ms) / 1000


class Window:
    """Requests in flight to one model in one region: twice as many per round until the first overload, then one more;
    half as many on overload (slow start and additive increase, multiplicative decrease; RFC 5681)."""

    FIRST = 8.0
    MOST = 256.0

    def __init__(self) -> None:
        self._size = self.FIRST
        self._is_slow_start = True
        self.sending = 0

    @property
    def room(self) -> int:
        """How many more may be sent."""
        return max(0, int(self._size) - self.sending)

    def ended(self, received: AttemptResponse) -> None:
        """Records the end of one sent request."""
        is_used = self.sending * 2 >= int(self._size)
        self.sending -= 1
        if received.status in {429, 503}:
            self._size = max(1.0, self._size / 2)
            self._is_slow_start = False
        elif received.status is not None and received.status < MOVED and is_used:
            self._size = min(self.MOST, self._size + (1.0 if self._is_slow_start else 1 / self._size))


def _error_text(received: AttemptResponse) -> str:
    try:
        message = str(json.loads(received.body)["error"]["message"])
    except (ValueError, KeyError, TypeError, RecursionError):
        message = received.body[:200].decode("utf-8", "replace")
    return f"answered {received.status}" + (f": {message[:500]}" if message else "")


NAME_LETTERS = 31
"""Length of a queue's own name; its bucket has the same name, which S3 limits to 63 letters."""
MOST_QUEUES = 16
"""Per installation: each queue takes a long poll and up to ten messages of 1 MiB in memory."""
RECEIVED_AT_ONCE = 10
HANDLE_S = 30.0
"""Time to process the messages of one receive; the others are received again."""
VISIBILITY_S = 6 * round(HANDLE_S)
"""SQS hides received messages for this time: six times the limit, as AWS advises."""
UNREAD_AFTER_S = 60.0
"""An incident opens if a queue could not be read for this long."""
LONGEST_PAUSE_S = 60.0
REASON_LETTERS = 500
KEY_LETTERS = 1024
"""Limit of S3."""
ENDPOINTS = ("/v1/chat/completions", "/v1/completions")
POINTERS = frozenset(
    {
        "software.amazon.payloadoffloading.PayloadS3Pointer",
        "com.amazon.sqs.javamessaging.MessageS3Pointer",  # of the library's first major version
    }
)
"""Marker of Amazon's Extended Client Library for a body in S3."""

_HOST = re.compile(r"https://sqs\.([a-z]{2}(?:-[a-z0-9]{1,12}){1,3}-[0-9])\.amazonaws\.com(?:\.cn)?")
_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?")


class QueueState(StrEnum):
    """`new`: not read yet. `full`: no room for more requests. `stopped`: its key is not valid. `unread`: AWS or a
    broker denies access or does not respond."""

    NEW = "new"
    READING = "reading"
    FULL = "full"
    STOPPED = "stopped"
    UNREAD = "unread"


class InvalidMessage(ValueError):
    """A message without a valid request; the text says what is wrong and what is valid."""


@dataclass(frozen=True, slots=True)
class QueueAddress:
    """Location of a queue. `name` is also the name of the only bucket that its messages may refer to."""

    url: str
    region: str
    account: str
    name: str


@dataclass(frozen=True, slots=True)
class MessageRequest:
    """A message's request without its body. None means unstated."""

    path: str
    idempotency_key: str
    limit_ms: str | None = None
    callback_url: str | None = None
    sink: str | None = None


def queue_address(url: str, install: str) -> QueueAddress:
    """Parses a queue URL as `deploy/aws/requests.yaml` creates it for this installation. Raises ValueError for any
    other queue: the control plane may not read those, and its queue of notices is not for clients."""
    host, account, name = [*url.rsplit("/", 2), "", ""][:3]
    found = _HOST.fullmatch(host)
    if found is None or not (account.isascii() and account.isdecimal() and len(account) == 12):
        raise ValueError(f"{url[:200]!r} is not a queue URL: use https://sqs.REGION.amazonaws.com/ACCOUNT/NAME")
    prefix = f"{install}-requests-"
    own = name.removeprefix(prefix)
    if own == name or len(own) > NAME_LETTERS or not _NAME.fullmatch(own):
        ours = f"{prefix}NAME, with at most {NAME_LETTERS} lower-case letters, digits and hyphens in NAME"
        raise ValueError(f"{name[:100]!r} is not a request queue of this installation: their names are {ours}")
    return QueueAddress(url, found[1], account, name)


def parse_attributes(message_id: str, attributes: Mapping[str, str]) -> MessageRequest:
    """Reads a message's attributes: the endpoint's headers and path. Others are ignored. Raises InvalidMessage if an
    attribute is repeated, names a key, or is an unknown endpoint."""
    fields: dict[str, str] = {}
    for name, value in attributes.items():
        if name.casefold() in fields:
            raise InvalidMessage(f"the attribute {name[:100]} is given twice, in two spellings")
        fields[name.casefold()] = value
    if "authorization" in fields:
        raise InvalidMessage("a message cannot name a key: the queue is bound to one")
    path = fields.get("endpoint", ENDPOINTS[0])
    if path not in ENDPOINTS:
        raise InvalidMessage(f"the attribute Endpoint is {path[:100]!r}; known: {' and '.join(ENDPOINTS)}")
    if "idempotency-key" in fields and not fields["idempotency-key"]:
        raise InvalidMessage("the attribute Idempotency-Key is empty; omit it to use the message ID")
    return MessageRequest(
        path=path,
        idempotency_key=fields.get("idempotency-key", message_id),
        limit_ms=fields.get("x-switchyard-deadline-ms"),
        callback_url=fields.get("x-switchyard-callback-url"),
        sink=fields.get("x-switchyard-sink"),
    )


def body_object_key(body: str, queue: QueueAddress) -> str | None:
    """Returns the key of the object with the request, in the queue's own bucket; None if the message has the request.
    Raises InvalidMessage if the pointer is invalid or names another bucket."""
    if not body.lstrip(" \t\r\n").startswith("["):
        return None  # a request is an object
    try:
        kind, pointer = decode_json(body)
        kinds_and_names = isinstance(kind, str) and kind in POINTERS and set(pointer) == {"s3BucketName", "s3Key"}
        bucket, key = (pointer["s3BucketName"], pointer["s3Key"]) if kinds_and_names else ("", "")
    except (ValueError, TypeError) as error:
        raise InvalidMessage(_NO_POINTER) from error
    if not isinstance(key, str) or not 0 < len(key) <= KEY_LETTERS or not key.isprintable():
        raise InvalidMessage(_NO_POINTER)
    if bucket != queue.name:
        raise InvalidMessage(
            f"the message points to the bucket {str(bucket)[:100]!r}; this queue's bodies must be in {queue.name}"
        )
    return key


_NO_POINTER = (
    "the body must be a JSON object, or a pointer of the SQS Extended Client Library: "
    '["software.amazon.payloadoffloading.PayloadS3Pointer", {"s3BucketName": "...", "s3Key": "..."}]'
)


def is_temporary(status: int) -> bool:
    """Whether a refusal with this HTTP status is temporary: too many requests wait, or no region serves."""
    return status in {429, 503}


def room(*, waiting: int, most_waiting: int, last_minute: int, per_minute: int, most: int = RECEIVED_AT_ONCE) -> int:
    """Returns how many messages may be received now. Messages that could not be accepted are not received, because each
    receive brings them nearer to the dead-letter queue. `per_minute` 0 means no limit."""
    left = most_waiting - waiting
    if per_minute:
        left = min(left, per_minute - last_minute)
    return max(0, min(most, left))


def pause_s(failures: int) -> float:
    return min(2.0 ** min(failures - 1, 20), LONGEST_PAUSE_S)


def is_unread(read_at: datetime | None, declared_at: datetime, now: datetime) -> bool:
    """Whether the queue has been unread for so long that an incident must open."""
    return (now - (read_at or declared_at)).total_seconds() > UNREAD_AFTER_S


def reason_text(text: str) -> str:
    """Limits untrusted text to a form that can be stored and shown."""
    whole = text.encode("utf-8", "replace").decode().replace("\0", "\ufffd")
    return whole if len(whole) <= REASON_LETTERS else f"{whole[:REASON_LETTERS]}…"
