"""Why an application's request is not done, as OpenAI's errors say it. Pure.

Addresses of objects and of places in S3, `s3://bucket/key`, read strictly. Pure.

Only plain names of buckets are taken: boto3 would also take ARNs of access points and of other services in their place.

What a tenant's own address is told of a batch, as OpenAI's webhooks say it. Pure.
"""

import re
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from kernel.refusals import Refusal

QUOTA_USED_UP = "insufficient_quota"
"""Code and type of the refusal when a tenant's budget is used up, as OpenAI has them."""


class ApplicationRefused(Refusal):
    """HTTP status, code and field of an error in OpenAI's form; `kind` is its type, where not that of its status."""

    def __init__(
        self, status: int, code: str | None, message: str, param: str | None = None, *, kind: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.kind = status, code, param, kind

    @property
    def is_passing(self) -> bool:
        """Whether the same request may be accepted soon."""
        return self.status in {429, 502, 503} and self.code != QUOTA_USED_UP


BUCKET = re.compile(r"[a-z0-9][a-z0-9-]{1,61}[a-z0-9]")
"""Without dots, which S3's certificates do not cover."""
MAX_KEY_BYTES = 900
"""S3 takes 1,024; names of results are added."""
SCHEME = "s3://"


class BadObjectUri(ValueError):
    """No address of an object or place; the text says what would be."""


@dataclass(frozen=True, slots=True)
class ObjectUri:
    """A bucket and a key, or the prefix of a place, without slashes at its ends; the prefix may be empty."""

    bucket: str
    key: str

    def __str__(self) -> str:
        return f"{SCHEME}{self.bucket}/{self.key}" if self.key else f"{SCHEME}{self.bucket}"

    def below(self, name: str) -> "ObjectUri":
        return ObjectUri(self.bucket, f"{self.key}/{name}" if self.key else name)

    def covers(self, other: "ObjectUri") -> bool:
        """Whether this place has the other one, or the object, in it: whole names between slashes count."""
        is_below = not self.key or other.key == self.key or other.key.startswith(f"{self.key}/")
        return self.bucket == other.bucket and is_below

    def overlaps(self, other: "ObjectUri") -> bool:
        return self.covers(other) or other.covers(self)


def parse_object_uri(text: str, *, is_object: bool = False) -> ObjectUri:
    """The address of a place, or with `is_object` of one object.

    Raises:
        BadObjectUri: see there.
    """
    wanted = "s3://bucket/key" if is_object else "s3://bucket/prefix"
    if not text.startswith(SCHEME):
        raise BadObjectUri(f"must read {wanted}")
    bucket, _, key = text.removeprefix(SCHEME).partition("/")
    if not BUCKET.fullmatch(bucket):
        raise BadObjectUri(f"must read {wanted}; the bucket has 3 to 63 small letters, digits and hyphens, and no dots")
    if is_object and (not key or key.endswith("/")):
        raise BadObjectUri(f"must name an object, {wanted}")
    key = key.removesuffix("/")
    if len(key.encode("utf-8", "surrogatepass")) > MAX_KEY_BYTES:
        raise BadObjectUri(f"may have at most {MAX_KEY_BYTES} bytes after the bucket")
    parts = key.split("/") if key else []
    if any(part in {"", ".", ".."} for part in parts) or not key.isprintable():
        raise BadObjectUri("must have plain names between its slashes: none empty, `.` or `..`, no control characters")
    if "?" in key or "#" in key:
        raise BadObjectUri("must have no ? and no # in it")
    return ObjectUri(bucket, key)


class BatchEvent(StrEnum):
    """OpenAI's four, and one of ours."""

    COMPLETED = "batch.completed"
    FAILED = "batch.failed"
    EXPIRED = "batch.expired"
    CANCELLED = "batch.cancelled"
    AT_RISK = "switchyard.batch.deadline_at_risk"


def batch_event_json(event: BatchEvent, batch_id: str) -> dict[str, Any]:
    """The event's own part: who gets it reads the batch with its key."""
    return {"type": event.value, "data": {"id": batch_id}}


def secrets_in_force(secret: str, former: str, former_until: datetime | None, now: datetime) -> tuple[str, ...]:
    """Those that a message is signed by: for a day after a change both, so that a receiver may change in its own
    time."""
    is_in_force = former and former_until is not None and now < former_until
    return (secret, former) if is_in_force else (secret,)
