"""Errors in OpenAI's format, strict parsing of `s3://bucket/key`, and events about batches in OpenAI's webhook format.
Pure. Only plain bucket names are accepted, because boto3 would also accept ARNs of access points and other services."""

import re
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from kernel.decoding import decode_json
from kernel.refusals import Refusal

QUOTA_USED_UP = "insufficient_quota"
"""OpenAI's code and type for a used-up budget."""


def unix_seconds(at: datetime | None) -> int | None:
    """Returns a time as OpenAI's objects have it, in whole seconds since 1970."""
    return None if at is None else int(at.timestamp())


class ApplicationRefused(Refusal):
    """HTTP status, code and field of an error in OpenAI's format; `kind` is its type, if it differs from the
    status's."""

    def __init__(
        self, status: int, code: str | None, message: str, param: str | None = None, *, kind: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.kind = status, code, param, kind

    @property
    def is_passing(self) -> bool:
        """Whether the same request may soon succeed."""
        return self.status in {429, 502, 503} and self.code != QUOTA_USED_UP


def json_object(body: bytes) -> dict[str, Any]:
    """Parses the body of a request. Raises ApplicationRefused if it is not a JSON object."""
    try:
        payload = decode_json(body)
    except ValueError as error:
        raise ApplicationRefused(400, "invalid_json", f"the request body is not valid JSON: {error}") from error
    if not isinstance(payload, dict):
        raise ApplicationRefused(400, "invalid_json", "the request body must be a JSON object")
    return payload


BUCKET = re.compile(r"[a-z0-9][a-z0-9-]{1,61}[a-z0-9]")
"""Without dots, which S3's certificates do not cover."""
MAX_KEY_BYTES = 900
"""S3 allows 1,024 bytes; names of results are appended."""
SCHEME = "s3://"


class BadObjectUri(ValueError):
    """Not a valid address; the text says what would be."""


@dataclass(frozen=True, slots=True)
class ObjectUri:
    """A bucket and a key or prefix, without slashes at its ends. A prefix may be empty."""

    bucket: str
    key: str

    def __str__(self) -> str:
        return f"{SCHEME}{self.bucket}/{self.key}" if self.key else f"{SCHEME}{self.bucket}"

    def below(self, name: str) -> "ObjectUri":
        return ObjectUri(self.bucket, f"{self.key}/{name}" if self.key else name)

    def covers(self, other: "ObjectUri") -> bool:
        """Whether this prefix contains the other address, compared by whole path segments."""
        is_below = not self.key or other.key == self.key or other.key.startswith(f"{self.key}/")
        return self.bucket == other.bucket and is_below

    def overlaps(self, other: "ObjectUri") -> bool:
        return self.covers(other) or other.covers(self)


def parse_object_uri(text: str, *, is_object: bool = False) -> ObjectUri:
    """Parses the address of a prefix or, with `is_object`, of an object. Raises BadObjectUri if the address is
    invalid."""
    wanted = "s3://bucket/key" if is_object else "s3://bucket/prefix"
    if not text.startswith(SCHEME):
        raise BadObjectUri(f"must be {wanted}")
    bucket, _, key = text.removeprefix(SCHEME).partition("/")
    if not BUCKET.fullmatch(bucket):
        raise BadObjectUri(
            f"must have the form {wanted}; a bucket has 3 to 63 lower-case letters, digits and hyphens, and no dots"
        )
    if is_object and (not key or key.endswith("/")):
        raise BadObjectUri(f"must name an object, {wanted}")
    key = key.removesuffix("/")
    if len(key.encode("utf-8", "surrogatepass")) > MAX_KEY_BYTES:
        raise BadObjectUri(f"can have at most {MAX_KEY_BYTES} bytes after the bucket")
    parts = key.split("/") if key else []
    if any(part in {"", ".", ".."} for part in parts) or not key.isprintable():
        raise BadObjectUri("must have plain path segments: not empty, not `.` or `..`, no control characters")
    if "?" in key or "#" in key:
        raise BadObjectUri("must not contain ? or #")
    return ObjectUri(bucket, key)


class BatchEvent(StrEnum):
    """OpenAI's four events, and one for a deadline at risk."""

    COMPLETED = "batch.completed"
    FAILED = "batch.failed"
    EXPIRED = "batch.expired"
    CANCELLED = "batch.cancelled"
    AT_RISK = "switchyard.batch.deadline_at_risk"


def batch_event_json(event: BatchEvent, batch_id: str) -> dict[str, Any]:
    """Returns the event's data. The receiver reads the batch with its key."""
    return {"type": event.value, "data": {"id": batch_id}}


def secrets_in_force(secret: str, former: str, former_until: datetime | None, now: datetime) -> tuple[str, ...]:
    """Returns the secrets that sign a message. After a rotation both do for a day, so that receivers can switch."""
    is_in_force = former and former_until is not None and now < former_until
    return (secret, former) if is_in_force else (secret,)
