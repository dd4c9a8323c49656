"""Reads artifacts from folders and S3. It reads only allowed sources and follows no redirects."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from engine_agent.protocol.manifest import MANIFEST_NAME, BadArtifact, Manifest, parse_manifest
from engine_agent.protocol.messages import Artifact
from kernel.outside_transaction import refuse_inside_transaction
from models_registry.artifacts.planner import (
    ArtifactLimits,
    Place,
    check_manifest,
    check_sizes,
    check_source,
    parse_place,
    size_words,
)
from models_registry.versions.planning.checkpoint import (
    CONFIG_BYTES_MAX,
    CONFIG_NAME,
    FILES_MAX,
    HEADER_BYTES_MAX,
    HEADER_LENGTH_BYTES,
    Checkpoint,
    UnreadableCheckpoint,
    read_checkpoint,
)

if TYPE_CHECKING:
    from botocore.exceptions import ClientError

CHUNK_BYTES = 4 * 1024 * 1024


class SourceTrouble(Exception):
    """The source did not answer as expected; a retry may help."""


class ArtifactSource(Protocol):
    """An artifact in a folder or bucket. Calls raise `BadArtifact` for permanent errors and `SourceTrouble` for
    transient ones."""

    def manifest(self) -> bytes:
        """The bytes of `manifest.json`, within the limit."""

    def sizes(self) -> dict[str, int]:
        """Size in bytes of every other file, by path."""

    def chunks(self, path: str) -> Iterator[bytes]:
        """The content of a file, in chunks."""


CONNECT_TIMEOUT_S = 5
READ_TIMEOUT_S = 10
ATTEMPTS = 2
"""Of one request, in botocore. The validation has its own retries."""


class BucketSource:
    """An artifact under a prefix of a bucket. Credentials, region and endpoint come from boto3's settings."""

    def __init__(self, place: Place, limits: ArtifactLimits) -> None:
        import boto3  # takes a while
        from botocore.config import Config

        self._place, self._limits = place, limits
        timeouts = {"connect_timeout": CONNECT_TIMEOUT_S, "read_timeout": READ_TIMEOUT_S}
        config = Config(retries={"total_max_attempts": ATTEMPTS, "mode": "standard"}, **timeouts)
        with self._explained(MANIFEST_NAME):
            self._client = boto3.client("s3", config=config)
        self._client.meta.events.register("before-send.s3", one_host())

    def manifest(self) -> bytes:
        with self._explained(MANIFEST_NAME):
            answer = self._client.get_object(Bucket=self._place.host, Key=self._key(MANIFEST_NAME))
            if answer["ContentLength"] > self._limits.manifest_bytes:
                raise BadArtifact(
                    f"{self._place}/{MANIFEST_NAME} has {answer['ContentLength']} bytes; the limit is "
                    f"{self._limits.manifest_bytes}"
                )
            return bytes(answer["Body"].read(self._limits.manifest_bytes))

    def sizes(self) -> dict[str, int]:
        start, sizes = self._key(""), dict[str, int]()
        with self._explained(""):
            pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._place.host, Prefix=start)
            for page in pages:
                sizes |= {item["Key"][len(start) :]: item["Size"] for item in page.get("Contents", ())}
                if len(sizes) > self._limits.files + 1:
                    raise BadArtifact(f"{self._place} has more than {self._limits.files} files")
        # Consoles create an empty object for a folder; it is not part of the artifact.
        return {path: size for path, size in sizes.items() if path != MANIFEST_NAME and not path.endswith("/") and path}

    def chunks(self, path: str) -> Iterator[bytes]:
        with self._explained(path):
            body = self._client.get_object(Bucket=self._place.host, Key=self._key(path))["Body"]
            with body:
                yield from body.iter_chunks(CHUNK_BYTES)

    def _key(self, path: str) -> str:
        return f"{self._place.path}/{path}" if self._place.path else path

    @contextmanager
    def _explained(self, path: str) -> Iterator[None]:
        from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

        where = f"{self._place}/{path}".rstrip("/")
        refuse_inside_transaction(f"reading {where}")
        try:
            yield
        except ClientError as error:
            raise _explain(error, where, self._place.host) from error
        except NoCredentialsError as error:
            raise BadArtifact(f"{where}: the control plane has no AWS credentials for it") from error
        except BotoCoreError as error:
            raise SourceTrouble(f"{where}: {error}") from error


