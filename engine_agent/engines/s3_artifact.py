"""Downloads an artifact from S3 into an entry of the cache, completely or not at all. The prefix holds `manifest.json`
and the files that it lists. They are collected next to the final folder, which appears by one rename at the end, so an
existing folder is complete. An interrupted download resumes where it stopped, if the object is unchanged (`If-Match`).
No file is kept whose digest is wrong."""

import errno
import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from engine_agent.engines.artifacts import CannotFetch, Entry, file_sha256
from engine_agent.protocol.manifest import (
    MANIFEST_NAME,
    MOST_FILES,
    MOST_MANIFEST_BYTES,
    BadArtifact,
    Manifest,
    parse_manifest,
    wrong_list,
)
from engine_agent.protocol.messages import Artifact

STREAMS = 8
"""Parallel downloads. One stream of S3 gives about 80 MB/s (Amazon S3 performance guidelines)."""
CHUNK_BYTES = 8 * 1024 * 1024
CONNECT_TIMEOUT_S = 10
READ_TIMEOUT_S = 60
ATTEMPTS = 5
"""Of one request, and of a file without a further byte."""
FIRST_PAUSE_S = 0.5
"""Before a broken stream is requested again; each further pause is twice as long."""

Say = Callable[[str], None]
First = Callable[[Path, Mapping[str, str], Mapping[str, int]], None]
"""Adds files to a folder that need not come from S3: their SHA-256 and their sizes, by path."""


class Arrived:
    """How much of an artifact has arrived, counted by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes = 0
        self.total = 0

    def add(self, count: int) -> None:
        """Adds bytes; a negative count discards the beginning of a file."""
        with self._lock:
            self._bytes += count

    def words(self) -> str:
        return fetching_words(self._bytes, self.total)


def fetching_words(arrived: int, total: int) -> str:
    """Returns `fetching 3.1 of 12 GB`; without figures while the total, in bytes, is unknown."""
    if not total:
        return "fetching the artifact"
    unit, length = next(
        ((unit, length) for unit, length in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)) if total >= length), ("B", 1)
    )
    here, all_of_it = (f"{count / length:.1f}".removesuffix(".0") for count in (max(0, arrived), total))
    return f"fetching {here} of {all_of_it} {unit}"


@dataclass(frozen=True)
class _Place:
    bucket: str
    prefix: str

    def key(self, path: str) -> str:
        return f"{self.prefix}/{path}" if self.prefix else path

    def uri(self, path: str) -> str:
        return f"s3://{self.bucket}/{self.key(path)}"


@dataclass(frozen=True)
class _Object:
    """A file as the bucket lists it; `tag` (ETag) changes with its content."""

    size: int
    tag: str


def download(
    artifact: Artifact,
    entry: Entry,
    room: Callable[[int], None],
    arrived: Arrived,
    say: Say,
    first: First = lambda _folder, _wanted, _sizes: None,
) -> None:
    """Completes the entry. `room` is called with the total size before anything is written, then `first`. The caller
    holds the entry's lock. Raises CannotFetch if the artifact is missing, differs from `artifact.digest`, cannot be
    read with this node's credentials, changed meanwhile, does not arrive, or the disk is too small."""
    from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

    place = _location(artifact.uri)
    kept = "the part that arrived is kept for the next attempt"
    try:
        client = _client()
        text, manifest = _manifest(client, place, artifact)
        objects = _objects(client, place, manifest)
        arrived.total = sum(found.size for found in objects.values())
        for folder in (entry.partial, entry.partial / "files", entry.partial / "parts"):
            folder.mkdir(mode=0o700, exist_ok=True)
        room(arrived.total)
        first(entry.partial / "files", manifest.files, {path: found.size for path, found in objects.items()})
        say(f"downloading {artifact.uri}: {len(objects)} files, {arrived.total} B")
        _Download(client, place, entry.partial, manifest, objects, arrived, say).run()
        put_in_place(entry, manifest, text)
    except ClientError as error:
        raise CannotFetch(_explained(error, artifact.uri)) from error
    except NoCredentialsError as error:
        raise CannotFetch(f"{artifact.uri}: this node has no AWS credentials; give its instance a role") from error
    except BotoCoreError as error:
        raise CannotFetch(f"{artifact.uri} did not arrive: {error}; {kept}") from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CannotFetch(f"{artifact.uri} did not arrive: the disk of {entry.cache} is full; {kept}") from error
        raise CannotFetch(f"{artifact.uri} cannot be kept in {entry.cache}: {error}; {kept}") from error


def _location(uri: str) -> _Place:
    parts = urlsplit(uri)
    if parts.scheme != "s3" or not parts.netloc:
        raise CannotFetch(f"{uri} is not in S3; it must be s3://bucket/prefix")
    return _Place(parts.netloc, unquote(parts.path).strip("/"))


