"""File stores of batches, shared by all hosts of the control plane: `FolderStore` on a shared folder, `BucketStore` in
S3.

In a folder, a file is written under a temporary name, synchronised and renamed; a journal is appended to and
synchronised. In a bucket, a file is one object, written once in parts; a journal is a folder with one object per
append, because S3 objects are immutable."""

import hashlib
import io
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, cast
from uuid import uuid4

from django.conf import settings

from fleet.clouds.aws import calls
from fleet.clouds.aws.calls import CallFailed, Refused, Unanswered
from fleet.clouds.aws.objects import ObjectChanged, ObjectReader, ObjectWriter, OtherObject, bucket_region
from traffic.files.services.store_protocol import (
    READ_BYTES,
    FileStore,
    FileWriter,
    JournalWriter,
    NoSuchFile,
    Piece,
    StoreAway,
    pieces,
)
from traffic.tenants.planner import SCHEME, ObjectUri, parse_object_uri

_UNFINISHED = "unfinished"


class FolderStore:
    """Raises `StoreAway` for every error of its disk."""

    sync_every_s = 0.0

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, name: str) -> FileWriter:
        unfinished = self._folder / _UNFINISHED / uuid4().hex
        with _as_away():
            unfinished.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            return FolderWriter(unfinished, self._file_path(name))

    def append(self, name: str) -> JournalWriter:
        path = self._file_path(name)
        with _as_away():
            _make_folder(path.parent)
            return FolderJournal(path)

    def journal(self, name: str) -> Iterator[bytes]:
        try:
            file = self.open(name)
        except NoSuchFile:
            return
        with file, _as_away():
            yield from file

    def open(self, name: str, start: int = 0) -> BinaryIO:
        with _as_away():
            file = self._file_path(name).open("rb")
            file.seek(start)
            return file

    def read(self, name: str, start: int, end: int) -> bytes:
        with self.open(name) as file, _as_away():
            file.seek(start)
            return file.read(end - start)

    def delete(self, name: str) -> None:
        with _as_away(), suppress(FileNotFoundError):
            self._file_path(name).unlink()

    def delete_folder(self, name: str) -> None:
        with _as_away(), suppress(FileNotFoundError):
            shutil.rmtree(self._file_path(name))

    def names(self, folder: str) -> Iterator[tuple[str, float]]:
        with _as_away(), suppress(FileNotFoundError), os.scandir(self._file_path(folder)) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    yield f"{folder}/{entry.name}", entry.stat().st_mtime

    def folders(self, folder: str) -> Iterator[str]:
        with _as_away(), suppress(FileNotFoundError), os.scandir(self._file_path(folder)) as entries:
            yield from [f"{folder}/{entry.name}" for entry in entries if entry.is_dir()]

    def delete_unfinished(self, before: float) -> int:
        left = [name for name, written_at in self.names(_UNFINISHED) if written_at < before]
        for name in left:
            self.delete(name)
        return len(left)

    def _file_path(self, name: str) -> Path:
        path = self._folder / name
        if not path.resolve().is_relative_to(self._folder.resolve()):
            raise ValueError(f"{name!r} is outside the store")
        return path


class FolderWriter:
    """Writes a file under a temporary name until commit."""

    def __init__(self, unfinished: Path, path: Path) -> None:
        self._unfinished, self._file_path = unfinished, path
        self._file = unfinished.open("xb")
        self._digest = hashlib.sha256()
        self.bytes = 0

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def write(self, piece: bytes) -> None:
        with _as_away():
            self._file.write(piece)
        self._digest.update(piece)
        self.bytes += len(piece)

    def commit(self) -> None:
        with _as_away():
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            _make_folder(self._file_path.parent)
            self._unfinished.replace(self._file_path)
            _sync_folder(self._file_path.parent)

    def abort(self) -> None:
        self._file.close()
        with suppress(OSError):
            self._unfinished.unlink()