def one_host() -> Callable[..., None]:
    """A `before-send` handler for botocore that allows only the host of the first request, so that no redirect is
    followed. Raises BadArtifact if a request goes to another host."""
    first: list[str] = []

    def check(request: Any, **_: Any) -> None:
        host = urlsplit(request.url).netloc
        first[:] = first or [host]
        if host != first[0]:
            raise BadArtifact(f"a redirect from {first[0]} to {host} was not followed")

    return check


def _explain(error: "ClientError", where: str, bucket: str) -> Exception:
    code = str(error.response["Error"]["Code"])
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    if code in ("NoSuchBucket", "InvalidBucketName"):
        return BadArtifact(f"bucket {bucket} does not exist")
    if code in ("NoSuchKey", "404"):
        how = ": upload the artifact with manage.py artifact_push" if where.endswith(MANIFEST_NAME) else ""
        return BadArtifact(f"{where} does not exist{how}")
    if status in (301, 302, 307, 308) or code in ("PermanentRedirect", "AuthorizationHeaderMalformed"):
        region = error.response["ResponseMetadata"].get("HTTPHeaders", {}).get("x-amz-bucket-region", "another region")
        return BadArtifact(
            f"bucket {bucket} is in {region}, and redirects are not followed: set AWS_REGION to {region}"
        )
    if status in (401, 403):
        return BadArtifact(f"the control plane may not read {where}: it needs s3:GetObject and s3:ListBucket there")
    return SourceTrouble(f"{where}: S3 answered {code} ({status})")


@dataclass(frozen=True, slots=True)
class OpenArtifact:
    """An artifact whose manifest matches its files. `sizes`: bytes by path."""

    uri: str
    source: ArtifactSource
    manifest: Manifest
    sizes: Mapping[str, int]


def artifact_open(artifact: Artifact, sources: tuple[Place, ...], limits: ArtifactLimits) -> OpenArtifact:
    """Read the manifest and the list of files. Raises BadArtifact if it is not allowed, does not exist, has another
    digest, or is too large. Raises SourceTrouble if the source does not answer."""
    place = parse_place(artifact.uri)
    check_source(place, sources)
    source = _source(place, sources, limits)
    manifest = parse_manifest(source.manifest(), f"{place}/{MANIFEST_NAME}")
    check_manifest(place, manifest, artifact.digest, limits)
    sizes = source.sizes()
    check_sizes(place, manifest, sizes, limits)
    return OpenArtifact(artifact.uri, source, manifest, sizes)


def _source(place: Place, sources: tuple[Place, ...], limits: ArtifactLimits) -> ArtifactSource:
    if place.scheme == "s3":
        return BucketSource(place, limits)
    return FolderSource(place, sources, limits)


def file_sha256(artifact: OpenArtifact, path: str, progress: Callable[[int], None]) -> str:
    """Hexadecimal SHA-256 of a file. Calls `progress` with the number of bytes read after each chunk. Raises
    BadArtifact if the file was removed or has grown. Raises SourceTrouble if the source stopped answering."""
    digest, read = hashlib.sha256(), 0
    for chunk in artifact.source.chunks(path):
        digest.update(chunk)
        read += len(chunk)
        if read > artifact.sizes[path]:
            raise BadArtifact(f"{artifact.uri}/{path} has grown beyond its {artifact.sizes[path]} bytes")
        progress(read)
    return digest.hexdigest()


