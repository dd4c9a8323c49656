"""What an artifact is: a folder of model files under a manifest, named by one digest. Writes and checks manifests.

It decides whether a folder is whole and is the one that was asked for. It never builds, downloads or repairs one.
It uses the standard library alone, because engine launchers import it in the engine's own Python.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MANIFEST_NAME = "manifest.json"
DIGEST_PREFIX = "sha256:"


class BadArtifact(Exception):
    """The folder is not the artifact that it should be; the text names the file and what differs."""


@dataclass(frozen=True)
class Manifest:
    """Digest of every file by its path in the folder (POSIX, relative), and `source`: what it was made from."""

    files: Mapping[str, str]
    source: Mapping[str, str]

    @property
    def digest(self) -> str:
        """`sha256:<hex>` over the sorted lines `<sha256 of the file>  <path>`, in the form that sha256sum prints."""
        lines = sorted(f"{file_digest}  {path}\n" for path, file_digest in self.files.items())
        return DIGEST_PREFIX + hashlib.sha256("".join(lines).encode()).hexdigest()


def describe_folder(folder: Path, source: Mapping[str, str]) -> Manifest:
    """The manifest of a folder as it is now; reads every file in it."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST_NAME)
    return Manifest({path.relative_to(folder).as_posix(): file_sha256(path) for path in paths}, source)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `manifest.json` into the folder."""
    text = json.dumps(
        {"digest": manifest.digest, "source": dict(manifest.source), "files": dict(manifest.files)}, indent=2
    )
    (folder / MANIFEST_NAME).write_text(text + "\n")


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a folder, without looking at the other files.

    Raises:
        BadArtifact: there is none, or it is not a manifest, or its own digest does not fit its list of files.
    """
    path = folder / MANIFEST_NAME
    try:
        content: Any = json.loads(path.read_text())
        manifest = Manifest(_text_map(content["files"]), _text_map(content["source"]))
        digest = content["digest"]
    except FileNotFoundError:
        raise BadArtifact(f"{folder} is no artifact: it has no {MANIFEST_NAME}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise BadArtifact(f"{path} is not a manifest: {error!r}") from error
    if digest != manifest.digest:
        raise BadArtifact(f"{path} lists files of digest {manifest.digest} but names {digest}")
    return manifest


def verify_folder(folder: Path, expected_digest: str | None = None) -> Manifest:
    """Check every file against the manifest, and the manifest against `expected_digest` if given.

    Raises:
        BadArtifact: a file is missing, changed or not listed, or it is another artifact than the expected one.
    """
    listed = read_manifest(folder)
    if expected_digest is not None and listed.digest != expected_digest:
        raise BadArtifact(f"{folder} holds {listed.digest}, but {expected_digest} was asked for")
    found = describe_folder(folder, listed.source)
    for path in sorted(listed.files.keys() | found.files.keys()):
        if path not in found.files:
            raise BadArtifact(f"{folder / path} is missing")
        if path not in listed.files:
            raise BadArtifact(f"{folder / path} is not in {MANIFEST_NAME}")
        if found.files[path] != listed.files[path]:
            raise BadArtifact(
                f"{folder / path} is corrupt: sha256 {found.files[path]}, {MANIFEST_NAME} has {listed.files[path]}"
            )
    return listed


def file_sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _text_map(value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise TypeError(f"expected an object of strings, not {value!r:.80}")
    return value
