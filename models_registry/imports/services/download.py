"""Downloads one file of a repository: resumes what is on disk, verifies every byte against the hub's listing, and never
accepts a file that is longer, shorter or different. Its only state is the part on disk."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from threading import Event

from models_registry.artifacts.planner import size_words
from models_registry.imports.planner import CannotImport, ListedFile, Repository
from models_registry.imports.services.hub import Hub, HubTrouble

CHUNK_BYTES = 1024**2
PAUSES_S = (0.5, 2.0, 8.0)
"""After failures of one file without progress; then the whole import pauses."""


class Halted(Exception):
    """The import was cancelled, or the process stops."""


class WrongContent(Exception):
    """The bytes are not those that the hub lists."""


class _Digests:
    """Of a file: its SHA-256, and its git object ID if the hub lists no SHA-256."""

    def __init__(self, file: ListedFile) -> None:
        self._file = file
        self._sha256 = hashlib.sha256()
        self._blob = hashlib.sha1(usedforsecurity=False) if len(file.blob) == 40 else hashlib.sha256()
        self._blob.update(b"blob %d\0" % file.size)

    def update(self, piece: bytes) -> None:
        self._sha256.update(piece)
        if not self._file.sha256:
            self._blob.update(piece)

    def verified(self) -> str:
        """The SHA-256. Raises WrongContent."""
        found = self._sha256.hexdigest() if self._file.sha256 else self._blob.hexdigest()
        listed = self._file.sha256 or self._file.blob
        if found != listed:
            kind = "SHA-256" if self._file.sha256 else "git object ID"
            raise WrongContent(f"{self._file.path} has the {kind} {found}, but the hub lists {listed}")
        return self._sha256.hexdigest()


def download(
    hub: Hub,
    repository: Repository,
    revision: str,
    file: ListedFile,
    part: Path,
    *,
    halt: Event,
    progress: Callable[[int], None],
) -> str:
    """Complete `part` and return its SHA-256. `progress` is called with the bytes so far. Raises HubTrouble after
    several failures without progress. Raises CannotImport if the content is wrong twice. Raises Halted."""
    wrong = troubles = 0
    while True:
        before = part.stat().st_size if part.exists() else 0
        try:
            return _attempt(hub, repository, revision, file, part, halt, progress)
        except WrongContent as error:
            part.unlink(missing_ok=True)
            wrong += 1
            if wrong > 1:
                raise CannotImport(f"{error}: the hub's content is damaged or was replaced") from None
        except HubTrouble:
            troubles = 1 if part.exists() and part.stat().st_size > before else troubles + 1
            if troubles > len(PAUSES_S):
                raise
            if halt.wait(PAUSES_S[troubles - 1]):
                raise Halted from None


def _attempt(
    hub: Hub,
    repository: Repository,
    revision: str,
    file: ListedFile,
    part: Path,
    halt: Event,
    progress: Callable[[int], None],
) -> str:
    digests = _Digests(file)
    with part.open("a+b") as out:
        out.seek(0)
        done = 0
        while piece := out.read(CHUNK_BYTES):
            _check_halt(halt)
            digests.update(piece)
            done += len(piece)
        if done > file.size:
            raise WrongContent(f"{file.path} has more than its {file.size} bytes on disk")
        progress(done)
        if done < file.size:
            with hub.content(repository, revision, file, done) as (begins, pieces):
                if begins != done:  # the hub ignores ranges
                    out.truncate(begins)
                    digests, done = _Digests(file), begins
                for piece in pieces:
                    _check_halt(halt)
                    done += len(piece)
                    if done > file.size:
                        raise WrongContent(f"{file.path} is longer than the {file.size} bytes that the hub lists")
                    out.write(piece)
                    digests.update(piece)
                    progress(done)
            if done < file.size:
                raise HubTrouble(f"{file.path}: the hub sent {size_words(done)} of {size_words(file.size)}")
        out.flush()
        os.fsync(out.fileno())
    return digests.verified()


def _check_halt(halt: Event) -> None:
    if halt.is_set():
        raise Halted
