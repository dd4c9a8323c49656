"""Where artifacts are read from, to be checked: what any source offers, and folders of this machine.

A source lists and reads; whether what it holds is right is for `models_registry.planning.artifact_rules`.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

from engine_agent.protocol.manifest import MANIFEST_NAME, BadArtifact
from models_registry.planning.artifact_rules import ArtifactLimits, Place

CHUNK_BYTES = 4 * 1024 * 1024


class SourceTrouble(Exception):
    """The source did not answer as it should; trying again may help. The text says what happened."""


class ArtifactSource(Protocol):
    """An artifact at its place. Each call raises `BadArtifact` for what is wrong there and stays so, `SourceTrouble`
    for what may pass."""

    def manifest(self) -> bytes:
        """The bytes of `manifest.json`, within the limit."""

    def sizes(self) -> dict[str, int]:
        """Bytes of every other file by its path."""

    def chunks(self, path: str) -> Iterator[bytes]:
        """The content of a file, from its start."""


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
            raise BadArtifact(f"{self._place} has no {MANIFEST_NAME}: write it with engine_agent.engines.artifact")
        text = b"".join(self._read(path, self._limits.manifest_bytes + 1))
        if len(text) > self._limits.manifest_bytes:
            raise BadArtifact(f"{path} is larger than {self._limits.manifest_bytes} bytes")
        return text

    def sizes(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for path in self._folder.rglob("*"):
            if not path.is_file() or path == self._folder / MANIFEST_NAME:
                continue
            found[path.relative_to(self._folder).as_posix()] = self._within(path).stat().st_size
            if len(found) > self._limits.files:
                raise BadArtifact(f"{self._place} holds more than {self._limits.files} files")
        return found

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
