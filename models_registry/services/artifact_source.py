"""Where artifacts are read from, to be checked: what any source offers.

A source lists and reads; whether what it holds is right is for `models_registry.planning.artifact_rules`.
"""

from collections.abc import Iterator
from typing import Protocol

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
