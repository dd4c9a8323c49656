"""Sinks of batches: addresses, names of keys and objects, retries, and what a line becomes. Pure."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit

from kernel.outbound import Target
from kernel.tones import Tone
from traffic.async_requests.planner import AttemptResponse
from traffic.batches.planning.lines import outcome_of

KEY_NAMES = ("custom_id", "batch", "tenant")
OBJECT_NAMES = ("batch", "tenant", "date")
SCHEMES = {"valkey": "http", "redis": "http", "valkeys": "https", "rediss": "https"}
"""Scheme of a URL -> the scheme by which `kernel.outbound` confines it: public addresses need TLS."""
MAX_KEY_BYTES = 1024
MOST_DATABASE = 15


class SinkKind(StrEnum):
    S3 = "s3"
    VALKEY = "valkey"


class SinkValue(StrEnum):
    """What is stored: the body of the answer, or the whole line of the output file."""

    BODY = "body"
    LINE = "line"


class DeliveryState(StrEnum):
    PENDING = "pending"
    DELIVERED = "delivered"
    FAILED = "failed"
    SKIPPED = "skipped"


DELIVERY_TONE: Mapping[DeliveryState, Tone] = {
    DeliveryState.PENDING: Tone.MOVING,
    DeliveryState.DELIVERED: Tone.OK,
    DeliveryState.FAILED: Tone.BAD,
    DeliveryState.SKIPPED: Tone.IDLE,
}


@dataclass(frozen=True, slots=True)
class SinkSettings:
    """Seconds unless the name says otherwise."""

    poll_s: float = 1.0
    quiet_poll_s: float = 5.0
    quiet_after_s: float = 60.0
    renew_every_s: float = 5.0
    lease_s: float = 60.0
    """A live process extends it with every chunk, which takes at most two timeouts."""
    at_once: int = 4
    """Deliveries of a process."""
    per_batch_most: int = 5
    """Sinks of a batch."""
    group_s: float = 2.0
    """Ended near-real-time requests wait so long for others, because a group is a row."""
    object_group_s: float = 10.0
    """The same for S3, because a group is an object."""
    group_most: int = 20_000
    """Requests of a group; so many do not wait."""
    groups_kept_s: float = 172_800.0
    """A day longer than their requests."""
    chunk_lines: int = 500
    chunk_bytes: int = 1024 * 1024
    """Of a pipeline to Valkey."""
    timeout_s: float = 10.0
    """Of a connection, and of a pipeline."""
    first_retry_s: float = 1.0
    longest_retry_s: float = 300.0
    attempts_most: int = 15
    """In a row without progress: about an hour."""
    dead_shown: int = 100
    """Dead letters that a delivery lists."""
    dead_most: int = 1000
    """After so many dead letters the delivery fails."""


def retry_wait_s(attempts: int, settings: SinkSettings) -> float | None:
    """Returns the wait after this number of failed attempts in a row; None if there is no further one."""
    if attempts >= settings.attempts_most:
        return None
    return float(min(settings.longest_retry_s, settings.first_retry_s * 2 ** (attempts - 1)))


class BadSinkUrl(ValueError):
    """The text says which address is valid."""


@dataclass(frozen=True, slots=True)
class ValkeyAddress:
    host: str
    port: int
    database: int
    tls: bool

    @property
    def target(self) -> Target:
        """For `kernel.outbound`: public addresses need TLS, others a network that is allowed."""
        return Target("https" if self.tls else "http", self.host, self.port, "/")


def parse_valkey_url(url: str) -> ValkeyAddress:
    """Parses `valkey://host:port/database`. Raises BadSinkUrl if it is invalid, or has a user or password."""
    form = "must be valkey://HOST:PORT/DATABASE, or valkeys:// for TLS"
    if any(ord(letter) <= 0x20 or ord(letter) >= 0x7F for letter in url):
        raise BadSinkUrl("must be ASCII without spaces")
    try:
        parts = urlsplit(url)
        port = parts.port or 6379
    except ValueError as error:
        raise BadSinkUrl(f"{form}: {error}") from error
    if parts.scheme not in SCHEMES or not parts.hostname:
        raise BadSinkUrl(form)
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise BadSinkUrl("has no user, password or parameters: they are separate fields")
    database = parts.path.strip("/") or "0"
    if not re.fullmatch(r"[0-9]{1,2}", database) or int(database) > MOST_DATABASE:
        raise BadSinkUrl(f"{form}; the database is 0 to {MOST_DATABASE}")
    return ValkeyAddress(parts.hostname, port, int(database), SCHEMES[parts.scheme] == "https")


class DeadLetter(ValueError):
    """A line that no attempt can deliver; the text says why."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A line as key and value."""

    custom_id: str
    key: bytes
    value: bytes


def entry_of(text: bytes, template: str, value: SinkValue, names: Mapping[str, str]) -> Entry:
    """Returns the entry of a line of an output or error file. Raises DeadLetter if its key is too long, or the line is
    damaged."""
    try:
        line = json.loads(text)
        custom_id = str(line["custom_id"])
    except (ValueError, KeyError, TypeError) as error:
        raise DeadLetter(f"the line is damaged: {error}") from error
    key = template
    for name, known in names.items():
        key = key.replace(f"{{{name}}}", known)
    encoded = key.replace("{custom_id}", custom_id).encode("utf-8", "surrogatepass")
    if len(encoded) > MAX_KEY_BYTES:
        raise DeadLetter(f"its key would have {len(encoded)} bytes; {MAX_KEY_BYTES} are possible")
    return Entry(custom_id, encoded, _value_of(line, value, text))


def _value_of(line: Mapping[str, Any], value: SinkValue, text: bytes) -> bytes:
    if value is SinkValue.LINE:
        return text
    response = line.get("response")
    body = response["body"] if response else {"error": line.get("error")}
    return json.dumps(body, separators=(",", ":")).encode()


def request_line(request_id: str, custom_id: str, received: AttemptResponse, code: str) -> bytes:
    """Returns a near-real-time request as a line of a batch's results. `code` says why it has no answer."""
    if received.status is not None and received.body:
        return outcome_of(0, request_id, custom_id, received).text + b"\n"
    error = {"code": code, "message": received.reason}
    line = {"id": request_id, "custom_id": custom_id, "response": None, "error": error}
    return json.dumps(line, separators=(",", ":")).encode() + b"\n"


def part_name(*, in_errors: bool, number: int) -> str:
    """Returns the name of an object. Parts are cut in the same way at each attempt, so they have the same lines."""
    return f"{'errors' if in_errors else 'output'}-{number:05d}.jsonl"


Node = tuple[str, int]
"""Host and port of a server of a cluster."""
CLUSTER_SLOTS = 16384


def slots_of(answer: Any, asked: Node) -> dict[int, Node]:
    """Returns the node of each slot in an answer to `CLUSTER SLOTS`. Raises TypeError or ValueError if it is no such
    answer."""
    slots: dict[int, Node] = {}
    for first, last, (host, port, *_), *_ in answer:
        if not 0 <= first <= last < CLUSTER_SLOTS:
            raise ValueError(f"slots {first} to {last}")
        slots |= dict.fromkeys(range(first, last + 1), named_node(host, port, asked))
    return slots


def named_node(host: Any, port: Any, asked: Node) -> Node:
    """Returns the node that an answer names. Without a host it is at that of the node that was asked."""
    name = host.decode() if isinstance(host, bytes) else str(host or "")
    return (name if name not in {"", "?"} else asked[0], int(port))
