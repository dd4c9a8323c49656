"""The NVIDIA Management Library, typed: what this agent asks of it, and nothing else. Every call may block for as long
as the driver does, so only a thread of its own may use it; it judges nothing.
"""

import importlib
from dataclasses import dataclass
from typing import Any, TypeVar

from engine_agent.node.planning.energy import Reading
from engine_agent.protocol.messages import Accelerator

KIND = "nvidia"
MODULE = "pynvml"
"""Of the distribution nvidia-ml-py; imported only where there is a device, because it loads the driver's library."""

GPU_IS_LOST, RESET_REQUIRED = 15, 16
"""NVML_ERROR_GPU_IS_LOST, NVML_ERROR_RESET_REQUIRED"""
_TIMEOUT = 10
MOST_WATTS = 2_000.0
"""Of a device that states no limit: more than any draws."""
_CORRECTED, _UNCORRECTED, _VOLATILE = 0, 1, 0
_XID_CRITICAL_ERROR = 8
_GPU_RECOVERY_ACTION = 230

T = TypeVar("T")


class NvmlFailed(Exception):
    """A call failed; `code` is NVML's, 0 if the library itself cannot be used."""

    def __init__(self, call: str, code: int, reason: str) -> None:
        super().__init__(f"{call}: {reason}")
        self.code = code


@dataclass(frozen=True, slots=True)
class Xid:
    """An error that the driver reported for a device; None: it no longer says which."""

    code: int
    device: int | None


class Nvml:
    """One session with the library. `library` is the module `pynvml`, or what stands in for it."""

    def __init__(self, library: Any) -> None:
        """Open the session and ask for events of every device.

        Raises:
            NvmlFailed: the driver does not answer, or refuses.
        """
        self._library = library
        self._call("nvmlInit")
        self.device_count: int = self._call("nvmlDeviceGetCount")
        self._events = self._call("nvmlEventSetCreate")
        self._has_events = False
        for index in range(self.device_count):
            handle = self._call_or_none("nvmlDeviceGetHandleByIndex", index)
            if handle is not None and self._answers("nvmlDeviceRegisterEvents", handle):
                self._has_events = True

    def close(self) -> None:
        self._call_or_none("nvmlEventSetFree", self._events)
        self._call_or_none("nvmlShutdown")

    def read(self, index: int) -> Accelerator:
        """A device now. What it does not support is left out.

        Raises:
            NvmlFailed: it does not answer at all, such as one that fell off the bus.
        """
        handle = self._call("nvmlDeviceGetHandleByIndex", index)
        memory = self._call("nvmlDeviceGetMemoryInfo", handle)
        use = self._call_or_none("nvmlDeviceGetUtilizationRates", handle)
        name = self._call("nvmlDeviceGetName", handle)
        return Accelerator(
            index=index,
            kind=KIND,
            name=name.decode() if isinstance(name, bytes) else str(name),
            utilisation_percent=float(use.gpu) if use is not None else None,
            memory_used_bytes=int(memory.used),
            memory_total_bytes=int(memory.total),
            errors=self._errors(handle),
        )

    def energy(self, index: int) -> Reading | None:
        """What a device drew since its driver was loaded; None: it does not count, or does not answer now."""
        handle = self._call_or_none("nvmlDeviceGetHandleByIndex", index)
        if handle is None:
            return None
        try:
            millijoules = self._call("nvmlDeviceGetTotalEnergyConsumption", handle)
            limits = self._call_or_none("nvmlDeviceGetPowerManagementLimitConstraints", handle)
        except NvmlFailed:
            return None
        most_watts = limits[1] / 1000 if limits is not None and limits[1] else MOST_WATTS
        return Reading(microjoules=int(millijoules) * 1000, most_watts=most_watts)

    def next_xid(self, within_ms: int) -> Xid | None:
        """The next error event, or None if there is none in that time.

        Raises:
            NvmlFailed: events cannot be waited for any more.
        """
        if not self._has_events:
            return None
        try:
            event = self._call("nvmlEventSetWait_v2", self._events, within_ms)
        except NvmlFailed as failed:
            if failed.code == _TIMEOUT:
                return None
            raise
        if event.eventType != _XID_CRITICAL_ERROR:
            return None
        return Xid(code=int(event.eventData), device=self._call_or_none("nvmlDeviceGetIndex", event.device))

    @property
    def has_events(self) -> bool:
        """Whether any device reports events; `next_xid` returns at once where none does."""
        return self._has_events

    def _errors(self, handle: Any) -> dict[str, int]:
        counters: dict[str, int | None] = {
            "ecc_corrected": self._call_or_none("nvmlDeviceGetTotalEccErrors", handle, _CORRECTED, _VOLATILE),
            "ecc_uncorrected": self._call_or_none("nvmlDeviceGetTotalEccErrors", handle, _UNCORRECTED, _VOLATILE),
        }
        rows = self._call_or_none("nvmlDeviceGetRemappedRows", handle)
        if rows is not None:
            names = ("rows_remapped_corrected", "rows_remapped_uncorrected", "row_remap_pending", "row_remap_failed")
            counters |= {name: int(count) for name, count in zip(names, rows, strict=True)}
        values = self._call_or_none("nvmlDeviceGetFieldValues", handle, [_GPU_RECOVERY_ACTION])
        if values is not None and len(values) == 1 and values[0].nvmlReturn == 0:
            counters["recovery_action"] = int(values[0].value.uiVal)
        return {name: int(count) for name, count in counters.items() if count is not None}

    def _answers(self, call: str, handle: Any) -> bool:
        try:
            self._call(call, handle, _XID_CRITICAL_ERROR, self._events)
        except NvmlFailed:
            return False
        return True

    def _call_or_none(self, call: str, *arguments: Any) -> Any:
        """The answer, or None where the device or this driver has none. A lost device is never none."""
        try:
            return self._call(call, *arguments)
        except NvmlFailed as failed:
            if failed.code in (GPU_IS_LOST, RESET_REQUIRED) and call != "nvmlDeviceGetHandleByIndex":
                raise
            return None

    def _call(self, call: str, *arguments: Any) -> Any:
        try:
            return getattr(self._library, call)(*arguments)
        except self._library.NVMLError as error:
            raise NvmlFailed(call, int(getattr(error, "value", 0)), str(error)) from error
        except AttributeError as error:
            raise NvmlFailed(call, 0, f"this version of the library has no {call}") from error


def load_library() -> Any:
    """The module `pynvml`.

    Raises:
        NvmlFailed: it is not installed.
    """
    try:
        return importlib.import_module(MODULE)
    except ImportError as error:
        raise NvmlFailed("import", 0, f"nvidia-ml-py is not installed: {error}") from error
