"""Faults in the kernel log and in the logs of engines: follows both without blocking, and finds Neuron faults in them.

The driver logs `NEURON_HW_ERR=<NAME> instance-id=… nd-id=0 nc-id=0 serial-num=… action=TERMINATE_INSTANCE`. The runtime
logs status codes, by number or by name (nrt_status.h). A device may be broken long before its engine exits. Both
formats and their remedies: https://awsdocs-neuron.readthedocs-hosted.com/en/latest/neuron-runtime/nrt-troubleshoot.html

Kernel records of the five minutes before the start are read as well, so that a restart loses none."""

import asyncio
import contextlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from engine_agent.node.telemetry.accelerators import OnFault, RepeatedFaults, hardware_fault
from engine_agent.protocol.messages import Fault
from engine_agent.protocol.signatures import FaultSignature

MAX_LINE_CHARS = 500

KERNEL_ERRORS: Mapping[str, FaultSignature] = {
    "SRAM_UNCORRECTABLE_ERROR": FaultSignature.NEURON_SRAM_UNCORRECTABLE,
    "NC_UNCORRECTABLE_ERROR": FaultSignature.NEURON_CORE_UNCORRECTABLE,
    "HBM_UNCORRECTABLE_ERROR": FaultSignature.NEURON_HBM_UNCORRECTABLE,
    "HBM_REPAIRABLE_UNCORRECTABLE_ERROR": FaultSignature.NEURON_HBM_REPAIRABLE,
    "DMA_ERROR": FaultSignature.NEURON_DMA_ERROR,
    "HANG_ON_COLLECTIVES": FaultSignature.NEURON_COLLECTIVES_HANG,
}

RUNTIME_STATUSES: Mapping[str, tuple[int, FaultSignature]] = {
    "NRT_TIMEOUT": (5, FaultSignature.NEURON_HARDWARE_ERROR),
    "NRT_HW_ERROR": (6, FaultSignature.NEURON_HARDWARE_ERROR),
    "NRT_EXEC_UNIT_UNRECOVERABLE": (101, FaultSignature.NEURON_HARDWARE_ERROR),
    "NRT_EXEC_COMPLETED_WITH_ERR": (1004, FaultSignature.NEURON_HARDWARE_ERROR),
    "NRT_EXEC_HW_ERR_COLLECTIVES": (1200, FaultSignature.NEURON_COLLECTIVES_HANG),
    "NRT_EXEC_HW_ERR_HBM_UE": (1201, FaultSignature.NEURON_HBM_UNCORRECTABLE),
    "NRT_EXEC_HW_ERR_NC_UE": (1202, FaultSignature.NEURON_SRAM_UNCORRECTABLE),
    "NRT_EXEC_HW_ERR_DMA_ABORT": (1203, FaultSignature.NEURON_DMA_ERROR),
    "NRT_EXEC_HW_ERR_REPAIRABLE_HBM_UE": (1205, FaultSignature.NEURON_HBM_REPAIRABLE),
    "NRT_NETWORK_PROXY_FAILURE": (1206, FaultSignature.NEURON_NETWORK_PROXY),
}
"""Statuses that hardware may have caused. The first four may be a program's only message, and identify no hardware.
1204, NRT_EXEC_SW_NQ_OVERFLOW, is an error of the program."""
_CODES_IN_LINES = range(1000, 1300)
"""Smaller numbers are too common to identify a status."""

RUNTIME_TEXTS: tuple[tuple[re.Pattern[str], FaultSignature], ...] = (
    (re.compile(r"\bUncorrectable memory error is detected, metadata"), FaultSignature.NEURON_SRAM_UNCORRECTABLE),
    (re.compile(r"\bUncorrectable HBM memory error is detected"), FaultSignature.NEURON_HBM_UNCORRECTABLE),
    (re.compile(r"\bDMA [RT]X engine \d+ is in an abort state"), FaultSignature.NEURON_DMA_ERROR),
    (re.compile(r"\bmissing collectives status on Neuron Device \d"), FaultSignature.NEURON_COLLECTIVES_HANG),
    (re.compile(r"\bexecution timeout \(\d+ ms\) on Neuron Device \d"), FaultSignature.NEURON_COMPUTE_HANG),
)
"""Messages of the runtime next to a status, or with only NRT_TIMEOUT."""
_OF_THE_PROGRAM = "caused by DGE notifications"
"""In the line of a timeout: the program turned them on, and they may take that long."""
_HBM = FaultSignature.NEURON_HBM_UNCORRECTABLE
_IS_REPAIRABLE = re.compile(r"\bPlease reload the neuron driver or reboot\b")
"""In the text of an HBM error, or one or two lines later, if a reload repairs it."""
_REPAIR_WITHIN_LINES = 3

_KERNEL_ERROR = re.compile(r"\bNEURON_HW_ERR=(?P<name>[A-Z][A-Z0-9_]*)(?P<rest>[^\n]*)")
_KERNEL_FIELD = re.compile(r"(?P<name>nd-id|nc-id|serial-num|action)=(?P<value>\S+)")
_STATUS_NAME = re.compile(rf"\b(?:{'|'.join(RUNTIME_STATUSES)})\b")
_STATUS_CODE = re.compile(
    r"\b(?:NRT\w{0,64}|nrt_\w{1,64}|status|error(?: code)?)\W{0,3}(?P<code>1004|120[0-6])\b", re.IGNORECASE
)
_NAME_BY_CODE = {code: name for name, (code, _) in RUNTIME_STATUSES.items() if code in _CODES_IN_LINES}


