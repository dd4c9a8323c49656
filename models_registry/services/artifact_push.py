"""Uploads a folder of model files to a prefix in S3, once: each file under its SHA-256, the manifest last. Nothing that
is there is ever written over, so whoever reads a manifest can rely on it for ever."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine_agent.protocol.manifest import (
    MANIFEST_NAME,
    BadArtifact,
    Manifest,
    manifest_text,
    parse_manifest,
    wrong_list,
)
from models_registry.planning.artifact_rules import ArtifactLimits, Place, size_words

PART_BYTES = 64 * 1024**2
"""Of an upload in parts, of which S3 takes 10,000: files of up to 640 GB."""
CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 10, 60
ATTEMPTS = 5
DIGEST_FIELD = "sha256"
"""Of an object's metadata, by which an upload that broke off finds what it has brought."""
_TAKEN = ("PreconditionFailed", "412", "ConditionalRequestConflict", "409")

Say = Callable[[str], None]


def artifact_push(folder: Path, place: Place, say: Say) -> Manifest:
    """Upload the folder to the place, and return its manifest. One that was cut off goes on with the missing files.

    Raises:
        BadArtifact: the folder is no artifact, the prefix holds something else already, or S3 refuses.
    """
    manifest = _described(folder, say)
    if place.scheme != "s3":
        raise BadArtifact(f"{place} is no place in S3; it must be s3://bucket/prefix")
    prefix = _Prefix(place)
    if prefix.holds(MANIFEST_NAME):
        raise BadArtifact(f"{place} holds an artifact already, and an artifact never changes: push to another prefix")
    for path, digest in sorted(manifest.files.items()):
        size = (folder / path).stat().st_size
        brought = prefix.upload(folder / path, path, digest, size)
        say(f"{path}: {size_words(size)}{'' if brought else ', there already'}")
    prefix.finish(manifest_text(manifest).encode())
    return manifest


def _described(folder: Path, say: Say) -> Manifest:
    """The manifest of the folder as it is; one that lies there must say the same."""
    if not folder.is_dir():
        raise BadArtifact(f"{folder} is no folder")
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
            f"{folder / MANIFEST_NAME} is of {listed.digest}, but the files are {manifest.digest}: remove it to push "
            "them"
        )
    say(f"{folder}: {len(files)} files, {manifest.digest}")
    return manifest


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _once(params: dict[str, Any], **_: Any) -> dict[str, Any]:
    """Parameters of a request that writes an object, which must not be there. boto3's uploads take none for that."""
    return {**params, "IfNoneMatch": "*"}


class _Prefix:
    """A prefix of a bucket, written with the credentials of whoever runs this."""

    def __init__(self, place: Place) -> None:
        import boto3  # takes a while
        from boto3.s3.transfer import TransferConfig
        from botocore.config import Config

        config = Config(
            connect_timeout=CONNECT_TIMEOUT_S,
            read_timeout=READ_TIMEOUT_S,
            retries={"total_max_attempts": ATTEMPTS, "mode": "standard"},
        )
        self._place = place
        with self._explained(""):
            self._client = boto3.client("s3", config=config)
        for operation in ("PutObject", "CompleteMultipartUpload"):
            self._client.meta.events.register(f"provide-client-params.s3.{operation}", _once)
        self._transfer = TransferConfig(multipart_threshold=PART_BYTES, multipart_chunksize=PART_BYTES)

    def holds(self, path: str, digest: str = "") -> bool:
        """Whether an object is there.

        Raises:
            BadArtifact: it is there, and not of the digest that is given.
        """
        from botocore.exceptions import ClientError

        try:
            with self._explained(path, but=("404", "NoSuchKey")):
                found = self._client.head_object(Bucket=self._place.host, Key=self._key(path))
        except ClientError:
            return False
        if digest and found.get("Metadata", {}).get(DIGEST_FIELD) != digest:
            raise BadArtifact(f"{self._place}/{path} is there and is another file: push to another prefix")
        return True

    def upload(self, file: Path, path: str, digest: str, size: int) -> bool:
        """Bring a file, in parts if it is large; False: it is there already."""
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
            return not self.holds(path, digest)  # another push was faster, with the same file or not
        except OSError as error:
            raise BadArtifact(f"{file} cannot be read: {error.strerror}") from error
        if file.stat().st_size != size:
            raise BadArtifact(f"{file} changed while it was uploaded; push again, to another prefix")
        return True

    def finish(self, manifest: bytes) -> None:
        from botocore.exceptions import ClientError

        key = self._key(MANIFEST_NAME)
        try:
            with self._explained(MANIFEST_NAME, but=_TAKEN):
                self._client.put_object(Bucket=self._place.host, Key=key, Body=manifest, ChecksumAlgorithm="SHA256")
        except ClientError as error:
            raise BadArtifact(
                f"{self._place} got its manifest by another push meanwhile; it was left as it is"
            ) from error

    def _key(self, path: str) -> str:
        return f"{self._place.path}/{path}" if self._place.path else path

    @contextmanager
    def _explained(self, path: str, but: tuple[str, ...] = ()) -> Iterator[None]:
        """Refusals of S3 as `BadArtifact`, except for those whose code is in `but`."""
        from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

        where = f"{self._place}/{path}".rstrip("/")
        try:
            yield
        except ClientError as error:
            code = str(error.response["Error"]["Code"])
            if code in but:
                raise
            rights = f"you may not write {where}: it needs s3:PutObject, s3:GetObject and s3:ListBucket there"
            reasons = {
                "NoSuchBucket": f"there is no bucket {self._place.host}",
                "AccessDenied": rights,
                "403": rights,
            }
            raise BadArtifact(reasons.get(code, f"S3 refused {where}: {error}")) from error
        except NoCredentialsError as error:
            raise BadArtifact(f"{where}: there are no AWS credentials; see `aws configure`, or a role") from error
        except BotoCoreError as error:
            raise BadArtifact(f"{where} was not uploaded: {error}; push again to go on") from error
