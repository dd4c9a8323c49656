"""Parses declarations and records of Kafka's request queues. Pure. A record decides what is requested, never on whose
behalf."""

import base64
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from traffic.async_requests.planner import InvalidMessage, MessageRequest, parse_attributes

TOPIC_LETTERS = 80
MOST_BROKERS = 8
RECORDS_AT_ONCE = 500
"""Records that are accepted in one transaction."""
KEY_BYTES = 1024
"""Longest record key that a result repeats."""
ORIGIN_LETTERS = 8

_BROKER = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]{0,252}[A-Za-z0-9])?|\[[0-9a-fA-F:]{2,39}\]):([0-9]{1,5})")
_TOPIC = re.compile(rf"[A-Za-z0-9._-]{{1,{TOPIC_LETTERS}}}")
_GROUP = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class QueueKind(StrEnum):
    SQS = "sqs"
    KAFKA = "kafka"


class KafkaSecurity(StrEnum):
    """The name of a protocol in Kafka's own settings."""

    PLAINTEXT = "PLAINTEXT"
    SSL = "SSL"
    SASL_PLAINTEXT = "SASL_PLAINTEXT"
    SASL_SSL = "SASL_SSL"

    @property
    def has_user(self) -> bool:
        return self.startswith("SASL")

    @property
    def has_tls(self) -> bool:
        return self.endswith("SSL")


class SaslMechanism(StrEnum):
    PLAIN = "PLAIN"
    SCRAM_SHA_256 = "SCRAM-SHA-256"
    SCRAM_SHA_512 = "SCRAM-SHA-512"


@dataclass(frozen=True, slots=True)
class TopicAddress:
    """`brokers` with commas, as Kafka's clients take them."""

    brokers: str
    topic: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicSettings:
    """An admin's statement about a topic of requests. Empty: the default or none."""

    group: str = ""
    results_topic: str = ""
    dead_letter_topic: str = ""
    security: str = ""
    mechanism: str = ""
    username: str = ""
    password: str = ""
    ca_pem: str = ""


class InvalidSetting(ValueError):
    """`field` is the declaration's; the text says what is valid."""

    def __init__(self, field: str, text: str) -> None:
        super().__init__(text)
        self.field = field


@dataclass(frozen=True, slots=True)
class Record:
    """One record of a topic. `sent_ms` is the producer's or the broker's time in Unix milliseconds, negative if
    unknown."""

    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes | None]] = ()
    sent_ms: int = -1

    @property
    def place(self) -> str:
        """Partition and offset, as refused messages show them."""
        return f"{self.partition}/{self.offset}"


def topic_address(url: str) -> TopicAddress:
    """Parses `kafka://HOST:PORT[,HOST:PORT…]/TOPIC`. Raises InvalidSetting."""
    brokers, _, topic = url.removeprefix("kafka://").partition("/")
    hosts = brokers.split(",")
    ports = [_BROKER.fullmatch(host) for host in hosts]
    if len(hosts) > MOST_BROKERS or not all(found and 0 < int(found[1]) < 65536 for found in ports):
        raise InvalidSetting("url", f"use kafka://HOST:PORT/TOPIC, with at most {MOST_BROKERS} brokers and commas")
    return TopicAddress(brokers, _topic("url", topic))


def check_topic(address: TopicAddress, stated: TopicSettings) -> None:
    """Raises InvalidSetting if a setting is malformed or contradicts another."""
    for field in ("results_topic", "dead_letter_topic"):
        if name := getattr(stated, field):
            _topic(field, name)
            if name == address.topic:
                raise InvalidSetting(field, "must be another topic than that of the requests, which would read it")
    if stated.results_topic and stated.results_topic == stated.dead_letter_topic:
        raise InvalidSetting("dead_letter_topic", "must be another topic than that of the results")
    if stated.group and not _GROUP.fullmatch(stated.group):
        raise InvalidSetting("group", "must be 1 to 128 letters, digits and . _ : -")
    security = KafkaSecurity(stated.security or KafkaSecurity.PLAINTEXT)
    if security.has_user != bool(stated.username) or security.has_user != bool(stated.password):
        what = "needs username and password" if security.has_user else "has neither username nor password"
        raise InvalidSetting("security", f"{security} {what}")
    if stated.mechanism and not security.has_user:
        raise InvalidSetting("mechanism", f"{security} has no mechanism; use SASL_SSL")
    if stated.ca_pem and not security.has_tls:
        raise InvalidSetting("ca_pem", f"{security} has no certificates; use SSL or SASL_SSL")


def _topic(field: str, name: str) -> str:
    if not _TOPIC.fullmatch(name) or name in {".", ".."}:
        raise InvalidSetting(field, f"a topic has 1 to {TOPIC_LETTERS} letters, digits and . _ -")
    return name


def record_key(address: TopicAddress, record: Record) -> str:
    """Returns the idempotency key of a record without its own: the same for the same place in the same topic."""
    digest = hashlib.sha256(f"{address.brokers}/{address.topic}".encode()).hexdigest()[:ORIGIN_LETTERS]
    return f"{digest}/{address.topic}/{record.place}"


def parse_record(address: TopicAddress, record: Record, most_bytes: int) -> MessageRequest:
    """Reads a record's headers: those of the endpoint and its path. Raises InvalidMessage if they are malformed, or the
    record has no body or one longer than `most_bytes`."""
    if record.value is None:
        raise InvalidMessage("the record has no value; a request is its JSON")
    if len(record.value) > most_bytes:
        raise InvalidMessage(f"the record is longer than {most_bytes} bytes")
    attributes: dict[str, str] = {}
    for name, value in record.headers:
        if name in attributes:
            raise InvalidMessage(f"the header {name[:100]} is given twice")
        try:
            attributes[name] = (value or b"").decode()
        except UnicodeDecodeError as error:
            raise InvalidMessage(f"the header {name[:100]} is not UTF-8") from error
    return parse_attributes(record_key(address, record), attributes)


def sent_at(record: Record, now: datetime) -> datetime:
    """Returns when a record was sent, `now` if its time is unknown or outside of the calendar."""
    try:
        return datetime.fromtimestamp(record.sent_ms / 1000, UTC) if record.sent_ms > 0 else now
    except (ValueError, OverflowError, OSError):
        return now


def origin_of(record: Record) -> dict[str, Any]:
    """Returns what the record with the outcome repeats: the place, and the key unless it is long."""
    origin: dict[str, Any] = {"partition": record.partition, "offset": record.offset}
    if record.key is not None and len(record.key) <= KEY_BYTES:
        origin["key"] = base64.b64encode(record.key).decode()
    return origin


def origin_key(origin: Mapping[str, Any], idempotency_key: str) -> bytes:
    """Returns the key of the record with an outcome: that of the request's record, else its idempotency key."""
    key = origin.get("key")
    return base64.b64decode(key) if isinstance(key, str) else idempotency_key.encode()


def next_offsets(records: Iterable[Record]) -> dict[int, int]:
    """Returns the offset to commit for each partition, after these records."""
    offsets: dict[int, int] = {}
    for record in records:
        offsets[record.partition] = max(offsets.get(record.partition, 0), record.offset + 1)
    return offsets
