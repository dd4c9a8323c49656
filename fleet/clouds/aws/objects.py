"""Writes objects that are written once. Knows nothing of what is in them.

Objects of S3 as streams: read from anywhere on, taken up again where a body broke off, and written once, in parts.
Memory has one part of each. Knows nothing of what is in them.
"""

import hashlib
import io
import os
import time
from typing import Any

from fleet.clouds.aws import calls

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


PART_BYTES = 8 * 1024 * 1024
"""S3 takes no part below 5 MiB but the last one, and 10,000 of them."""
PARTS_OF_A_SIZE = 2000
"""Then parts grow by as much again, so that 240 GB fit and 40 MiB are in memory at most."""
RESUMES = 4
"""In a row, without a byte between."""
COMPLETES = 3
PAUSE_S = 0.5
"""Before what was not answered is tried again; twice as long the next time."""


class ObjectChanged(Exception):
    """The object is another one than when it was begun to be read."""


class ObjectReader(io.RawIOBase):
    """The bytes of an object from `start` up to `end`, forwards. `size` is how many, `etag` names the content; one
    that is given must be it.

    Raises:
        CallFailed: it cannot be read. `NoSuchKey`, `NoSuchBucket`, `AccessDenied` are codes of it.
        ObjectChanged: see there.
    """

    def __init__(
        self, region: str, bucket: str, key: str, *, start: int = 0, end: int | None = None, etag: str = ""
    ) -> None:
        super().__init__()
        self._region, self._bucket, self._key = region, bucket, key
        self._at, self._end = start, end
        self.etag = etag
        self._body: Any = None
        answer = self._ask()
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
            self._ask()
        raise calls.Unanswered("", f"s3://{self._bucket}/{self._key} broke off {RESUMES} times at byte {self._at}")

    def close(self) -> None:
        if not self.closed and self._body is not None:
            self._body.close()
        super().close()

    def _ask(self) -> dict[str, Any]:
        said: dict[str, Any] = {"IfMatch": self.etag} if self.etag else {}
        if self._at or self._end is not None:
            said["Range"] = f"bytes={self._at}-{'' if self._end is None else self._end - 1}"
        try:
            answer = calls.call("s3", "GetObject", self._region, Bucket=self._bucket, Key=self._key, **said)
        except calls.Refused as refused:
            if refused.http_status == 412:
                raise ObjectChanged(f"s3://{self._bucket}/{self._key} was replaced while it was read") from refused
            raise
        self._body, self.etag = answer["Body"], str(answer["ETag"])
        return answer


class ObjectWriter:
    """An object on its way: nobody sees it before `commit`, and none that is there is replaced. `bytes` and `sha256`
    are those so far. Whoever does not commit must abort.

    Raises:
        CallFailed: as for the reader, from `write` and `commit`; it may then be there.
        OtherObject: one of that name is there with other content, from `commit`.
    """

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
        """Make it whole and visible, in one step."""
        if self._upload:
            self._send_part(bytes(self._buffer))
        for attempt in range(COMPLETES):
            try:
                self._finish()
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
        """Leave nothing; after a commit it does nothing. What cannot be taken back now is swept later."""
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
        said: dict[str, Any] = {"UploadId": self._upload, "PartNumber": number, "ChecksumAlgorithm": "CRC32"}
        sent = calls.call("s3", "UploadPart", self._region, **self._place, **said, Body=piece)
        checks = {name: value for name, value in sent.items() if name.startswith("Checksum")}
        self._parts.append({"PartNumber": number, "ETag": sent["ETag"], **checks})

    def _finish(self) -> None:
        once = {**self._place, "IfNoneMatch": "*"}
        if self._upload:
            parts: dict[str, Any] = {"UploadId": self._upload, "MultipartUpload": {"Parts": self._parts}}
            calls.call("s3", "CompleteMultipartUpload", self._region, **once, **parts)
        else:
            calls.call("s3", "PutObject", self._region, **once, Body=bytes(self._buffer), ContentType=self._kind)

    def _is_there(self) -> bool:
        """Whether it is: an answer was lost, or somebody wrote the same. Content decides; a bucket may encrypt, and
        its tags say nothing then."""
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
            raise OtherObject(f"{where} is there with other content")
        return True
