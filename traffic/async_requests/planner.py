"""Decides the life of a near-real-time request: how long it may take, what an answer to it means, when it is tried
again. Pure. A request ends once, in exactly one of four ways; until then it is tried again as long as that can help.

Decides what a message of a queue of requests is: which request it asks for, or why it is none. Also which queues may
be declared, and how many messages there is room for. Pure.

A message is written by whoever may send to the queue. It says what it wants done, and never whose it is.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from kernel.decoding import decode_json
from kernel.tones import Tone


class AsyncState(StrEnum):
    """`sending`: a sender has it, until its lease ends."""

    QUEUED = "queued"
    SENDING = "sending"
    DONE = "done"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


OPEN = frozenset({AsyncState.QUEUED, AsyncState.SENDING})
ENDED = frozenset(AsyncState) - OPEN
ASYNC_TONE: dict[AsyncState, Tone] = {
    AsyncState.QUEUED: Tone.IDLE,
    AsyncState.SENDING: Tone.MOVING,
    AsyncState.DONE: Tone.OK,
    AsyncState.FAILED: Tone.BAD,
    AsyncState.EXPIRED: Tone.WARN,
    AsyncState.CANCELLED: Tone.IDLE,
}


@dataclass(frozen=True, slots=True)
class AsyncSettings:
    """Every bound of near-real-time requests. Seconds unless the name says otherwise."""

    default_limit_s: float = 900.0
    """Near-real-time work has its SLO in minutes (docs/design/applications.md#serving-classes)."""
    longest_limit_s: float = 86_400.0
    kept_s: float = 86_400.0
    """How long an outcome can be fetched, from its end."""
    max_body_bytes: int = 1024 * 1024
    """Some 250,000 tokens of text."""
    max_answer_bytes: int = 4 * 1024 * 1024
    max_open_per_tenant: int = 1000
    max_sending_per_tenant: int = 16
    """By all senders together; a key's own limit of concurrency counts where it is lower."""
    max_sending: int = 64
    lease_s: float = 15.0
    """A sender that died is noticed after this; a living one renews three times meanwhile."""
    renew_every_s: float = 3.0
    poll_s: float = 0.25
    """How soon a sender sees what is new or was cancelled."""
    quiet_after_s: float = 60.0
    quiet_poll_s: float = 1.0
    """How soon a sender sees the first request, once there has been none for `quiet_after_s`."""
    first_retry_s: float = 0.5
    longest_retry_s: float = 30.0
    max_failures: int = 5
    """Attempts that an engine may have begun and not finished; a request that kills engines must not kill them all."""


@dataclass(frozen=True, slots=True)
class AttemptResponse:
    """What an attempt brought. `status` None: no answer; `sent` False: no engine can have begun it.

    `retry_after_s`: when to come back, by the one who answered. `reason`: why there is no answer.
    """

    status: int | None
    body: bytes = b""
    sent: bool = True
    retry_after_s: float | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What an attempt means. `state` QUEUED: try again at `due_at`; else it is how the request ends."""

    state: AsyncState
    reason: str = ""
    due_at: datetime | None = None
    counts: bool = False


UNSENT = frozenset({401, 408, 409, 425, 429, 503})
"""Nobody began it: a key that the ingress has not heard of yet, a time-out on the way in, too much at once."""
MOVED = 300


def judge(received: AttemptResponse, *, attempts: int, failures: int, deadline_at: datetime, now: datetime,
          settings: AsyncSettings) -> Verdict:  # fmt: skip
    """What an attempt means: the `attempts`th, after `failures` that counted."""
    if is_complete_answer(received):
        return Verdict(AsyncState.DONE)
    reason = received.reason or _said(received)
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
    """Whether this is an engine's whole answer. One that is cut short, or no JSON, is none."""
    if received.status is None or not 200 <= received.status < MOVED:
        return False
    try:
        return isinstance(json.loads(received.body), dict)
    except ValueError:
        return False


def retry_after_s(attempts: int, settings: AsyncSettings) -> float:
    """Seconds until the next attempt after so many."""
    return float(min(settings.first_retry_s * 2.0 ** min(attempts - 1, 20), settings.longest_retry_s))


def limit_of(asked_ms: str | None, settings: AsyncSettings) -> float:
    """Seconds that a request may take, of what its header says.

    Raises:
        ValueError: no whole number of milliseconds, or out of range; the text says what would be right.
    """
    if asked_ms is None:
        return settings.default_limit_s
    longest_ms = round(settings.longest_limit_s * 1000)
    if not asked_ms.isascii() or not asked_ms.isdecimal() or not 0 < int(asked_ms[:12]) <= longest_ms:
        raise ValueError(f"must be milliseconds from now, a whole number from 1 to {longest_ms}, not {asked_ms[:40]!r}")
    return int(asked_ms) / 1000


class Window:
    """How many requests for one model one region is asked to answer at once: one more for each that it answers, half as
    many when it says that it has too much (additive increase, multiplicative decrease; RFC 5681)."""

    FIRST = 8.0
    MOST = 64.0

    def __init__(self) -> None:
        self._size = self.FIRST
        self.sending = 0

    @property
    def is_full(self) -> bool:
        return self.sending >= int(self._size)

    def ended(self, received: AttemptResponse) -> None:
        """One of those that were sent has ended."""
        self.sending -= 1
        if received.status in {429, 503}:
            self._size = max(1.0, self._size / 2)
        elif received.status is not None and received.status < MOVED:
            self._size = min(self.MOST, self._size + 1 / self._size)


def _said(received: AttemptResponse) -> str:
    """What an error answer says, in short."""
    try:
        message = str(json.loads(received.body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = received.body[:200].decode("utf-8", "replace")
    return f"answered {received.status}" + (f": {message[:500]}" if message else "")


NAME_LETTERS = 31
"""Of a queue's own name: its bucket is called as the queue is, in 63 letters at most."""
MOST_QUEUES = 16
"""Of an install: each is a long poll, and up to ten messages of 1 MiB in memory."""
RECEIVED_AT_ONCE = 10
HANDLE_S = 30.0
"""Within this the messages of one receive are taken; what is not begun by then comes again."""
VISIBILITY_S = 6 * round(HANDLE_S)
"""How long they are hidden from others meanwhile. Six times the limit, as AWS advises for its own consumers."""
UNREAD_AFTER_S = 60.0
"""A queue that nobody could read for this long is an incident."""
LONGEST_PAUSE_S = 60.0
REASON_LETTERS = 500
KEY_LETTERS = 1024
"""Of S3."""
ENDPOINTS = ("/v1/chat/completions", "/v1/completions")
POINTERS = frozenset(
    {
        "software.amazon.payloadoffloading.PayloadS3Pointer",
        "com.amazon.sqs.javamessaging.MessageS3Pointer",  # of the library's first major version
    }
)
"""How Amazon's Extended Client Library says that a body is in S3."""

_HOST = re.compile(r"https://sqs\.([a-z]{2}(?:-[a-z0-9]{1,12}){1,3}-[0-9])\.amazonaws\.com(?:\.cn)?")
_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?")


class QueueState(StrEnum):
    """`new`: nobody has read it yet. `full`: there is no room for more requests now. `stopped`: its key opens nothing.
    `unread`: AWS does not let us, or does not answer."""

    NEW = "new"
    READING = "reading"
    FULL = "full"
    STOPPED = "stopped"
    UNREAD = "unread"


QUEUE_TONE: dict[QueueState, Tone] = {
    QueueState.NEW: Tone.IDLE,
    QueueState.READING: Tone.OK,
    QueueState.FULL: Tone.WARN,
    QueueState.STOPPED: Tone.BAD,
    QueueState.UNREAD: Tone.BAD,
}


class NoRequest(ValueError):
    """A message that asks for nothing that could be done; its text says what was wrong and what would be right."""


@dataclass(frozen=True, slots=True)
class QueueAddress:
    """Where a queue is. `name` is also that of the one bucket that its messages may point into."""

    url: str
    region: str
    account: str
    name: str


@dataclass(frozen=True, slots=True)
class Asked:
    """What a message asks for, less its body. None: not said."""

    path: str
    idempotency_key: str
    limit_ms: str | None = None
    callback_url: str | None = None


def queue_address(url: str, install: str) -> QueueAddress:
    """The queue of a URL, as `deploy/aws/requests.yaml` names those of this install.

    Raises:
        ValueError: it is none of those. Others the control plane may not read, and the queue of notices is no client's.
    """
    host, account, name = [*url.rsplit("/", 2), "", ""][:3]
    found = _HOST.fullmatch(host)
    if found is None or not (account.isascii() and account.isdecimal() and len(account) == 12):
        raise ValueError(f"{url[:200]!r} is no queue: say https://sqs.REGION.amazonaws.com/ACCOUNT/NAME")
    prefix = f"{install}-requests-"
    own = name.removeprefix(prefix)
    if own == name or len(own) > NAME_LETTERS or not _NAME.fullmatch(own):
        ours = f"{prefix}NAME, with at most {NAME_LETTERS} small letters, digits and hyphens in NAME"
        raise ValueError(f"{name[:100]!r} is no queue of requests of this install: they are called {ours}")
    return QueueAddress(url, found[1], account, name)


def asked_by(message_id: str, attributes: Mapping[str, str]) -> Asked:
    """What a message's attributes say. They are the headers of the endpoint, and its path; others mean nothing.

    Raises:
        NoRequest: an attribute is given twice, names a key, or an endpoint that is none.
    """
    said: dict[str, str] = {}
    for name, value in attributes.items():
        if name.casefold() in said:
            raise NoRequest(f"the attribute {name[:100]} is given twice, in two spellings; give it once")
        said[name.casefold()] = value
    if "authorization" in said:
        raise NoRequest("a message names no key: it is sent with the key that an admin bound to the queue")
    path = said.get("endpoint", ENDPOINTS[0])
    if path not in ENDPOINTS:
        raise NoRequest(f"the attribute Endpoint is {path[:100]!r}; there are {' and '.join(ENDPOINTS)}")
    if "idempotency-key" in said and not said["idempotency-key"]:
        raise NoRequest("the attribute Idempotency-Key is empty; leave it out, and the id of the message counts")
    return Asked(
        path=path,
        idempotency_key=said.get("idempotency-key", message_id),
        limit_ms=said.get("x-switchyard-deadline-ms"),
        callback_url=said.get("x-switchyard-callback-url"),
    )


def pointed_at(body: str, queue: QueueAddress) -> str | None:
    """The key of the object that holds the request, in the queue's own bucket; None: the message itself holds it.

    Raises:
        NoRequest: it points elsewhere, or nowhere.
    """
    if not body.lstrip(" \t\r\n").startswith("["):
        return None  # a request is an object
    try:
        kind, pointer = decode_json(body)
        kinds_and_names = isinstance(kind, str) and kind in POINTERS and set(pointer) == {"s3BucketName", "s3Key"}
        bucket, key = (pointer["s3BucketName"], pointer["s3Key"]) if kinds_and_names else ("", "")
    except (ValueError, TypeError) as error:
        raise NoRequest(_NO_POINTER) from error
    if not isinstance(key, str) or not 0 < len(key) <= KEY_LETTERS or not key.isprintable():
        raise NoRequest(_NO_POINTER)
    if bucket != queue.name:
        raise NoRequest(
            f"the message points to the bucket {str(bucket)[:100]!r}; bodies of this queue lie in {queue.name}"
        )
    return key


_NO_POINTER = (
    "the body must be a JSON object, or a pointer of the SQS Extended Client Library: "
    '["software.amazon.payloadoffloading.PayloadS3Pointer", {"s3BucketName": "...", "s3Key": "..."}]'
)


def is_for_later(status: int) -> bool:
    """Whether a refusal with this HTTP status says nothing against the request: too many wait, or nothing serves."""
    return status in {429, 503}


def room(*, waiting: int, most_waiting: int, last_minute: int, per_minute: int) -> int:
    """How many messages may be received now. What could not be accepted is not received: each receive of a message
    brings it nearer to the dead letters. `per_minute` 0: no limit."""
    left = most_waiting - waiting
    if per_minute:
        left = min(left, per_minute - last_minute)
    return max(0, min(RECEIVED_AT_ONCE, left))


def pause_s(failures: int) -> float:
    """Seconds before a queue is tried again after so many failures in a row."""
    return min(2.0 ** min(failures - 1, 20), LONGEST_PAUSE_S)


def is_unread(read_at: datetime | None, declared_at: datetime, now: datetime) -> bool:
    """Whether nobody has read a queue for so long that a person must know."""
    return (now - (read_at or declared_at)).total_seconds() > UNREAD_AFTER_S


def reason_text(text: str) -> str:
    """A reason as it can be stored and shown, whatever a message had it say."""
    whole = text.encode("utf-8", "replace").decode().replace("\0", "\ufffd")
    return whole if len(whole) <= REASON_LETTERS else f"{whole[:REASON_LETTERS]}…"
