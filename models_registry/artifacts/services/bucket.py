"""Writes to a prefix of an S3 bucket, and uploads a folder to one as an artifact. It never overwrites an object: an
uploaded artifact never changes."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from engine_agent.protocol.manifest import (
    MANIFEST_NAME,
    BadArtifact,
    Manifest,
    manifest_text,
    parse_manifest,
    wrong_list,
)
from kernel.outside_transaction import refuse_inside_transaction
from models_registry.artifacts.planner import ArtifactLimits, Place, size_words
from models_registry.artifacts.services.sources import SourceTrouble

PART_BYTES = 64 * 1024**2
"""Of a multipart upload, which has at most 10,000 parts: files of up to 640 GB."""
PUSH_CONNECT_TIMEOUT_S, PUSH_READ_TIMEOUT_S = 10, 60
PUSH_ATTEMPTS = 5
DIGEST_FIELD = "sha256"
"""Metadata key of the SHA-256, by which a resumed upload recognizes objects that are already there."""
_TAKEN = ("PreconditionFailed", "412", "ConditionalRequestConflict", "409")

Say = Callable[[str], None]


def artifact_push(folder: Path, place: Place, say: Say) -> Manifest:
    """Upload the folder and return its manifest. An interrupted upload resumes with the missing files. Raises
    BadArtifact if the folder is not a valid artifact, the prefix has other content, or S3 refuses, and SourceTrouble if
    S3 does not answer."""
    manifest = _folder_manifest(folder, say)
    if place.scheme != "s3":
        raise BadArtifact(f"{place} is not an S3 prefix; it must be s3://bucket/prefix")
    prefix = BucketPrefix(place)
    if prefix.holds(MANIFEST_NAME):
        raise BadArtifact(f"{place} already has another artifact, and artifacts never change: push to another prefix")
    for path, digest in sorted(manifest.files.items()):
        size = (folder / path).stat().st_size
        brought = prefix.upload(folder / path, path, digest, size)
        say(f"{path}: {size_words(size)}{'' if brought else ', already uploaded'}")
    prefix.finish(manifest_text(manifest).encode())
    return manifest


def _folder_manifest(folder: Path, say: Say) -> Manifest:
    """The manifest of the folder; an existing manifest file must agree with it."""
    if not folder.is_dir():
        raise BadArtifact(f"{folder} is not a folder")
    files: dict[str, str] = {}
    try:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and path != folder / MANIFEST_NAME:
                files[path.relative_to(folder).as_posix()] = _sha256(path)
        stated = (folder / MANIFEST_NAME).read_bytes() if (folder / MANIFEST_NAME).exists() else b""
    except OSError as error:
        raise BadArtifact(f"{error.filename} cannot be read: {error.strerror}") from error
    listed = parse_manifest(stated, str(folder / MANIFEST_NAME)) if stated else None
    manifest = Manifest(files, listed.source if listed is not None else {})
    if wrong := wrong_list(manifest, ArtifactLimits().files):
        raise BadArtifact(f"{folder} cannot be an artifact: it {wrong}")
    if listed is not None and listed.digest != manifest.digest:
        raise BadArtifact(
            f"{folder / MANIFEST_NAME} has the digest {listed.digest}, but the files have {manifest.digest}: "
            "remove it to push them"
        )
    say(f"{folder}: {len(files)} files, {manifest.digest}")
    return manifest


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _once(params: dict[str, Any], **_: Any) -> dict[str, Any]:
    """Parameters of a put that fails if the object exists. boto3's upload functions do not accept them."""
    return {**params, "IfNoneMatch": "*"}


