"""Brings an artifact from S3 to a folder of this node, whole or not at all.

Under the prefix lie `manifest.json` and the files that it lists. They are gathered in a folder beside the final one,
which is renamed to it at the end, so a folder that exists is complete. A broken download goes on where it stopped.
What a file's digest does not prove is never kept.
"""

import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from engine_agent.engines.artifact import file_sha256, read_manifest
from engine_agent.engines.exclusive import exclusively
from engine_agent.protocol.manifest import MANIFEST_NAME, BadArtifact, Manifest, lies_outside
from engine_agent.protocol.messages import Artifact

STREAMS = 8
"""Files at once. One stream of S3 gives about 80 MB/s, AWS says (Amazon S3 performance guidelines)."""
CHUNK_BYTES = 8 * 1024 * 1024
CONNECT_TIMEOUT_S = 10
READ_TIMEOUT_S = 60
ATTEMPTS = 5
FREE_RESERVE_BYTES = 1024**3
"""What a download leaves free for logs and journals."""

Say = Callable[[str], None]


class CannotFetch(Exception):
    """The artifact did not come; the text names the object or folder, what is wrong and what would help."""


@dataclass(frozen=True)
class _Place:
    bucket: str
    prefix: str

    def key(self, path: str) -> str:
        return f"{self.prefix}/{path}" if self.prefix else path

    def uri(self, path: str) -> str:
        return f"s3://{self.bucket}/{self.key(path)}"


def cached_folder(artifact: Artifact, cache: Path) -> Path:
    """Where an artifact from S3 lies in a cache: `<last part of its prefix>-<first 12 digits of its digest>`."""
    name = urlsplit(artifact.uri).path.rstrip("/").rpartition("/")[2] or urlsplit(artifact.uri).netloc
    return cache / f"{name}-{artifact.digest.removeprefix('sha256:')[:12]}"


def fetch_artifact(artifact: Artifact, cache: Path, say: Say) -> Path:
    """The folder of the artifact in `cache`, downloaded unless it is there. One process at a time does it.

    Each file is checked as it comes; whoever loads the artifact checks the folder as it is then.

    Raises:
        CannotFetch: it is not there, is another one than `artifact.digest` says, is not to be read with this node's
            credentials, or the disk is too small.
    """
    folder = cached_folder(artifact, cache)
    cache.mkdir(parents=True, exist_ok=True)
    lock = folder.with_name(folder.name + ".lock")
    with exclusively(lock, lambda: say(f"another process downloads {artifact.uri}; waiting for it")):
        if not folder.exists():
            _download(artifact, folder, say)
    return folder


def _download(artifact: Artifact, folder: Path, say: Say) -> None:
    from botocore.exceptions import BotoCoreError, ClientError

    place, client = _place(artifact.uri), _client()
    unfinished = folder.with_name(folder.name + ".partial")
    unfinished.mkdir(exist_ok=True)
    try:
        manifest = _manifest(client, place, unfinished, artifact)
        sizes = _sizes(client, place)
        missing = [path for path in manifest.files if path not in sizes]
        if missing:
            raise CannotFetch(f"{place.uri(missing[0])} is missing, one of {len(missing)} files of its manifest")
        _check_room(unfinished, manifest, sizes)
        say(f"downloading {artifact.uri}: {len(manifest.files)} files, {sum(map(sizes.__getitem__, manifest.files))} B")
        with ThreadPoolExecutor(STREAMS) as pool:
            for path in pool.map(lambda path: _file(client, place, unfinished, path, manifest), manifest.files):
                say(f"downloaded {path}")
    except ClientError as error:
        raise CannotFetch(_explained(error, artifact.uri)) from error
    except (BotoCoreError, OSError) as error:
        raise CannotFetch(f"{artifact.uri} did not arrive: {error}; what came so far is kept for next time") from error
    unfinished.rename(folder)


def _place(uri: str) -> _Place:
    parts = urlsplit(uri)
    if parts.scheme != "s3" or not parts.netloc:
        raise CannotFetch(f"{uri} is no place in S3; it must be s3://bucket/prefix")
    return _Place(parts.netloc, parts.path.strip("/"))