class FolderJournal:
    def __init__(self, path: Path) -> None:
        is_new = not path.exists()
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if is_new:
            _sync_folder(path.parent)

    def append(self, piece: bytes) -> None:
        with _as_away():
            left = memoryview(piece)
            while left:
                left = left[os.write(self._descriptor, left) :]
            os.fdatasync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


def _make_folder(folder: Path) -> None:
    if not folder.is_dir():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _as_away:  # noqa: N801 - reads as a statement
    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, FileNotFoundError):
            raise NoSuchFile(str(error.filename)) from error
        if isinstance(error, OSError):
            raise StoreAway(f"the file store is unavailable: {error.strerror or error}") from error


DELETED_AT_ONCE = 1000
PAGES_MOST = 1000
"""Per list: a million objects."""
GONE = frozenset({"NoSuchKey", "404"})


class BucketStore:
    """Objects below a prefix. Credentials, region and endpoint come from boto3's settings."""

    sync_every_s = 2.0
    """Each append is a paid call: at most eight per second in a process with 16 ranges, instead of eighty."""

    def __init__(self, place: ObjectUri) -> None:
        self._place, self._region = place, bucket_region()

    def write(self, name: str) -> FileWriter:
        return BucketWriter(ObjectWriter(self._region, self._place.bucket, self._object_key(name)))

    def append(self, name: str) -> JournalWriter:
        return BucketJournal(self, name)

    def journal(self, name: str) -> Iterator[bytes]:
        for part in sorted(key for key, _ in self._names_below(f"{name}/")):
            with self._open_object(part) as file, as_away():
                yield from file

    def open(self, name: str, start: int = 0) -> BinaryIO:
        return self._open_object(self._object_key(name), start)

    def read(self, name: str, start: int, end: int) -> bytes:
        with as_away(), self._object_reader(self._object_key(name), start=start, end=end) as reader:
            return io.BufferedReader(reader, READ_BYTES).read()

    def delete(self, name: str) -> None:
        with as_away():
            calls.call("s3", "DeleteObject", self._region, Bucket=self._place.bucket, Key=self._object_key(name))

    def delete_folder(self, name: str) -> None:
        found = (key for key, _ in list(self._names_below(f"{name}/")))
        while keys := list(islice(found, DELETED_AT_ONCE)):
            wanted = {"Objects": [{"Key": key} for key in keys], "Quiet": True}
            with as_away():
                answer = calls.call("s3", "DeleteObjects", self._region, Bucket=self._place.bucket, Delete=wanted)
            for error in answer.get("Errors", ())[:1]:
                raise StoreAway(f"{error.get('Key')} is not deleted: {error.get('Code')} {error.get('Message')}")

    def names(self, folder: str) -> Iterator[tuple[str, float]]:
        start = self._object_key(f"{folder}/")
        for page in self._list_pages(Prefix=start, Delimiter="/"):
            for entry in page.get("Contents", ()):
                yield f"{folder}/{entry['Key'].removeprefix(start)}", entry["LastModified"].timestamp()
            for below in page.get("CommonPrefixes", ()):
                name = below["Prefix"].removeprefix(start).rstrip("/")
                yield f"{folder}/{name}", max((at for _, at in self._names_below(f"{folder}/{name}/")), default=0.0)

    def folders(self, folder: str) -> Iterator[str]:
        start = self._object_key(f"{folder}/")
        for page in self._list_pages(Prefix=start, Delimiter="/"):
            for below in page.get("CommonPrefixes", ()):
                yield f"{folder}/{below['Prefix'].removeprefix(start).rstrip('/')}"

    def delete_unfinished(self, before: float) -> int:
        """Deletes unfinished uploads below the prefix; those after the last page are left for the next call."""
        arguments: dict[str, Any] = {"Bucket": self._place.bucket, "Prefix": self._object_key("")}
        with as_away():
            found = calls.call("s3", "ListMultipartUploads", self._region, **arguments).get("Uploads", ())
            left = [upload for upload in found if upload["Initiated"].timestamp() < before]
            for upload in left:
                place: dict[str, Any] = {"Key": upload["Key"], "UploadId": upload["UploadId"]}
                calls.call("s3", "AbortMultipartUpload", self._region, Bucket=self._place.bucket, **place)
        return len(left)

    def put(self, name: str, piece: bytes) -> None:
        """Writes an object under a unique name; idempotent."""
        writer = self.write(name)
        writer.write(piece)
        try:
            writer.commit()
        finally:
            writer.abort()

    def _object_key(self, name: str) -> str:
        return f"{self._place.key}/{name}" if self._place.key else name

    def _open_object(self, key: str, start: int = 0) -> BinaryIO:
        with as_away():
            return cast("BinaryIO", _Away(self._object_reader(key, start=start), READ_BYTES))

    def _object_reader(self, key: str, *, start: int = 0, end: int | None = None) -> ObjectReader:
        try:
            return ObjectReader(self._region, self._place.bucket, key, start=start, end=end)
        except Refused as refused:
            if refused.code in GONE:
                raise NoSuchFile(f"s3://{self._place.bucket}/{key}") from refused
            raise

    def _names_below(self, name: str) -> Iterator[tuple[str, float]]:
        for page in self._list_pages(Prefix=self._object_key(name)):
            for entry in page.get("Contents", ()):
                yield entry["Key"], entry["LastModified"].timestamp()

    def _list_pages(self, **arguments: Any) -> Iterator[dict[str, Any]]:
        for _ in range(PAGES_MOST):
            with as_away():
                page = calls.call("s3", "ListObjectsV2", self._region, Bucket=self._place.bucket, **arguments)
            yield page
            if not page.get("IsTruncated"):
                return
            arguments["ContinuationToken"] = page["NextContinuationToken"]
        raise StoreAway(f"s3://{self._place.bucket}/{arguments['Prefix']} has more than {PAGES_MOST} pages of objects")