class BucketPrefix:
    """A prefix of a bucket, written with the process's credentials."""

    def __init__(self, place: Place) -> None:
        import boto3
        from boto3.s3.transfer import TransferConfig
        from botocore.config import Config

        config = Config(
            connect_timeout=PUSH_CONNECT_TIMEOUT_S,
            read_timeout=PUSH_READ_TIMEOUT_S,
            retries={"total_max_attempts": PUSH_ATTEMPTS, "mode": "standard"},
        )
        self._place = place
        with self._explained(""):
            self._client = boto3.client("s3", config=config)
        for operation in ("PutObject", "CompleteMultipartUpload"):
            self._client.meta.events.register(f"provide-client-params.s3.{operation}", _once)
        self._transfer = TransferConfig(multipart_threshold=PART_BYTES, multipart_chunksize=PART_BYTES)

    def holds(self, path: str, digest: str = "") -> bool:
        """Whether the object exists. Raises BadArtifact if it exists with another digest."""
        from botocore.exceptions import ClientError

        try:
            with self._explained(path, but=("404", "NoSuchKey")):
                found = self._client.head_object(Bucket=self._place.host, Key=self._key(path))
        except ClientError:
            return False
        if digest and found.get("Metadata", {}).get(DIGEST_FIELD) != digest:
            raise BadArtifact(f"{self._place}/{path} exists with other content: push to another prefix")
        return True

    def upload(self, file: Path, path: str, digest: str, size: int) -> bool:
        """Upload a file, in parts if it is large. Returns False if it exists already."""
        from botocore.exceptions import ClientError

        if self.holds(path, digest):
            return False
        extra = {"ChecksumAlgorithm": "SHA256", "Metadata": {DIGEST_FIELD: digest}}
        try:
            with self._explained(path, but=_TAKEN), file.open("rb") as content:
                self._client.upload_fileobj(
                    content, self._place.host, self._key(path), ExtraArgs=extra, Config=self._transfer
                )
        except ClientError:
            return not self.holds(path, digest)  # another push was faster
        except OSError as error:
            raise BadArtifact(f"{file} cannot be read: {error.strerror}") from error
        if file.stat().st_size != size:
            raise BadArtifact(f"{file} changed during the upload; push again, to another prefix")
        return True

    def open(self, path: str) -> "tuple[IO[bytes], int] | None":
        """The content of an object and its length; None if it does not exist."""
        from botocore.exceptions import ClientError

        try:
            with self._explained(path, but=("404", "NoSuchKey")):
                answer = self._client.get_object(Bucket=self._place.host, Key=self._key(path))
        except ClientError:
            return None
        return answer["Body"], answer["ContentLength"]

    def names(self, *, deep: bool = False) -> Iterator[tuple[str, float]]:
        """The objects directly in the prefix, and when each was written, in seconds since 1970. `deep`: also those in
        its folders."""
        with self._explained(""):
            pages = self._client.get_paginator("list_objects_v2")
            stop = {} if deep else {"Delimiter": "/"}
            for page in pages.paginate(Bucket=self._place.host, Prefix=self._key(""), **stop):
                for item in page.get("Contents", ()):
                    yield item["Key"][len(self._key("")) :], item["LastModified"].timestamp()

    def remove(self, path: str) -> None:
        with self._explained(path):
            self._client.delete_object(Bucket=self._place.host, Key=self._key(path))

    def finish(self, manifest: bytes) -> None:
        from botocore.exceptions import ClientError

        key = self._key(MANIFEST_NAME)
        try:
            with self._explained(MANIFEST_NAME, but=_TAKEN):
                self._client.put_object(Bucket=self._place.host, Key=key, Body=manifest, ChecksumAlgorithm="SHA256")
        except ClientError as error:
            raise BadArtifact(
                f"{self._place}/{MANIFEST_NAME} was written by another push meanwhile and was left unchanged"
            ) from error

    def _key(self, path: str) -> str:
        return f"{self._place.path}/{path}" if self._place.path else path

    @contextmanager
    def _explained(self, path: str, but: tuple[str, ...] = ()) -> Iterator[None]:
        """Turns S3 errors into `BadArtifact` or `SourceTrouble`, except those whose code is in `but`."""
        from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

        where = f"{self._place}/{path}".rstrip("/")
        refuse_inside_transaction(f"access to {where}")
        try:
            yield
        except ClientError as error:
            code = str(error.response["Error"]["Code"])
            if code in but:
                raise
            rights = (
                f"the credentials may not write {where}: they need s3:PutObject, s3:GetObject and s3:ListBucket there"
            )
            reasons = {
                "NoSuchBucket": f"bucket {self._place.host} does not exist",
                "AccessDenied": rights,
                "403": rights,
            }
            raise BadArtifact(reasons.get(code, f"S3 refused {where}: {error}")) from error
        except NoCredentialsError as error:
            raise BadArtifact(f"{where}: no AWS credentials found; run `aws configure`, or use a role") from error
        except BotoCoreError as error:
            raise SourceTrouble(f"{where} was not uploaded: {error}; push again to continue") from error
