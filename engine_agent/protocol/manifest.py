"""Manifests of artifacts: the digests of an artifact's files, identified by one digest. Reads and writes manifests, no
files. Nodes use it before they load weights, and the control plane before a version may serve. It needs only the
standard library, because engine launchers import it in the engine's own Python."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine_agent.protocol.strict_json import strict_loads

MANIFEST_NAME = "manifest.json"
DIGEST_PREFIX = "sha256:"
LONGEST_NAME_BYTES, LONGEST_PATH = 255, 1024
"""Limits of file names on Linux and of keys in S3."""
MOST_MANIFEST_BYTES = 8 * 1024 * 1024
MOST_FILES = 10_000
"""Checkpoints of 405 billion parameters have about 200 files."""


class BadArtifact(Exception):
    """The artifact differs from its manifest; the text names the file and the difference."""


@dataclass(frozen=True)
class Manifest:
    """The digest of every file by its path in the folder (POSIX, relative), and `source`: the origin of the
    artifact."""

    files: Mapping[str, str]
    source: Mapping[str, str]

    @property
    def digest(self) -> str:
        """`sha256:<hex>` over the sorted lines `<sha256 of the file>  <path>`, in the format of sha256sum."""
        lines = sorted(f"{file_digest}  {path}\n" for path, file_digest in self.files.items())
        return DIGEST_PREFIX + hashlib.sha256("".join(lines).encode()).hexdigest()


def manifest_text(manifest: Manifest) -> str:
    listed = {"digest": manifest.digest, "source": dict(manifest.source), "files": dict(manifest.files)}
    return json.dumps(listed, indent=2) + "\n"


def parse_manifest(text: str | bytes, where: str) -> Manifest:
    """Parses a `manifest.json`; `where` names it in errors. Raises BadArtifact if it is not a manifest, or its digest
    does not match its list of files."""
    try:
        content: Any = strict_loads(text)
        manifest = Manifest(_text_map(content["files"]), _text_map(content["source"]))
        digest = content["digest"]
    except (ValueError, KeyError, TypeError) as error:
        raise BadArtifact(f"{where} is not a manifest: {error!r}") from error
    if digest != manifest.digest:
        raise BadArtifact(f"{where} lists files of digest {manifest.digest} but names {digest}")
    return manifest


def wrong_path(path: str) -> str:
    """What is wrong with the path of a file in a manifest, or an empty text. Each file has one name, in the folder."""
    parts = path.split("/")
    if path.startswith("/") or "\\" in path or ".." in parts:
        return "which is outside of the artifact"
    if "" in parts or "." in parts:
        return "which is not a plain path: names separated by single slashes"
    if not path.isprintable():
        return "which has unprintable characters"
    if any(len(part.encode(errors="surrogatepass")) > LONGEST_NAME_BYTES for part in parts) or len(path) > LONGEST_PATH:
        return f"which is too long: {LONGEST_PATH} characters, {LONGEST_NAME_BYTES} bytes per name"
    return "which is the manifest itself" if path == MANIFEST_NAME else ""


def wrong_list(manifest: Manifest, most_files: int) -> str:
    """The first problem in a manifest's list of files, or an empty text: their number, a path, a digest, or a file that
    another path uses as a folder."""
    if not manifest.files:
        return "lists no file"
    if len(manifest.files) > most_files:
        return f"lists {len(manifest.files)} files; at most {most_files} may be"
    for path, digest in manifest.files.items():
        if wrong := wrong_path(path):
            return f"lists {path[:200]!r}, {wrong}"
        if not is_sha256(digest):
            return f"lists {path!r} with {digest[:80]!r}; it must be a SHA-256, 64 hexadecimal digits"
        above = path.rpartition("/")[0]
        while above and above not in manifest.files:
            above = above.rpartition("/")[0]
        if above:
            return f"lists {above!r} as a file and as the folder of {path!r}"
    return ""


def is_sha256(text: str) -> bool:
    """Whether a text is a SHA-256 as in manifests: 64 lower-case hexadecimal digits."""
    return len(text) == 64 and not set(text) - set("0123456789abcdef")


def _text_map(value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise TypeError(f"expected an object of strings, not {value!r:.80}")
    return value
