"""What lines of the kernel log and of an engine's log say of Neuron hardware. Pure: text in, faults out.

The driver logs `NEURON_HW_ERR=<NAME> instance-id=… nd-id=0 nc-id=0 serial-num=… action=TERMINATE_INSTANCE`; the runtime
gives status codes, by number or by name (nrt_status.h). Source of both and of what to do about each:
https://awsdocs-neuron.readthedocs-hosted.com/en/latest/neuron-runtime/nrt-troubleshoot.html
"""

import re
from collections.abc import Iterable, Mapping

from engine_agent.node.telemetry.accelerators import hardware_fault
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
"""Those that hardware may have caused. Each of the first four may be all that a program says, and then says no more
than that. 1204, NRT_EXEC_SW_NQ_OVERFLOW, is the program's own."""
_CODES_IN_LINES = range(1000, 1300)
"""Smaller ones are too common to mean a status."""

RUNTIME_TEXTS: tuple[tuple[re.Pattern[str], FaultSignature], ...] = (
    (re.compile(r"\bUncorrectable memory error is detected, metadata"), FaultSignature.NEURON_SRAM_UNCORRECTABLE),
    (re.compile(r"\bUncorrectable HBM memory error is detected"), FaultSignature.NEURON_HBM_UNCORRECTABLE),
    (re.compile(r"\bDMA [RT]X engine \d+ is in an abort state"), FaultSignature.NEURON_DMA_ERROR),
    (re.compile(r"\bmissing collectives status on Neuron Device \d"), FaultSignature.NEURON_COLLECTIVES_HANG),
    (re.compile(r"\bexecution timeout \(\d+ ms\) on Neuron Device \d"), FaultSignature.NEURON_COMPUTE_HANG),
)
"""What the runtime prints beside a status, or with NRT_TIMEOUT alone."""
_IS_THE_PROGRAMS = "caused by DGE notifications"
"""In the line of a timeout: the program turned them on, and they may take that long."""
_HBM = FaultSignature.NEURON_HBM_UNCORRECTABLE
_IS_REPAIRABLE = re.compile(r"\bPlease reload the neuron driver or reboot\b")
"""Comes with, or one or two lines after, the text of an HBM error where a reload heals it."""
_REPAIR_WITHIN_LINES = 3

_KERNEL_ERROR = re.compile(r"\bNEURON_HW_ERR=(?P<name>[A-Z][A-Z0-9_]*)(?P<rest>[^\n]*)")
_KERNEL_FIELD = re.compile(r"(?P<name>nd-id|nc-id|serial-num|action)=(?P<value>\S+)")
_STATUS_NAME = re.compile(rf"\b(?:{'|'.join(RUNTIME_STATUSES)})\b")
_STATUS_CODE = re.compile(
    r"\b(?:NRT\w{0,64}|nrt_\w{1,64}|status|error(?: code)?)\W{0,3}(?P<code>1004|120[0-6])\b", re.IGNORECASE
)
_NAME_BY_CODE = {code: name for name, (code, _) in RUNTIME_STATUSES.items() if code in _CODES_IN_LINES}


def kernel_fault(line: str) -> Fault | None:
    """The fault that a line of the kernel log tells of. A name that is not known is a fault too, but not a hard one."""
    match = _KERNEL_ERROR.search(line)
    if match is None:
        return None
    name = match["name"]
    fields = {field["name"].replace("-", "_"): field["value"] for field in _KERNEL_FIELD.finditer(match["rest"])}
    where = f" on neuron {fields['nd_id']}" if "nd_id" in fields else ""
    signature = KERNEL_ERRORS.get(name, FaultSignature.NEURON_HARDWARE_ERROR)
    evidence = {"error": name, **fields, "line": line.strip()[:MAX_LINE_CHARS]}
    return hardware_fault(signature, f"the kernel log says {name}{where}", evidence)


def runtime_faults(lines: Iterable[str]) -> tuple[Fault, ...]:
    """The faults that an engine's log tells of, one per signature, with the first line of each.

    What says only that something was wrong is left out where another line says what.
    """
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
        if (match := text.search(line)) is None or _IS_THE_PROGRAMS in line:
            continue
        is_repairable = signature is _HBM and any(map(_IS_REPAIRABLE.search, and_after))
        meant = FaultSignature.NEURON_HBM_REPAIRABLE if is_repairable else signature
        return hardware_fault(meant, f"the engine's log says: {match[0]}", {"line": line})
    named, coded = _STATUS_NAME.search(line), _STATUS_CODE.search(line)
    name = named[0] if named is not None else _NAME_BY_CODE.get(int(coded["code"])) if coded is not None else None
    if name is None:
        return None
    code, signature = RUNTIME_STATUSES[name]
    return hardware_fault(signature, f"the engine's log says {name} ({code})", {"status": code, "line": line})
