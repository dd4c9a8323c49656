"""Reads an engine's log as it grows, for what the runtime says of hardware while the engine still runs: a device may be
broken long before its engine ends, and its last lines are then others.

It reads what is new, a bounded part at a time, and never waits. A line is judged once those after it are there, or none
came for a while: what heals a fault stands one or two lines later.
"""

import os
from pathlib import Path

from engine_agent.node.telemetry.accelerators import OnFault, RepeatedFaults
from engine_agent.node.telemetry.neuron_errors import runtime_faults

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
