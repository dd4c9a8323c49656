"""Files and batches in a bucket of S3: a batch that was begun on one host is finished on any other. A file is one
object, written once in parts. A journal is a folder of objects, one an append: S3 has none that grow, and an object is
whole or not there at all.
"""

import io
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, BinaryIO, cast

from fleet.providers.aws import calls
from fleet.providers.aws.calls import CallFailed, Refused, Unanswered
from fleet.providers.aws.object_stream import ObjectChanged, ObjectReader, ObjectWriter
from fleet.providers.aws.objects import OtherObject, bucket_region
from traffic.planning.object_uri import ObjectUri
from traffic.services.file_protocol import READ_BYTES, FileWriter, JournalWriter, NoSuchFile, Piece, StoreAway, pieces

DELETED_AT_ONCE = 1000
PAGES_MOST = 1000
"""Of one list: a million objects."""
GONE = frozenset({"NoSuchKey", "404"})


class BucketStore:
    """The objects below a prefix. Credentials, region and endpoint are boto3's own settings."""

    sync_every_s = 2.0
    """An append is a call that costs money: at most eight a second of a process with 16 ranges, not eighty."""

    def __init__(self, place: ObjectUri) -> None:
        self._place, self._region = place, bucket_region()

    def write(self, name: str) -> FileWriter:
        return BucketWriter(ObjectWriter(self._region, self._place.bucket, self._key(name)))

    def append(self, name: str) -> JournalWriter:
        return BucketJournal(self, name)

    def journal(self, name: str) -> Iterator[bytes]:
        for part in sorted(key for key, _ in self._below(f"{name}/")):
            with self._opened(part) as file, as_away():
                yield from file

    def open(self, name: str) -> BinaryIO:
        return self._opened(self._key(name))

    def local(self, name: str) -> BinaryIO:
        with self.open(name) as file:
            return spooled(file)

    def read(self, name: str, start: int, end: int) -> bytes:
        with as_away(), self._reader(self._key(name), start=start, end=end) as reader:
            return io.BufferedReader(reader, READ_BYTES).read()

    def delete(self, name: str) -> None:
        with as_away():
            calls.call("s3", "DeleteObject", self._region, Bucket=self._place.bucket, Key=self._key(name))

    def delete_folder(self, name: str) -> None:
        found = (key for key, _ in list(self._below(f"{name}/")))
        while keys := list(islice(found, DELETED_AT_ONCE)):
            wanted = {"Objects": [{"Key": key} for key in keys], "Quiet": True}
            with as_away():
                answer = calls.call("s3", "DeleteObjects", self._region, Bucket=self._place.bucket, Delete=wanted)
            for error in answer.get("Errors", ())[:1]:
                raise StoreAway(f"{error.get('Key')} is not deleted: {error.get('Code')} {error.get('Message')}")

    def names(self, folder: str) -> Iterator[tuple[str, float]]:
        start = self._key(f"{folder}/")
        for page in self._pages(Prefix=start, Delimiter="/"):
            for entry in page.get("Contents", ()):
                yield f"{folder}/{entry['Key'].removeprefix(start)}", entry["LastModified"].timestamp()
            for below in page.get("CommonPrefixes", ()):
                name = below["Prefix"].removeprefix(start).rstrip("/")
                yield f"{folder}/{name}", max((at for _, at in self._below(f"{folder}/{name}/")), default=0.0)

    def delete_unfinished(self, before: float) -> int:
        """Uploads that were begun below our prefix. Those of the last page's end come with the next call."""
        said: dict[str, Any] = {"Bucket": self._place.bucket, "Prefix": self._key("")}
        with as_away():
            found = calls.call("s3", "ListMultipartUploads", self._region, **said).get("Uploads", ())
            left = [upload for upload in found if upload["Initiated"].timestamp() < before]
            for upload in left:
                place: dict[str, Any] = {"Key": upload["Key"], "UploadId": upload["UploadId"]}
                calls.call("s3", "AbortMultipartUpload", self._region, Bucket=self._place.bucket, **place)
        return len(left)

    def put(self, name: str, piece: bytes) -> None:
        """Write an object whose name is nobody else's; doing it again does no harm."""
        writer = self.write(name)
        writer.write(piece)
        try:
            writer.commit()
        finally:
            writer.abort()

    def _key(self, name: str) -> str:
        return f"{self._place.key}/{name}" if self._place.key else name

    def _opened(self, key: str) -> BinaryIO:
        with as_away():
            return cast("BinaryIO", _Away(self._reader(key), READ_BYTES))

    def _reader(self, key: str, *, start: int = 0, end: int | None = None) -> ObjectReader:
        try:
            return ObjectReader(self._region, self._place.bucket, key, start=start, end=end)
        except Refused as refused:
            if refused.code in GONE:
                raise NoSuchFile(f"s3://{self._place.bucket}/{key}") from refused
            raise

    def _below(self, name: str) -> Iterator[tuple[str, float]]:
        for page in self._pages(Prefix=self._key(name)):
            for entry in page.get("Contents", ()):
                yield entry["Key"], entry["LastModified"].timestamp()

    def _pages(self, **said: Any) -> Iterator[dict[str, Any]]:
        for _ in range(PAGES_MOST):
            with as_away():
                page = calls.call("s3", "ListObjectsV2", self._region, Bucket=self._place.bucket, **said)
            yield page
            if not page.get("IsTruncated"):
                return
            said["ContinuationToken"] = page["NextContinuationToken"]
        raise StoreAway(f"s3://{self._place.bucket}/{said['Prefix']} has more than {PAGES_MOST} pages of objects")


