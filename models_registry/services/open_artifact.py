"""Opens an artifact where it lies, if it may come from there, and reads its files. Stores and decides nothing."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

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
from models_registry.services.artifact_source import ArtifactSource, FolderSource


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
    """Hexadecimal SHA-256 of a file; `progress` is told after each piece how many bytes were read.

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
