"""Writes objects that are written once. Knows nothing of what is in them."""

import hashlib
import os
from typing import Any

from fleet.providers.aws import calls

ALREADY_THERE = frozenset({"PreconditionFailed", "ConditionalRequestConflict", "412"})
DIGEST = "sha256"
"""In the metadata of an object: the SHA-256 of its content, in hexadecimal."""
USUAL_REGION = "us-east-1"


class OtherObject(Exception):
    """There is an object of that name with other content; it was not touched."""


def bucket_region() -> str:
    """The region of buckets that no row of the fleet names: that of the environment, as for every client of AWS."""
    return os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or USUAL_REGION


def object_put_once(region: str, bucket: str, key: str, body: bytes, *, kind: str) -> str:
    """Write an object unless one is there. One with the same content may be: an answer to this very call was lost.
    Returns the SHA-256 of the content.

    Raises:
        CallFailed: it is not there, or nobody knows.
        OtherObject: see there.
    """
    digest = hashlib.sha256(body).hexdigest()
    said: dict[str, Any] = {"Body": body, "ContentType": kind, "Metadata": {DIGEST: digest}}
    try:
        calls.call("s3", "PutObject", region, Bucket=bucket, Key=key, IfNoneMatch="*", **said)
    except calls.Refused as error:
        if error.code not in ALREADY_THERE:
            raise
        there = _digest_of(region, bucket, key)
        if there != digest:
            message = f"s3://{bucket}/{key} is there with other content (sha256 {there or 'not stated'})"
            raise OtherObject(message) from error
    return digest


def _digest_of(region: str, bucket: str, key: str) -> str:
    answer = calls.call("s3", "GetObject", region, Bucket=bucket, Key=key)
    answer["Body"].close()
    return str((answer.get("Metadata") or {}).get(DIGEST, ""))
