"""S3 objects as streams. Readers start anywhere and resume after a broken body; writers write an object once, in parts,
and never replace a different one. Memory holds one part of each. Knows nothing about the content."""

import hashlib
import io
import os
import time
from typing import Any

from fleet.clouds.aws import calls

ALREADY_THERE = frozenset({"PreconditionFailed", "ConditionalRequestConflict", "412"})
DIGEST = "sha256"
"""Metadata key of an object: the SHA-256 of its content, in hexadecimal."""
USUAL_REGION = "us-east-1"


class OtherObject(Exception):
    """An object of that name with other content exists; it was not changed."""


def bucket_region() -> str:
    """Returns the region of buckets that no row names: the environment's, as for every AWS client."""
    return os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or USUAL_REGION


def object_put_once(region: str, bucket: str, key: str, body: bytes, *, kind: str) -> str:
    """Writes an object unless one exists. One with the same content counts as written: the answer to an earlier call
    may have been lost. Returns the SHA-256 of the content. Raises CallFailed if it was not written, or the outcome is
    unknown. Raises OtherObject if another object has that name."""
    digest = hashlib.sha256(body).hexdigest()
    options: dict[str, Any] = {"Body": body, "ContentType": kind, "Metadata": {DIGEST: digest}}
    try:
        calls.call("s3", "PutObject", region, Bucket=bucket, Key=key, IfNoneMatch="*", **options)
    except calls.Refused as error:
        if error.code not in ALREADY_THERE:
            raise
        there = _digest_of(region, bucket, key)
        if there != digest:
            message = f"s3://{bucket}/{key} exists with other content (sha256 {there or 'not stated'})"
            raise OtherObject(message) from error
    return digest


def _digest_of(region: str, bucket: str, key: str) -> str:
    answer = calls.call("s3", "GetObject", region, Bucket=bucket, Key=key)
    answer["Body"].close()
    return str((answer.get("Metadata") or {}).get(DIGEST, ""))


PART_BYTES = 8 * 1024 * 1024
"""S3 accepts parts below 5 MiB only as the last one, and 10,000 parts."""
PARTS_OF_A_SIZE = 2000
"""After so many parts, parts grow by `PART_BYTES`, so that 240 GB fit and memory holds at most 40 MiB."""
RESUMES = 4
"""Attempts in a row without a received byte."""
COMPLETES = 3
PAUSE_S = 0.5
"""Before a retry; doubles each time."""


class ObjectChanged(Exception):
    """The object was replaced while it was read."""


class ObjectReader(io.RawIOBase):
    """Reads the bytes of an object from `start` to `end`, forwards. `size` is their number. `etag` names the content; a
    given one must match. Raises CallFailed if it cannot be read; codes include `NoSuchKey`, `NoSuchBucket` and
    `AccessDenied`. Raises ObjectChanged if the object was replaced."""

    def __init__(
        self, region: str, bucket: str, key: str, *, start: int = 0, end: int | None = None, etag: str = ""
    ) -> None:
        super().__init__()
        self._region, self._bucket, self._key = region, bucket, key
        self._at, self._end = start, end
        self.etag = etag
        self._body: Any = None
        answer = self._get_object()
        self.size = int(answer["ContentLength"])
        self._end = start + self.size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        for _ in range(RESUMES):
            piece = calls.body_piece(self._body, len(buffer))
            if piece or self._at == self._end:
                self._at += len(piece)
                buffer[: len(piece)] = piece
                return len(piece)
            self._body.close()
            self._get_object()
        raise calls.Unanswered("", f"s3://{self._bucket}/{self._key} broke off {RESUMES} times at byte {self._at}")

    def close(self) -> None:
        if not self.closed and self._body is not None:
            self._body.close()
        super().close()

    def _get_object(self) -> dict[str, Any]:
        options: dict[str, Any] = {"IfMatch": self.etag} if self.etag else {}
        if self._at or self._end is not None:
            options["Range"] = f"bytes={self._at}-{'' if self._end is None else self._end - 1}"
        try:
            answer = calls.call("s3", "GetObject", self._region, Bucket=self._bucket, Key=self._key, **options)
        except calls.Refused as refused:
            if refused.http_status == 412:
                raise ObjectChanged(f"s3://{self._bucket}/{self._key} was replaced while it was read") from refused
            raise
        self._body, self.etag = answer["Body"], str(answer["ETag"])
        return answer