class BucketWriter:
    """Writes an object in parts, with one part in memory."""

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
    """A folder with one object per append, ordered by name."""

    def __init__(self, store: BucketStore, name: str) -> None:
        self._store, self._name = store, name
        self._appends = 0

    def append(self, piece: bytes) -> None:
        self._store.put(f"{self._name}/{self._appends:06d}", piece)
        self._appends += 1

    def close(self) -> None:
        return None


class _Away(io.BufferedReader):
    """A stream of an object that turns S3 errors into `StoreAway`."""

    def read(self, size: int | None = -1, /) -> bytes:
        with as_away():
            return super().read(size)

    def readline(self, size: int | None = -1, /) -> bytes:
        with as_away():
            return super().readline(size)

    def __next__(self) -> bytes:
        with as_away():
            return super().__next__()


@contextmanager
def as_away() -> Iterator[None]:
    """Turns errors of a bucket into `StoreAway`, with a hint."""
    try:
        yield
    except (CallFailed, OtherObject, ObjectChanged) as error:
        raise StoreAway(f"the file store is unavailable: {store_error_text(error)}") from error


def store_error_text(error: Exception) -> str:
    match error:
        case Refused(code="NoSuchBucket"):
            return "there is no such bucket"
        case Refused(http_status=403):
            return f"access is denied ({error.code}): the control plane's role or the bucket's policy does not allow it"
        case Refused(code="PermanentRedirect" | "AuthorizationHeaderMalformed" | "301"):
            return "the bucket is in another region: set AWS_REGION to it"
        case Unanswered(code="SlowDown" | "RequestLimitExceeded"):
            return "S3 throttles requests"
    return str(error)


__all__ = ["READ_BYTES", "FileStore", "FileWriter", "NoSuchFile", "StoreAway", "file_store", "pieces"]


def file_store() -> FileStore:
    if settings.FILES.startswith(SCHEME):
        return BucketStore(parse_object_uri(settings.FILES))
    return FolderStore(Path(settings.FILES))