def _client() -> Any:
    import boto3
    from botocore.config import Config

    config = Config(
        connect_timeout=CONNECT_TIMEOUT_S,
        read_timeout=READ_TIMEOUT_S,
        max_pool_connections=STREAMS,
        retries={"max_attempts": ATTEMPTS, "mode": "standard"},
    )
    return boto3.client("s3", config=config)


def _manifest(client: Any, place: _Place, unfinished: Path, artifact: Artifact) -> Manifest:
    body = client.get_object(Bucket=place.bucket, Key=place.key(MANIFEST_NAME))["Body"].read()
    (unfinished / MANIFEST_NAME).write_bytes(body)
    try:
        manifest = read_manifest(unfinished)
    except BadArtifact as error:
        raise CannotFetch(f"{place.uri(MANIFEST_NAME)} is no manifest: {error}") from error
    if manifest.digest != artifact.digest:
        raise CannotFetch(f"{artifact.uri} holds {manifest.digest}, but {artifact.digest} was asked for")
    for path in manifest.files:
        if lies_outside(path):
            raise CannotFetch(f"{place.uri(MANIFEST_NAME)} lists {path!r}, which lies outside of the artifact")
    return manifest


def _sizes(client: Any, place: _Place) -> dict[str, int]:
    start = place.key("")
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=place.bucket, Prefix=start)
    return {item["Key"][len(start) :]: item["Size"] for page in pages for item in page.get("Contents", [])}


def _check_room(unfinished: Path, manifest: Manifest, sizes: Mapping[str, int]) -> None:
    have = sum(file.stat().st_size for file in unfinished.rglob("*") if file.is_file())
    needed = sum(sizes[path] for path in manifest.files) - have + FREE_RESERVE_BYTES
    free = shutil.disk_usage(unfinished).free
    if free < needed:
        raise CannotFetch(
            f"{unfinished.parent} has {free / 1e9:.1f} GB free and the artifact needs {needed / 1e9:.1f} GB more with "
            f"reserve: make room, or remove artifacts there that no model version names"
        )


def _file(client: Any, place: _Place, unfinished: Path, path: str, manifest: Manifest) -> str:
    """Bring one file, from where an earlier attempt stopped; a stale beginning costs one more attempt."""
    target = unfinished / path
    target.parent.mkdir(parents=True, exist_ok=True)
    beginning = target.with_name(target.name + ".part")
    if target.exists() and file_sha256(target) == manifest.files[path]:
        return path
    resumed, digest = beginning.exists(), ""
    for _ in range(2 if resumed else 1):
        _append(client, place, path, beginning)
        digest = file_sha256(beginning)
        if digest == manifest.files[path]:
            beginning.replace(target)
            return path
        beginning.unlink()
    raise CannotFetch(
        f"{place.uri(path)} has sha256 {digest}, {MANIFEST_NAME} says {manifest.files[path]}: upload the artifact again"
    )


def _append(client: Any, place: _Place, path: str, beginning: Path) -> None:
    from botocore.exceptions import ClientError

    have = beginning.stat().st_size if beginning.exists() else 0
    request = {"Range": f"bytes={have}-"} if have else {}
    try:
        body = client.get_object(Bucket=place.bucket, Key=place.key(path), **request)["Body"]
    except ClientError as error:
        if error.response["Error"]["Code"] != "InvalidRange":  # nothing is left to bring, or the object is shorter
            raise
        return
    with beginning.open("ab") as file:
        for chunk in body.iter_chunks(CHUNK_BYTES):
            file.write(chunk)


def _explained(error: Any, uri: str) -> str:
    code = str(error.response["Error"]["Code"])
    reasons = {
        "NoSuchKey": f"{uri} has no {MANIFEST_NAME}: write it with engine_agent.engines.artifact and upload it last",
        "NoSuchBucket": f"the bucket of {uri} does not exist",
        "AccessDenied": f"this node may not read {uri}: its role needs s3:GetObject and s3:ListBucket there",
    }
    return reasons.get(code, f"S3 refused {uri}: {error}")
