"""Follows the kernel log from /dev/kmsg and the log of an engine, without waiting. Lines of the kernel are passed on;
those of an engine are searched for device faults.

Records of the last five minutes before the start are read too, so that what an agent slept through is not lost.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from engine_agent.node.telemetry.accelerators import OnFault, RepeatedFaults
from engine_agent.node.telemetry.neuron_errors import runtime_faults

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


# Reads an engine's log as it grows, for what the runtime says of hardware while the engine still runs: a device may
# be broken long before its engine ends, and its last lines are then others.
# It reads what is new, a bounded part at a time, and never waits. A line is judged once those after it are there, or
# none came for a while: what heals a fault stands one or two lines later.

READ_EVERY_S = 1.0
MOST_BYTES = 256 * 1024
"""At once: an engine that floods its log is read from its end."""
HELD_LINES = 2


class EngineLog:
    """One log file, which may be cut, replaced or missing at any time."""

    def __init__(self, path: Path, on_fault: OnFault) -> None:
        self._path = path
        self._on_fault = RepeatedFaults(on_fault)
        self._at: tuple[int, int] | None = None
        """The file's number, and how much of it was read; None: it was not there yet."""
        self._unfinished = b""
        self._held: list[str] = []

    def read(self) -> None:
        """Take in what is new, and report what it says."""
        lines = self._new_lines()
        judged, self._held = [*self._held, *lines], []
        if lines:
            judged, self._held = judged[:-HELD_LINES], judged[-HELD_LINES:]
        for fault in runtime_faults([*judged, *self._held]) if judged else ():
            line = str(fault.evidence.get("line", ""))
            if any(line and line in each for each in judged):  # else it is judged with those that come
                self._on_fault(fault)

    def _new_lines(self) -> list[str]:
        try:
            with self._path.open("rb") as log:
                number, size = _number_and_size(log.fileno())
                is_first = self._at is None
                known, at = self._at or (number, size)
                if known != number or size < at:
                    at, self._unfinished = 0, b""
                if size - at > MOST_BYTES:
                    at, self._unfinished = size - MOST_BYTES, b""
                log.seek(at)
                new = b"" if is_first else log.read(MOST_BYTES)
                self._at = (number, at + len(new))
        except OSError:
            self._at = self._at or (0, 0)  # what comes later is all new
            return []
        *lines, self._unfinished = (self._unfinished + new).split(b"\n")
        return [line.decode(errors="replace") for line in lines]


def _number_and_size(descriptor: int) -> tuple[int, int]:
    stat = os.fstat(descriptor)
    return stat.st_ino, stat.st_size
