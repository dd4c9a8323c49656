"""What an artifact is: files under a manifest, named by one digest. Reads and writes manifests; opens no file.

Both sides use it, nodes before they load weights and the control plane before it lets a version serve. It uses the
standard library alone, because engine launchers import it in the engine's own Python.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine_agent.protocol.strict_json import strict_loads

MANIFEST_NAME = "manifest.json"
DIGEST_PREFIX = "sha256:"


class BadArtifact(Exception):
    """It is not the artifact that it should be; the text names the file and what differs."""


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


def manifest_text(manifest: Manifest) -> str:
    """What `manifest.json` holds."""
    listed = {"digest": manifest.digest, "source": dict(manifest.source), "files": dict(manifest.files)}
    return json.dumps(listed, indent=2) + "\n"


def parse_manifest(text: str | bytes, where: str) -> Manifest:
    """The manifest that a `manifest.json` holds; `where` names it in errors.

    Raises:
        BadArtifact: it is not a manifest, or its own digest does not fit its list of files.
    """
    try:
        content: Any = strict_loads(text)
        manifest = Manifest(_text_map(content["files"]), _text_map(content["source"]))
        digest = content["digest"]
    except (ValueError, KeyError, TypeError) as error:
        raise BadArtifact(f"{where} is not a manifest: {error!r}") from error
    if digest != manifest.digest:
        raise BadArtifact(f"{where} lists files of digest {manifest.digest} but names {digest}")
    return manifest


def lies_outside(path: str) -> bool:
    """Whether a path of a manifest leads out of the artifact: an absolute one, or one that climbs."""
    return not path or path.startswith("/") or "\\" in path or ".." in path.split("/")


def _text_map(value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise TypeError(f"expected an object of strings, not {value!r:.80}")
    return value
