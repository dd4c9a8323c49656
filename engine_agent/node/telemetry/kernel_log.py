"""Follows the kernel log from /dev/kmsg without ever waiting for it, and hands on its lines. It judges none of them.

Records of the last five minutes before the start are read too, so that what an agent slept through is not lost.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger(__name__)

KERNEL_LOG = Path("/dev/kmsg")
LOOKBACK_S = 300.0
"""As far back as node-problem-detector looks; a rebooted machine starts with an empty log."""
RECORD_BYTES = 8192
"""A read with less room than a record needs fails; the kernel's records are shorter than this."""
MAX_RECORDS_A_WAKE = 1000
"""So that a log that is being flooded leaves the agent time for its other work."""


class KernelLog:
    """The kernel log while it is open. `on_line` gets each line's text, without its prefix."""

    def __init__(self, on_line: Callable[[str], None], path: Path = KERNEL_LOG) -> None:
        self._on_line = on_line
        self._path = path
        self._fd: int | None = None

    def open(self) -> str:
        """Start to follow; returns why that is not possible, or nothing."""
        try:
            self._fd = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            return f"{self._path} cannot be read: {error.strerror}"
        asyncio.get_running_loop().add_reader(self._fd, self._read)
        return ""

    def close(self) -> None:
        if self._fd is not None:
            asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
            self._fd = None

    def _read(self) -> None:
        for _ in range(MAX_RECORDS_A_WAKE):
            if self._fd is None:
                return
            try:
                record = os.read(self._fd, RECORD_BYTES)
            except BlockingIOError:
                return
            except BrokenPipeError:
                continue  # records were overwritten before they were read; the next read goes on behind them
            except OSError as error:
                log.warning("stopped reading %s: %s", self._path, error.strerror)
                record = b""
            if not record:
                self.close()
                return
            self._hand_on(record.decode("utf-8", "replace"))

    def _hand_on(self, record: str) -> None:
        """`6,1234,98765432,-;text`: level, sequence number, microseconds since boot, flags; then lines of details."""
        for line in record.splitlines():
            prefix, semicolon, text = line.partition(";")
            if not semicolon or line.startswith(" "):
                continue
            with contextlib.suppress(IndexError, ValueError):
                if time.monotonic() - int(prefix.split(",")[2]) / 1e6 <= LOOKBACK_S:
                    self._on_line(text)
