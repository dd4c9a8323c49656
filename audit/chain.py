"""What a record's digest covers, and whether a run of records is unbroken. Pure: it reads no database."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

START = 64 * "0"
"""What stands for the digest before the first record."""
COVERED = (
    "number", "outcome", "actor", "proof", "address", "token_prefix", "action", "object", "about", "reason",
    "request_id", "changes",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ChainBreak:
    """The first record at which a chain does not hold, and why."""

    number: int
    why: str


def record_digest(record: Any) -> str:
    """SHA-256 in hexadecimal over `record.previous`, a line feed and the record's columns as JSON with sorted keys."""
    fields = {name: getattr(record, name) for name in COVERED} | {"at": instant(record.at)}
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(f"{record.previous}\n{text}".encode()).hexdigest()


def instant(at: datetime) -> str:
    """The one spelling of a time that digests know: UTC, microseconds."""
    return at.astimezone(UTC).isoformat(timespec="microseconds")


def first_break(records: Iterable[Any], *, after: int, digest: str) -> tuple[ChainBreak | None, int, str]:
    """Walk the records that follow number `after`, whose digest was `digest`.

    Returns the first broken one, if any, and the number and digest of the last good one.
    """
    number = after
    for record in records:
        if record.number != number + 1:
            return ChainBreak(number + 1, f"it is missing; the next that exists is {record.number}"), number, digest
        if record.previous != digest:
            return ChainBreak(record.number, f"it does not follow record {number}"), number, digest
        if record_digest(record) != record.digest:
            return ChainBreak(record.number, "its columns are not those that its digest was made of"), number, digest
        number, digest = record.number, record.digest
    return None, number, digest
