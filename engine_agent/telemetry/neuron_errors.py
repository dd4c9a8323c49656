"""What lines of the kernel log and of an engine's log say of Neuron hardware. Pure: text in, faults out.

The driver logs `NEURON_HW_ERR=<NAME> instance-id=… nd-id=0 nc-id=0 serial-num=… action=TERMINATE_INSTANCE`; the runtime
gives status codes, by number or by name (nrt_status.h). Source of both and of what to do about each:
https://awsdocs-neuron.readthedocs-hosted.com/en/latest/neuron-runtime/nrt-troubleshoot.html
"""

import re
from collections.abc import Iterable, Mapping

from engine_agent.protocol.messages import Fault
from engine_agent.protocol.signatures import FaultSignature
from engine_agent.telemetry.accelerators import hardware_fault

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
    "NRT_EXEC_HW_ERR_COLLECTIVES": (1200, FaultSignature.NEURON_COLLECTIVES_HANG),
    "NRT_EXEC_HW_ERR_HBM_UE": (1201, FaultSignature.NEURON_HBM_UNCORRECTABLE),
    "NRT_EXEC_HW_ERR_NC_UE": (1202, FaultSignature.NEURON_SRAM_UNCORRECTABLE),
    "NRT_EXEC_HW_ERR_DMA_ABORT": (1203, FaultSignature.NEURON_DMA_ERROR),
    "NRT_EXEC_HW_ERR_REPAIRABLE_HBM_UE": (1205, FaultSignature.NEURON_HBM_REPAIRABLE),
    "NRT_NETWORK_PROXY_FAILURE": (1206, FaultSignature.NEURON_NETWORK_PROXY),
}

_KERNEL_ERROR = re.compile(r"\bNEURON_HW_ERR=(?P<name>[A-Z][A-Z0-9_]*)(?P<rest>[^\n]*)")
_KERNEL_FIELD = re.compile(r"(?P<name>nd-id|nc-id|serial-num|action)=(?P<value>\S+)")
_STATUS_NAME = re.compile(rf"\b(?:{'|'.join(RUNTIME_STATUSES)})\b")
_STATUS_CODE = re.compile(
    r"\b(?:NRT\w{0,64}|nrt_\w{1,64}|status|error(?: code)?)\W{0,3}(?P<code>120[0-6])\b", re.IGNORECASE
)
_NAME_BY_CODE = {code: name for name, (code, _) in RUNTIME_STATUSES.items()}


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
    """The faults that an engine's log tells of, one per status, with the first line of each."""
    first: dict[str, str] = {}
    for line in lines:
        named = _STATUS_NAME.search(line)
        coded = _STATUS_CODE.search(line)
        name = named[0] if named is not None else _NAME_BY_CODE.get(int(coded["code"])) if coded is not None else None
        if name is not None:
            first.setdefault(name, line.strip()[:MAX_LINE_CHARS])
    return tuple(_runtime_fault(name, line) for name, line in first.items())


def _runtime_fault(name: str, line: str) -> Fault:
    code, signature = RUNTIME_STATUSES[name]
    return hardware_fault(signature, f"the engine's log says {name} ({code})", {"status": code, "line": line})
