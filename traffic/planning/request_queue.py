"""Decides what a message of a queue of requests is: which request it asks for, or why it is none. Also which queues may
be declared, and how many messages there is room for. Pure.

A message is written by whoever may send to the queue. It says what it wants done, and never whose it is.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from kernel.decoding import decode_json
from kernel.tones import Tone

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