def checkpoint_read(artifact: OpenArtifact) -> Checkpoint | None:
    """The dimensions and tensor sizes of an artifact, from `config.json` and the first bytes of its safetensors files;
    None without a `config.json`. Raises UnreadableCheckpoint if they make no sense, SourceTrouble if the source stopped
    answering."""
    if CONFIG_NAME not in artifact.sizes:
        return None
    files = [path for path in sorted(artifact.sizes) if path.endswith(".safetensors")]
    if artifact.sizes[CONFIG_NAME] > CONFIG_BYTES_MAX or len(files) > FILES_MAX:
        raise UnreadableCheckpoint(
            f"{CONFIG_NAME} may have {size_words(CONFIG_BYTES_MAX)}, and a checkpoint {FILES_MAX} safetensors files"
        )
    config = _first_bytes(artifact, CONFIG_NAME, CONFIG_BYTES_MAX)
    return read_checkpoint(config, (_safetensors_header(artifact, path) for path in files))


def _safetensors_header(artifact: OpenArtifact, path: str) -> bytes:
    length = int.from_bytes(_first_bytes(artifact, path, HEADER_LENGTH_BYTES), "little")
    if not 2 <= length <= HEADER_BYTES_MAX:
        raise UnreadableCheckpoint(f"{path}: its header has {length} bytes; the limit is {HEADER_BYTES_MAX}")
    return _first_bytes(artifact, path, HEADER_LENGTH_BYTES + length)[HEADER_LENGTH_BYTES:]


def _first_bytes(artifact: OpenArtifact, path: str, most: int) -> bytes:
    found = bytearray()
    chunks = artifact.source.chunks(path)
    while len(found) < most and (chunk := next(chunks, b"")):
        found += chunk
    return bytes(found[:most])


class FolderSource:
    """An artifact in a local folder. Links are followed within the allowed sources."""

    def __init__(self, place: Place, sources: Iterable[Place], limits: ArtifactLimits) -> None:
        self._place, self._limits = place, limits
        self._roots = [Path(source.path).resolve() for source in sources if source.scheme == "file"]
        self._folder = self._within(Path(place.path))
        if not self._folder.is_dir():
            raise BadArtifact(f"{place} is not a folder on the control plane's host; put the artifact there, or in S3")

    def manifest(self) -> bytes:
        path = self._within(self._folder / MANIFEST_NAME)
        if not path.is_file():
            raise BadArtifact(f"{self._place} has no {MANIFEST_NAME}: write it with engine_agent.engines.artifacts")
        text = b"".join(self._read(path, self._limits.manifest_bytes + 1))
        if len(text) > self._limits.manifest_bytes:
            raise BadArtifact(f"{path} is larger than {self._limits.manifest_bytes} bytes")
        return text

    def sizes(self) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for path in self._folder.rglob("*"):
            if not path.is_file() or path == self._folder / MANIFEST_NAME:
                continue
            sizes[path.relative_to(self._folder).as_posix()] = self._within(path).stat().st_size
            if len(sizes) > self._limits.files:
                raise BadArtifact(f"{self._place} has more than {self._limits.files} files")
        return sizes

    def chunks(self, path: str) -> Iterator[bytes]:
        return self._read(self._within(self._folder / path), None)

    def _within(self, path: Path) -> Path:
        real = path.resolve()
        if not any(real.is_relative_to(root) for root in self._roots):
            raise BadArtifact(f"{path} links to {real}, which is outside the allowed sources")
        return real

    def _read(self, path: Path, most: int | None) -> Iterator[bytes]:
        left = most
        try:
            with path.open("rb") as file:
                while chunk := file.read(CHUNK_BYTES if left is None else min(CHUNK_BYTES, left)):
                    left = None if left is None else left - len(chunk)
                    yield chunk
        except (FileNotFoundError, PermissionError) as error:
            raise BadArtifact(f"{path} cannot be read: {error.strerror}") from error
        except OSError as error:
            raise SourceTrouble(f"{path}: {error.strerror}") from error
