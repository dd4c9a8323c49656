"""Decides which artifact URIs may be read, and rejects bad manifests before any file is read. Pure: it never opens a
file or a connection."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from engine_agent.protocol.manifest import (
    MANIFEST_NAME,
    MOST_FILES,
    MOST_MANIFEST_BYTES,
    BadArtifact,
    Manifest,
    wrong_list,
)

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
"""https://docs.aws.amazon.com/AmazonS3/latest/userguide/bucketnamingrules.html"""
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_UNPRINTABLE = re.compile(r"[\x00-\x20\x7f?#]")
_RULE = "it must be file:///absolute/path or s3://bucket/prefix"


@dataclass(frozen=True, slots=True)
class ArtifactLimits:
    manifest_bytes: int = MOST_MANIFEST_BYTES
    files: int = MOST_FILES
    artifact_bytes: int = 4 * 1024**4
    validation_s: float = 4 * 3600.0
    file_s: float = 480.0
    """Below the Celery task's limit. One stream of 80 MB/s reads 38 GB; shards of checkpoints have 5 to 10 GB."""
    troubles: int = 5
    """Failed requests to a source after which the validation is given up."""


@dataclass(frozen=True, slots=True)
class Place:
    """A parsed URI. `host` is the bucket, or empty for a folder. `path` has no trailing slash and, for a bucket, no
    leading one."""

    scheme: str
    host: str
    path: str

    def __str__(self) -> str:
        return f"s3://{self.host}/{self.path}".rstrip("/") if self.scheme == "s3" else f"file://{self.path}"

    def holds(self, other: "Place") -> bool:
        """Whether the other place is this one or inside it."""
        if (self.scheme, self.host) != (other.scheme, other.host):
            return False
        return self.path in ("", other.path) or other.path.startswith(self.path + "/")


def size_words(size_bytes: int) -> str:
    for unit, length in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size_bytes >= length:
            return f"{size_bytes / length:.1f} {unit}"
    return f"{size_bytes} B"


def parse_place(uri: str) -> Place:
    """Parse the URI of an artifact or of an artifact source. Raises BadArtifact if it is neither a folder nor an S3
    prefix, or its path contains `..`."""
    try:
        parts = urlsplit(uri)
    except ValueError as error:
        raise BadArtifact(f"{uri!r} is not a URI ({error}); {_RULE}") from None
    if _UNPRINTABLE.search(uri):
        raise BadArtifact(f"{uri!r} has spaces, a query or a fragment; {_RULE}, with other characters percent-encoded")
    path = unquote(parts.path).rstrip("/")
    if "\x00" in path or ".." in path.split("/"):
        raise BadArtifact(f"{uri!r} leaves its folder; {_RULE}, without ..")
    if parts.scheme == "file" and parts.netloc in ("", "localhost") and path.startswith("/"):
        return Place("file", "", path)
    if parts.scheme == "s3" and _BUCKET.fullmatch(parts.netloc):
        return Place("s3", parts.netloc, path.lstrip("/"))
    raise BadArtifact(f"{uri!r} is not an artifact URI; {_RULE}")


def check_source(place: Place, sources: Iterable[Place]) -> None:
    """Check that the place is inside an allowed source. Raises BadArtifact if no allowed source contains it."""
    allowed = list(sources)
    if not any(source.holds(place) for source in allowed):
        listed = ", ".join(map(str, allowed)) or "none"
        raise BadArtifact(f"{place} is outside the allowed sources; SWITCHYARD_ARTIFACT_SOURCES has {listed}")


def check_manifest(place: Place, manifest: Manifest, expected_digest: str, limits: ArtifactLimits) -> None:
    """Check a manifest before its files are read. An empty `expected_digest` accepts any digest. Raises BadArtifact if
    the digest differs, too many files are listed, or a listed file is not allowed."""
    if expected_digest and manifest.digest != expected_digest:
        raise BadArtifact(f"{place} has the digest {manifest.digest}, but the version expects {expected_digest}")
    if wrong := wrong_list(manifest, limits.files):
        raise BadArtifact(f"{place}/{MANIFEST_NAME} {wrong}")


def check_sizes(place: Place, manifest: Manifest, sizes: Mapping[str, int], limits: ArtifactLimits) -> None:
    """Compare the files that exist with those in the manifest. Raises BadArtifact if a file is missing or not listed,
    or the total size is over the limit."""
    if missing := sorted(manifest.files.keys() - sizes.keys()):
        raise BadArtifact(
            f"{place}/{missing[0]} is missing; {len(missing)} files of {MANIFEST_NAME} are missing in total"
        )
    if strange := sorted(sizes.keys() - manifest.files.keys()):
        raise BadArtifact(
            f"{place}/{strange[0]} is not in {MANIFEST_NAME}; {len(strange)} files are not listed in total"
        )
    total = sum(sizes.values())
    if total > limits.artifact_bytes:
        raise BadArtifact(
            f"{place} has {size_words(total)}; the limit is {size_words(limits.artifact_bytes)} "
            "(SWITCHYARD_ARTIFACT_MAX_GIB)"
        )
