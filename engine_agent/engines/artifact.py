"""An artifact on disk: a folder of model files under its manifest. Describes folders, and checks them.

It decides whether a folder is whole and is the one that was requested. It never builds, downloads or repairs one.
It uses the standard library alone, because engine launchers import it in the engine's own Python.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from engine_agent.protocol.manifest import MANIFEST_NAME, BadArtifact, Manifest, manifest_text, parse_manifest


def describe_folder(folder: Path, source: Mapping[str, str]) -> Manifest:
    """The manifest of a folder as it is now; reads every file in it."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST_NAME)
    return Manifest({path.relative_to(folder).as_posix(): file_sha256(path) for path in paths}, source)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `manifest.json` into the folder."""
    (folder / MANIFEST_NAME).write_text(manifest_text(manifest))


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a folder, without looking at the other files.

    Raises:
        BadArtifact: there is none, or it is not a manifest, or its own digest does not fit its list of files.
    """
    path = folder / MANIFEST_NAME
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        raise BadArtifact(f"{folder} is no artifact: it has no {MANIFEST_NAME}") from None
    return parse_manifest(text, str(path))


def verify_folder(folder: Path, expected_digest: str | None = None) -> Manifest:
    """Check every file against the manifest, and the manifest against `expected_digest` if given.

    Raises:
        BadArtifact: a file is missing, changed or not listed, or it is another artifact than the expected one.
    """
    listed = read_manifest(folder)
    if expected_digest is not None and listed.digest != expected_digest:
        raise BadArtifact(f"{folder} holds {listed.digest}, but {expected_digest} was asked for")
    actual = describe_folder(folder, listed.source)
    for path in sorted(listed.files.keys() | actual.files.keys()):
        if path not in actual.files:
            raise BadArtifact(f"{folder / path} is missing")
        if path not in listed.files:
            raise BadArtifact(f"{folder / path} is not in {MANIFEST_NAME}")
        if actual.files[path] != listed.files[path]:
            raise BadArtifact(
                f"{folder / path} is corrupt: sha256 {actual.files[path]}, {MANIFEST_NAME} has {listed.files[path]}"
            )
    return listed


def file_sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