def _client() -> Any:
    import boto3
    from botocore.config import Config

    config = Config(
        connect_timeout=CONNECT_TIMEOUT_S,
        read_timeout=READ_TIMEOUT_S,
        max_pool_connections=STREAMS,
        retries={"max_attempts": ATTEMPTS, "mode": "standard"},
        response_checksum_validation="when_required",  # each file has its SHA-256
    )
    return boto3.client("s3", config=config)


def _manifest(client: Any, place: _Place, artifact: Artifact) -> tuple[bytes, Manifest]:
    answer = client.get_object(Bucket=place.bucket, Key=place.key(MANIFEST_NAME))
    with answer["Body"] as body:
        if answer["ContentLength"] > MOST_MANIFEST_BYTES:
            raise CannotFetch(
                f"{place.uri(MANIFEST_NAME)} has {answer['ContentLength']} bytes; the limit is {MOST_MANIFEST_BYTES}"
            )
        text: bytes = body.read(MOST_MANIFEST_BYTES)
    try:
        manifest = parse_manifest(text, place.uri(MANIFEST_NAME))
    except BadArtifact as error:
        raise CannotFetch(str(error)) from error
    if manifest.digest != artifact.digest:
        raise CannotFetch(f"{artifact.uri} holds {manifest.digest}, but {artifact.digest} was requested")
    if wrong := wrong_list(manifest, MOST_FILES):
        raise CannotFetch(f"{place.uri(MANIFEST_NAME)} {wrong}")
    return text, manifest


def _objects(client: Any, place: _Place, manifest: Manifest) -> dict[str, _Object]:
    start, objects, listed = place.key(""), dict[str, _Object](), 0
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=place.bucket, Prefix=start):
        for item in page.get("Contents", ()):
            listed += 1
            if (path := item["Key"][len(start) :]) in manifest.files:
                objects[path] = _Object(item["Size"], item["ETag"])
        if listed > 2 * MOST_FILES:
            raise CannotFetch(
                f"{place.uri('')} holds more than {2 * MOST_FILES} objects; give the artifact its own prefix"
            )
    if missing := sorted(manifest.files.keys() - objects.keys()):
        raise CannotFetch(f"{place.uri(missing[0])} is missing: {len(missing)} files of its manifest are")
    return objects


class _Download:
    def __init__(
        self,
        client: Any,
        place: _Place,
        partial: Path,
        manifest: Manifest,
        objects: Mapping[str, _Object],
        arrived: Arrived,
        say: Say,
    ) -> None:
        self._client, self._location, self._partial, self._manifest = client, place, partial, manifest
        self._objects, self._arrived, self._say = objects, arrived, say
        self._given_up = threading.Event()

    def run(self) -> None:
        order = sorted(enumerate(sorted(self._objects)), key=lambda item: -self._objects[item[1]].size)
        with ThreadPoolExecutor(STREAMS) as pool:
            coming: list[Future[None]] = [pool.submit(self._file, number, path) for number, path in order]
            try:
                done, _ = wait(coming, return_when=FIRST_EXCEPTION)
                for one in done:
                    one.result()
            finally:
                self._given_up.set()
                pool.shutdown(cancel_futures=True)

    def _file(self, number: int, path: str) -> None:
        """Downloads one file, from where an earlier attempt stopped. A wrong beginning costs one more attempt."""
        target, wanted = self._partial / "files" / path, self._manifest.files[path]
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if target.exists() and file_sha256(target) == wanted:
            self._arrived.add(target.stat().st_size)
            return
        beginning = _Beginning(self._partial / "parts" / str(number), self._objects[path], self._arrived)
        while True:
            resumed = beginning.resume()
            self._bring_rest(path, beginning)
            if self._given_up.is_set():
                return
            digest = beginning.finish()
            if digest == wanted:
                beginning.file.replace(target)
                self._say(f"downloaded {path}")
                return
            beginning.discard()
            if not resumed:
                break
        raise CannotFetch(
            f"{self._location.uri(path)} has sha256 {digest}, {MANIFEST_NAME} says {wanted}: upload the artifact again"
        )

    def _bring_rest(self, path: str, beginning: "_Beginning") -> None:
        """Requests the rest again as long as bytes arrive. Raises CannotFetch if no more bytes arrive."""
        from botocore.exceptions import BotoCoreError

        failures = 0
        while beginning.size < beginning.whole.size and not self._given_up.is_set():
            before, trouble = beginning.size, "the answer ended early"
            try:
                self._append(path, beginning)
            except BotoCoreError as error:
                trouble = str(error)
            if beginning.size >= beginning.whole.size or self._given_up.is_set():
                return
            failures = 1 if beginning.size > before else failures + 1
            where = f"{self._location.uri(path)} broke off at {beginning.size} of {beginning.whole.size} B"
            if failures >= ATTEMPTS:
                raise CannotFetch(f"{where}: {trouble}; the part that arrived is kept for the next attempt")
            self._say(f"{where} ({trouble}); continuing")
            self._given_up.wait(FIRST_PAUSE_S * 2 ** (failures - 1))

    def _append(self, path: str, beginning: "_Beginning") -> None:
        from botocore.exceptions import ClientError

        request = {"Range": f"bytes={beginning.size}-"} if beginning.size else {}
        key, tag = self._location.key(path), beginning.whole.tag
        try:
            body = self._client.get_object(Bucket=self._location.bucket, Key=key, IfMatch=tag, **request)["Body"]
        except ClientError as error:
            if error.response["Error"]["Code"] not in ("PreconditionFailed", "412"):
                raise
            beginning.discard()
            raise CannotFetch(
                f"{self._location.uri(path)} changed during the download: an artifact never changes, upload another one"
            ) from error
        with body:
            for chunk in body.iter_chunks(CHUNK_BYTES):
                beginning.write(chunk)
                if self._given_up.is_set():
                    return


