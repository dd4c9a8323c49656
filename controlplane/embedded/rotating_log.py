"""An append-only log file that never grows beyond its share of the disk."""

import contextlib
from pathlib import Path

ROTATE_AT_BYTES = 10 * 1024 * 1024
KEPT_FILES = 3
"""The current file and two older ones (`.1`, `.2`)."""


class RotatingLog:
    """Writes lines to `path`; past `rotate_at_bytes` the file becomes `path.1`, that one `path.2`, and so on."""

    def __init__(self, path: Path, *, rotate_at_bytes: int = ROTATE_AT_BYTES, kept_files: int = KEPT_FILES) -> None:
        self._path = path
        self._rotate_at_bytes = rotate_at_bytes
        self._kept_files = kept_files
        self._file = path.open("ab")
        self._bytes = self._file.tell()

    def write(self, lines: list[str]) -> None:
        """Append `lines`. A full disk costs the lines, never the process that wrote them."""
        content = "".join(f"{line}\n" for line in lines).encode(errors="replace")
        with contextlib.suppress(OSError):
            if self._bytes and self._bytes + len(content) > self._rotate_at_bytes:
                self._rotate()
            self._file.write(content)
            self._file.flush()
            self._bytes += len(content)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()

    def _rotate(self) -> None:
        self._file.close()
        for age in range(self._kept_files - 1, 0, -1):
            older = self._path.with_name(f"{self._path.name}.{age}")
            newer = self._path if age == 1 else self._path.with_name(f"{self._path.name}.{age - 1}")
            with contextlib.suppress(FileNotFoundError):
                newer.replace(older)
        self._file = self._path.open("ab")
        self._bytes = 0