def kernel_fault(line: str) -> Fault | None:
    """The fault in a line of the kernel log. An unknown name is a fault that is not hard."""
    match = _KERNEL_ERROR.search(line)
    if match is None:
        return None
    name = match["name"]
    fields = {field["name"].replace("-", "_"): field["value"] for field in _KERNEL_FIELD.finditer(match["rest"])}
    where = f" on neuron {fields['nd_id']}" if "nd_id" in fields else ""
    signature = KERNEL_ERRORS.get(name, FaultSignature.NEURON_HARDWARE_ERROR)
    evidence = {"error": name, **fields, "line": line.strip()[:MAX_LINE_CHARS]}
    return hardware_fault(signature, f"the kernel log reports {name}{where}", evidence)


def runtime_faults(lines: Iterable[str]) -> tuple[Fault, ...]:
    """The faults in an engine's log, one per signature, with the first line of each. An unspecific fault is left out if
    another line is specific."""
    given = list(lines)
    first: dict[FaultSignature, Fault] = {}
    for at, line in enumerate(given):
        fault = _fault_in(line.strip()[:MAX_LINE_CHARS], given[at : at + _REPAIR_WITHIN_LINES])
        if fault is not None:
            first.setdefault(FaultSignature(fault.signature), fault)
    if len(first) > 1:
        first.pop(FaultSignature.NEURON_HARDWARE_ERROR, None)
    return tuple(first.values())


def _fault_in(line: str, and_after: Iterable[str]) -> Fault | None:
    for text, signature in RUNTIME_TEXTS:
        if (match := text.search(line)) is None or _OF_THE_PROGRAM in line:
            continue
        is_repairable = signature is _HBM and any(map(_IS_REPAIRABLE.search, and_after))
        meant = FaultSignature.NEURON_HBM_REPAIRABLE if is_repairable else signature
        return hardware_fault(meant, f"the engine's log reports: {match[0]}", {"line": line})
    named, coded = _STATUS_NAME.search(line), _STATUS_CODE.search(line)
    name = named[0] if named is not None else _NAME_BY_CODE.get(int(coded["code"])) if coded is not None else None
    if name is None:
        return None
    code, signature = RUNTIME_STATUSES[name]
    return hardware_fault(signature, f"the engine's log reports {name} ({code})", {"status": code, "line": line})


log = logging.getLogger(__name__)

KERNEL_LOG = Path("/dev/kmsg")
LOOKBACK_S = 300.0
"""As far back as node-problem-detector reads; the log of a rebooted machine is empty."""
RECORD_BYTES = 8192
"""A read with less room than a record fails; the kernel's records are shorter."""
MAX_RECORDS_A_WAKE = 1000
"""A flooded log must leave the agent time for its other work."""


class KernelLog:
    """The kernel log while it is open. `on_line` gets each line's text, without its prefix."""

    def __init__(self, on_line: Callable[[str], None], path: Path = KERNEL_LOG) -> None:
        self._on_line = on_line
        self._path = path
        self._fd: int | None = None

    def open(self) -> str:
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
                continue  # records were overwritten before they were read; the next read continues after them
            except OSError as error:
                log.warning("stopped reading %s: %s", self._path, error.strerror)
                record = b""
            if not record:
                self.close()
                return
            self._pass_on(record.decode("utf-8", "replace"))

    def _pass_on(self, record: str) -> None:
        """`6,1234,98765432,-;text`: level, sequence number, microseconds since boot, flags; then lines of details."""
        for line in record.splitlines():
            prefix, semicolon, text = line.partition(";")
            if not semicolon or line.startswith(" "):
                continue
            with contextlib.suppress(IndexError, ValueError):
                if time.monotonic() - int(prefix.split(",")[2]) / 1e6 <= LOOKBACK_S:
                    self._on_line(text)


MOST_BYTES = 256 * 1024
"""Per reading: a flooded log is read from its end."""
HELD_LINES = 2
"""Lines that are evaluated with the next ones: a note that an error is repairable follows one or two lines later."""


class EngineLog:
    """One log file, which may be truncated, replaced or missing at any time."""

    def __init__(self, path: Path, on_fault: OnFault) -> None:
        self._path = path
        self._on_fault = RepeatedFaults(on_fault)
        self._at: tuple[int, int] | None = None
        """Inode of the file and the number of bytes read; None before the first reading."""
        self._unfinished = b""
        self._held: list[str] = []

    def read(self) -> None:
        lines = self._new_lines()
        evaluated, self._held = [*self._held, *lines], []
        if lines:
            evaluated, self._held = evaluated[:-HELD_LINES], evaluated[-HELD_LINES:]
        for fault in runtime_faults([*evaluated, *self._held]) if evaluated else ():
            line = str(fault.evidence.get("line", ""))
            if any(line and line in each for each in evaluated):  # otherwise it is evaluated with later lines
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
            self._at = self._at or (0, 0)  # later content is new
            return []
        *lines, self._unfinished = (self._unfinished + new).split(b"\n")
        return [line.decode(errors="replace") for line in lines]


def _number_and_size(descriptor: int) -> tuple[int, int]:
    stat = os.fstat(descriptor)
    return stat.st_ino, stat.st_size