class _Beginning:
    """The part of one file that has arrived, its digest so far, and its object."""

    def __init__(self, file: Path, whole: _Object, arrived: Arrived) -> None:
        self.file, self.whole, self._arrived = file, whole, arrived
        self._tag_file = file.with_name(f"{file.name}.etag")
        self._digest = hashlib.sha256()
        self.size = 0

    def resume(self) -> bool:
        """Starts, or continues a file of the same object; returns whether it continues."""
        self._digest, self.size = hashlib.sha256(), 0
        same = self._tag_file.exists() and self._tag_file.read_text() == self.whole.tag
        if not same or not self.file.exists() or self.file.stat().st_size > self.whole.size:
            self.file.unlink(missing_ok=True)
            self.file.touch(mode=0o600)
            self._tag_file.write_text(self.whole.tag)
            return False
        with self.file.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                self._digest.update(chunk)
                self.size += len(chunk)
        self._arrived.add(self.size)
        return self.size > 0

    def write(self, chunk: bytes) -> None:
        """Appends a chunk. Raises CannotFetch if there are more bytes than the object has. Raises OSError if the disk
        refused."""
        if self.size + len(chunk) > self.whole.size:
            raise CannotFetch(f"more than {self.whole.size} bytes arrived for {self.file.name}")
        with self.file.open("ab") as file:
            file.write(chunk)
        self._digest.update(chunk)
        self.size += len(chunk)
        self._arrived.add(len(chunk))

    def finish(self) -> str:
        """Returns the file's digest in hexadecimal after it is on disk."""
        with self.file.open("rb") as file:
            os.fsync(file.fileno())
        return self._digest.hexdigest()

    def discard(self) -> None:
        """Deletes the part, so that the next attempt starts from the beginning."""
        self._arrived.add(-self.size)
        self.file.unlink(missing_ok=True)
        self._tag_file.unlink(missing_ok=True)
        self.size = 0


def put_in_place(entry: Entry, manifest: Manifest, text: bytes) -> None:
    """Makes the collected files the artifact, without files that a damaged one may have contained."""
    files = entry.partial / "files"
    for path in files.rglob("*"):
        if not path.is_dir() and path.relative_to(files).as_posix() not in manifest.files:
            path.unlink()
    with (files / MANIFEST_NAME).open("wb") as file:
        file.write(text)
        os.fsync(file.fileno())
    if entry.folder.is_dir():
        shutil.rmtree(entry.folder)
    files.rename(entry.folder)
    shutil.rmtree(entry.partial, ignore_errors=True)


def _explained(error: Any, uri: str) -> str:
    code = str(error.response["Error"]["Code"])
    headers = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    elsewhere = f"the bucket of {uri} is in {headers.get('x-amz-bucket-region', 'another region')}: set AWS_REGION"
    reasons = {
        "NoSuchKey": f"{uri} has no {MANIFEST_NAME}: upload the artifact by manage.py artifact_push"
        if str(error.response["Error"].get("Key", MANIFEST_NAME)).endswith(MANIFEST_NAME)
        else f"{error.response['Error']['Key']} is gone from {uri}: an artifact never changes",
        "NoSuchBucket": f"the bucket of {uri} does not exist",
        "AccessDenied": f"this node may not read {uri}: its role needs s3:GetObject and s3:ListBucket there",
        "PermanentRedirect": elsewhere,
        "AuthorizationHeaderMalformed": elsewhere,
        "ExpiredToken": f"this node's AWS credentials for {uri} have expired: check its instance's role",
        "InvalidAccessKeyId": f"S3 does not accept this node's AWS credentials for {uri}",
        "RequestTimeTooSkewed": f"S3 refused {uri} because this node's clock is wrong: correct it",
    }
    return reasons.get(code, f"S3 refused {uri}: {error}")
