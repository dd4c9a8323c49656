"""Opens an artifact where it lies, if it may come from there, and reads its files: those of folders of this machine,
and through `artifact_bucket` those of S3. Stores and decides nothing."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from engine_agent.protocol.manifest import MANIFEST_NAME, BadArtifact, Manifest, parse_manifest
from engine_agent.protocol.messages import Artifact
from models_registry.planning.artifact_rules import (
    ArtifactLimits,
    Place,
    check_manifest,
    check_sizes,
    check_source,
    parse_place,
)
from models_registry.services.artifact_source import CHUNK_BYTES, ArtifactSource, SourceTrouble


@dataclass(frozen=True, slots=True)
class OpenArtifact:
    """An artifact whose manifest was read and fits what lies there; `sizes` are bytes by path."""

    uri: str
    source: ArtifactSource
    manifest: Manifest
    sizes: Mapping[str, int]


def artifact_open(artifact: Artifact, sources: tuple[Place, ...], limits: ArtifactLimits) -> OpenArtifact:
    """Read the manifest and the list of files.

    Raises:
        BadArtifact: it may not come from there, is not there, is another one than its digest says, or is too large.
        SourceTrouble: the source does not answer.
    """
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
        from models_registry.services.artifact_bucket import BucketSource  # boto3 takes a while to import

        return BucketSource(place, limits)
    return FolderSource(place, sources, limits)


def file_sha256(artifact: OpenArtifact, path: str, progress: Callable[[int], None]) -> str:
    """Hexadecimal SHA-256 of a file; `progress` is called with the bytes read so far after each piece.

    Raises:
        BadArtifact: the file is not there any more, or longer than it was.
        SourceTrouble: the source stopped answering.
    """
    digest, read = hashlib.sha256(), 0
    for chunk in artifact.source.chunks(path):
        digest.update(chunk)
        read += len(chunk)
        if read > artifact.sizes[path]:
            raise BadArtifact(f"{artifact.uri}/{path} is longer than the {artifact.sizes[path]} bytes that it had")
        progress(read)
    return digest.hexdigest()


class FolderSource:
    """An artifact in a folder of this machine. Links are followed as long as they stay within the allowed sources."""

    def __init__(self, place: Place, sources: Iterable[Place], limits: ArtifactLimits) -> None:
        self._place, self._limits = place, limits
        self._roots = [Path(source.path).resolve() for source in sources if source.scheme == "file"]
        self._folder = self._within(Path(place.path))
        if not self._folder.is_dir():
            raise BadArtifact(f"{place} is no folder on the control plane's machine; put the artifact there, or in S3")

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
                raise BadArtifact(f"{self._place} holds more than {self._limits.files} files")
        return sizes

    def chunks(self, path: str) -> Iterator[bytes]:
        return self._read(self._within(self._folder / path), None)

    def _within(self, path: Path) -> Path:
        real = path.resolve()
        if not any(real.is_relative_to(root) for root in self._roots):
            raise BadArtifact(f"{path} leads to {real}, outside of the sources that artifacts may come from")
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