class ObjectWriter:
    """Writes an object that becomes visible only with `commit`, and replaces none. `bytes` and `sha256` are those so
    far. Callers that do not commit must abort. Raises CallFailed from `write` and `commit`; the object may exist then.
    Raises OtherObject from `commit` if another object has that name."""

    def __init__(self, region: str, bucket: str, key: str, *, kind: str = "application/octet-stream") -> None:
        self._region, self._kind = region, kind
        self._place: dict[str, Any] = {"Bucket": bucket, "Key": key}
        self._buffer = bytearray()
        self._digest = hashlib.sha256()
        self._upload = ""
        self._parts: list[dict[str, Any]] = []
        self.bytes = 0

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def write(self, piece: bytes) -> None:
        self._buffer += piece
        self._digest.update(piece)
        self.bytes += len(piece)
        while len(self._buffer) > (size := PART_BYTES * (1 + len(self._parts) // PARTS_OF_A_SIZE)):
            self._send_part(bytes(memoryview(self._buffer)[:size]))
            del self._buffer[:size]

    def commit(self) -> None:
        """Makes the object complete and visible in one step."""
        if self._upload:
            self._send_part(bytes(self._buffer))
        for attempt in range(COMPLETES):
            try:
                self._complete_upload()
                break
            except calls.CallFailed as failed:
                may_be_there = isinstance(failed, calls.Unanswered) or failed.code in {*ALREADY_THERE, "NoSuchUpload"}
                if may_be_there and self._is_there():
                    break
                if not isinstance(failed, calls.Unanswered) or attempt + 1 == COMPLETES:
                    raise
                time.sleep(PAUSE_S * 2**attempt)
        self._upload = ""
        self._buffer.clear()

    def abort(self) -> None:
        """Discards the parts; does nothing after a commit. Parts that cannot be discarded now are swept later."""
        self._buffer.clear()
        upload, self._upload = self._upload, ""
        if upload:
            try:
                calls.call("s3", "AbortMultipartUpload", self._region, **self._place, UploadId=upload)
            except calls.CallFailed:
                return

    def _send_part(self, piece: bytes) -> None:
        if not self._upload:
            kind: dict[str, Any] = {"ContentType": self._kind, "ChecksumAlgorithm": "CRC32"}
            begun = calls.call("s3", "CreateMultipartUpload", self._region, **self._place, **kind)
            self._upload = str(begun["UploadId"])
        number = len(self._parts) + 1
        options: dict[str, Any] = {"UploadId": self._upload, "PartNumber": number, "ChecksumAlgorithm": "CRC32"}
        sent = calls.call("s3", "UploadPart", self._region, **self._place, **options, Body=piece)
        checks = {name: value for name, value in sent.items() if name.startswith("Checksum")}
        self._parts.append({"PartNumber": number, "ETag": sent["ETag"], **checks})

    def _complete_upload(self) -> None:
        once = {**self._place, "IfNoneMatch": "*"}
        if self._upload:
            parts: dict[str, Any] = {"UploadId": self._upload, "MultipartUpload": {"Parts": self._parts}}
            calls.call("s3", "CompleteMultipartUpload", self._region, **once, **parts)
        else:
            calls.call("s3", "PutObject", self._region, **once, Body=bytes(self._buffer), ContentType=self._kind)

    def _is_there(self) -> bool:
        """Compares the content: an answer may have been lost, or another process wrote the same. Encrypted buckets have
        ETags that are no digests."""
        where = f"s3://{self._place['Bucket']}/{self._place['Key']}"
        try:
            with ObjectReader(self._region, self._place["Bucket"], self._place["Key"]) as there:
                digest = hashlib.sha256()
                while there.size == self.bytes and (piece := there.read(PART_BYTES)):
                    digest.update(piece)
        except calls.Refused as refused:
            if refused.code == "NoSuchKey":
                return False
            raise
        if there.size != self.bytes or digest.hexdigest() != self.sha256:
            raise OtherObject(f"{where} exists with other content")
        return True
