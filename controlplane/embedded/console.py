"""What a person sees: prefixed lines of every process and the launcher's own steps with how long they took."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from controlplane.embedded.lines import prefixed
from controlplane.embedded.rotating_log import RotatingLog

OWN_NAME = "up"
NAME_WIDTH = 8
"""Width of the longest name, `postgres`."""


class Console:
    """Prints to one stream. What says how far the launcher is also goes to `progress_log`, if there is one.

    With `progress_only` the lines of services are not shown: each has its own log.
    """

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
        """Show what a service wrote."""
        if not self._progress_only:
            self._show(name, lines)

    def progress_lines(self, name: str, lines: list[str]) -> None:
        """Show what a command on the way wrote."""
        if self._progress_log:
            self._progress_log.write([prefixed(name, line, width=NAME_WIDTH, colour=False) for line in lines])
        self._show(name, lines)

    def own(self, text: str) -> None:
        """Show a line of the launcher's own."""
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