class BucketWriter:
    """An object in parts, of which one is in memory."""

    def __init__(self, writer: ObjectWriter) -> None:
        self._writer = writer

    @property
    def bytes(self) -> int:
        return self._writer.bytes

    @property
    def sha256(self) -> str:
        return self._writer.sha256

    def write(self, piece: Piece) -> None:
        with as_away():
            self._writer.write(piece)

    def commit(self) -> None:
        with as_away():
            self._writer.commit()

    def abort(self) -> None:
        self._writer.abort()


class BucketJournal:
    """A folder of one object an append, in their order by name."""

    def __init__(self, store: BucketStore, name: str) -> None:
        self._store, self._name = store, name
        self._appends = 0

    def append(self, piece: bytes) -> None:
        self._store.put(f"{self._name}/{self._appends:06d}", piece)
        self._appends += 1

    def close(self) -> None:
        return None


class _Away(io.BufferedReader):
    """A stream of an object; what S3 says no to on the way is `StoreAway`."""

    def read(self, size: int | None = -1, /) -> bytes:
        with as_away():
            return super().read(size)

    def readline(self, size: int | None = -1, /) -> bytes:
        with as_away():
            return super().readline(size)

    def __next__(self) -> bytes:
        with as_away():
            return super().__next__()


def spooled(file: BinaryIO) -> BinaryIO:
    """A copy on this host's disk that nobody else can open and that goes with the process."""
    copy = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    try:
        for piece in pieces(file):
            copy.write(piece)
        copy.seek(0)
    except OSError as error:
        copy.close()
        raise StoreAway(f"this host has no room for a copy: {error.strerror or error}") from error
    except BaseException:
        copy.close()
        raise
    return cast("BinaryIO", copy)


@contextmanager
def as_away() -> Iterator[None]:
    """What a bucket says no to, in one kind of exception, with what would be right."""
    try:
        yield
    except (CallFailed, OtherObject, ObjectChanged) as error:
        raise StoreAway(f"the file store cannot be used: {said_of(error)}") from error


def said_of(error: Exception) -> str:
    match error:
        case Refused(code="NoSuchBucket"):
            return "there is no such bucket"
        case Refused(http_status=403):
            return f"access is denied ({error.code}): the control plane's role or the bucket's policy does not allow it"
        case Refused(code="PermanentRedirect" | "AuthorizationHeaderMalformed" | "301"):
            return "the bucket is in another region: set AWS_REGION to it"
        case Unanswered(code="SlowDown" | "RequestLimitExceeded"):
            return "S3 asks to be called less often"
    return str(error)
