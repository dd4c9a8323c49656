"""What the terminal and the log files show: whole lines behind the name of their process, the launcher's own steps with
how long they took, and logs that never grow beyond their share of the disk."""

import contextlib
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TextIO

ROTATE_AT_BYTES = 10 * 1024 * 1024
KEPT_FILES = 3
"""The current file and two older ones (`.1`, `.2`)."""


class RotatingLog:
    """Writes lines to `path`; past `rotate_at_bytes` the file becomes `path.1`, that one `path.2`, and so on."""

    def __init__(self, path: Path, *, rotate_at_bytes: int = ROTATE_AT_BYTES, kept_files: int = KEPT_FILES) -> None:
        self._path = path
        self._rotate_at_bytes = rotate_at_bytes
        self._kept_files = kept_files
        self._file: BinaryIO | None = path.open("ab")
        self._bytes = self._file.tell()

    def write(self, lines: list[str]) -> None:
        """Append `lines`. A disk that refuses costs the lines, never the process that wrote them; each write tries
        anew, whatever became of the file by then."""
        content = "".join(f"{line}\n" for line in lines).encode(errors="replace")
        with contextlib.suppress(OSError):
            if self._bytes and self._bytes + len(content) > self._rotate_at_bytes:
                self._rotate()
            file = self._opened()
            file.write(content)
            file.flush()
            self._bytes += len(content)

    def close(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            with contextlib.suppress(OSError):
                file.close()

    def _opened(self) -> BinaryIO:
        if self._file is None:
            self._file = self._path.open("ab")
            self._bytes = self._file.tell()
        return self._file

    def _rotate(self) -> None:
        self.close()
        for age in range(self._kept_files - 1, 0, -1):
            older = self._path.with_name(f"{self._path.name}.{age}")
            newer = self._path if age == 1 else self._path.with_name(f"{self._path.name}.{age - 1}")
            with contextlib.suppress(FileNotFoundError):
                newer.replace(older)
        self._opened()


LONGEST_LINE_CHARS = 4000
"""Longer lines are cut in pieces: a process that writes without a newline must not fill the memory."""

_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92)
_RESET = "\x1b[0m"


class LineSplitter:
    """Cuts a stream of bytes into lines; keeps the unfinished last one until the rest arrives."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[str]:
        """The lines that `chunk` completes, without their ends."""
        *whole, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > LONGEST_LINE_CHARS:
            whole.append(self._rest)
            self._rest = b""
        return [piece for line in whole for piece in _pieces(line)]

    def finish(self) -> list[str]:
        rest, self._rest = self._rest, b""
        return _pieces(rest) if rest else []


def _pieces(line: bytes) -> list[str]:
    text = line.rstrip(b"\r").decode(errors="replace")
    return [text[at : at + LONGEST_LINE_CHARS] for at in range(0, len(text), LONGEST_LINE_CHARS)] or [""]


def prefixed(name: str, line: str, *, width: int, colour: bool) -> str:
    """`line` behind its process's name, padded to `width`; each name always has the same colour."""
    label = f"{name:<{width}} |"
    if colour:
        label = f"\x1b[{_COLOURS[sum(name.encode()) % len(_COLOURS)]}m{label}{_RESET}"
    return f"{label} {line}".rstrip()


OWN_NAME = "up"
NAME_WIDTH = 8
"""Width of the longest name, `postgres`."""


class Console:
    """Prints to one stream. Lines about the progress of the launcher also go to `progress_log`, if there is one.

    With `progress_only` the lines of services are not shown: each has its own log."""

    def __init__(
        self, stream: TextIO | None = None, *, progress_log: RotatingLog | None = None, progress_only: bool = False
    ) -> None:
        self._stream: TextIO | None = stream or sys.stdout
        self._colour = bool(self._stream and self._stream.isatty())
        self._progress_log = progress_log
        self._progress_only = progress_only
        self._began = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Seconds since this console was made, which is since the command began."""
        return time.monotonic() - self._began

    def service_lines(self, name: str, lines: list[str]) -> None:
        if not self._progress_only:
            self._show(name, lines)

    def progress_lines(self, name: str, lines: list[str]) -> None:
        """Show what a command on the way wrote."""
        if self._progress_log:
            self._progress_log.write([prefixed(name, line, width=NAME_WIDTH, colour=False) for line in lines])
        self._show(name, lines)

    def own(self, text: str) -> None:
        self.progress_lines(OWN_NAME, [text])

    def _show(self, name: str, lines: list[str]) -> None:
        for line in lines:
            self.plain(prefixed(name, line, width=NAME_WIDTH, colour=self._colour))

    def plain(self, text: str) -> None:
        """Show `text` as it is. A terminal that went away is no reason to stop."""
        if self._stream is None:
            return
        try:
            print(text, file=self._stream, flush=True)
        except (OSError, ValueError):
            self._stream = None

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        """Say that `what` begins, and how long it took once it is done."""
        began = time.monotonic()
        self.own(f"{what} ...")
        yield
        self.own(f"{what}: done in {time.monotonic() - began:.1f} s")
