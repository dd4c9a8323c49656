"""The NVIDIA Management Library with types: one session, its devices with their use, clocks and error counters, and
error events. Each call may block as long as the driver."""

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from msgspec import structs

from engine_agent.node.planning.energy import Reading
from engine_agent.node.telemetry.throttling import active_reasons
from engine_agent.protocol.machine_messages import instance_index
from engine_agent.protocol.telemetry_messages import Accelerator, DeviceClocks

KIND = "nvidia"
MODULE = "pynvml"
"""Of the distribution nvidia-ml-py. It is imported only if there is a device, because it loads the driver's library."""

GPU_IS_LOST, RESET_REQUIRED = 15, 16
"""NVML_ERROR_GPU_IS_LOST, NVML_ERROR_RESET_REQUIRED"""
_TIMEOUT = 10
MOST_WATTS = 2_000.0
"""Of a device without a stated limit: more than any device draws."""
_CORRECTED, _UNCORRECTED, _VOLATILE = 0, 1, 0
_XID_CRITICAL_ERROR = 8
_GPU_RECOVERY_ACTION = 230
_CLOCK_SM = 1
_TEMPERATURE_GPU = 0
_LINK_ERRORS = {38: "nvlink_crc_flit", 45: "nvlink_crc_data", 52: "nvlink_replay", 59: "nvlink_recovery"}
"""NVML_FI_DEV_NVLINK_…_ERROR_COUNT_TOTAL, over all lanes."""
_MIG_ENABLED = 1

T = TypeVar("T")


class NvmlFailed(Exception):
    """A call failed; `code` is NVML's, 0 if the library itself cannot be used."""

    def __init__(self, call: str, code: int, reason: str) -> None:
        super().__init__(f"{call}: {reason}")
        self.code = code


@dataclass(frozen=True, slots=True)
class Xid:
    """An error that the driver reported for a device; None if it no longer reports which."""

    code: int
    device: int | None


class Nvml:
    """One session with the library. `library` is the module `pynvml` or a substitute."""

    def __init__(self, library: Any) -> None:
        """Opens the session and registers for events of every device. Raises NvmlFailed if the driver does not answer
        or refuses."""
        self._library = library
        self._call("nvmlInit")
        self.device_count: int = self._call("nvmlDeviceGetCount")
        self._events = self._call("nvmlEventSetCreate")
        self._numa: dict[str, int | None] = {}
        self.has_events = False
        """Whether any device reports events; otherwise `next_xid` returns immediately."""
        for index in range(self.device_count):
            handle = self._call_or_none("nvmlDeviceGetHandleByIndex", index)
            if handle is not None and self._answers("nvmlDeviceRegisterEvents", handle):
                self.has_events = True

    def close(self) -> None:
        self._call_or_none("nvmlEventSetFree", self._events)
        self._call_or_none("nvmlShutdown")

    def read(self, index: int) -> Accelerator:
        """The current state of a device, without unsupported values. Raises NvmlFailed if it does not answer at all,
        for example because it fell off the bus."""
        handle = self._call("nvmlDeviceGetHandleByIndex", index)
        memory = self._call("nvmlDeviceGetMemoryInfo", handle)
        use = self._call_or_none("nvmlDeviceGetUtilizationRates", handle)
        uuid = _text(self._call_or_none("nvmlDeviceGetUUID", handle))
        if uuid not in self._numa:
            self._numa[uuid] = self._numa_of(handle)
        return Accelerator(
            index=index,
            kind=KIND,
            name=_text(self._call("nvmlDeviceGetName", handle)),
            utilisation_percent=float(use.gpu) if use is not None else None,
            memory_used_bytes=int(memory.used),
            memory_total_bytes=int(memory.total),
            errors=self._errors(handle),
            uuid=uuid,
            numa=self._numa[uuid],
            clocks=self._clocks(handle),
            temperature_c=_number(self._call_or_none("nvmlDeviceGetTemperature", handle, _TEMPERATURE_GPU)),
            power_watts=_number(self._call_or_none("nvmlDeviceGetPowerUsage", handle), 1000),
        )

    def _clocks(self, handle: Any) -> DeviceClocks | None:
        """The clock of its multiprocessors; None if the driver does not report it."""
        clock = self._call_or_none("nvmlDeviceGetClockInfo", handle, _CLOCK_SM)
        most = self._call_or_none("nvmlDeviceGetMaxClockInfo", handle, _CLOCK_SM)
        mask = self._call_or_none("nvmlDeviceGetCurrentClocksEventReasons", handle)
        if mask is None:  # its name before driver 535
            mask = self._call_or_none("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        if clock is None or most is None:
            return None
        return DeviceClocks(clock_mhz=int(clock), max_clock_mhz=int(most), reasons=active_reasons(int(mask or 0)))

    def instances(self, index: int) -> tuple[Accelerator, ...] | None:
        """The MIG instances of a GPU, with its error counters; None without MIG. Raises NvmlFailed as `read`."""
        handle = self._call("nvmlDeviceGetHandleByIndex", index)
        mode = self._call_or_none("nvmlDeviceGetMigMode", handle)
        if mode is None or mode[0] != _MIG_ENABLED:
            return None
        gpu = self.read(index)
        found: list[Accelerator] = []
        for number in range(self._call_or_none("nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
            instance = self._call_or_none("nvmlDeviceGetMigDeviceHandleByIndex", handle, number)
            if instance is None:
                continue  # a place without an instance
            memory = self._call("nvmlDeviceGetMemoryInfo", instance)
            found.append(
                structs.replace(
                    gpu,
                    index=instance_index(index, number),
                    name=_text(self._call("nvmlDeviceGetName", instance)),
                    utilisation_percent=None,
                    power_watts=None,
                    memory_used_bytes=int(memory.used),
                    memory_total_bytes=int(memory.total),
                    uuid=_text(self._call("nvmlDeviceGetUUID", instance)),
                )
            )
        return tuple(found)

    def energy(self, index: int) -> Reading | None:
        """The energy of a device since its driver was loaded; None if unsupported or without an answer."""
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
        """The next error event, or None if there is none in that time. Raises NvmlFailed if waiting for events
        failed."""
        if not self.has_events:
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

    def _numa_of(self, handle: Any) -> int | None:
        place = self._call_or_none("nvmlDeviceGetPciInfo", handle)
        return numa_node(_text(place.busId)) if place is not None else None

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
        counters |= self._link_errors(handle)
        return {name: int(count) for name, count in counters.items() if count is not None}

    def _link_errors(self, handle: Any) -> dict[str, int | None]:
        """Devices without NVLink report none of its counters."""
        values = self._call_or_none("nvmlDeviceGetFieldValues", handle, list(_LINK_ERRORS)) or ()
        known = {
            name: int(value.value.ullVal)
            for name, value in zip(_LINK_ERRORS.values(), values, strict=False)
            if value.nvmlReturn == 0
        }
        return {**known, "pcie_replay": self._call_or_none("nvmlDeviceGetPcieReplayCounter", handle)}

    def _answers(self, call: str, handle: Any) -> bool:
        try:
            self._call(call, handle, _XID_CRITICAL_ERROR, self._events)
        except NvmlFailed:
            return False
        return True

    def _call_or_none(self, call: str, *arguments: Any) -> Any:
        """The answer, or None if the device or driver does not support it. The error of a lost device is raised."""
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


def _text(value: Any) -> str:
    """NVML's texts, which older versions of the library return as bytes; "" for None."""
    return value.decode() if isinstance(value, bytes) else str(value or "")


def _number(value: Any, divisor: int = 1) -> float | None:
    return None if value is None else round(float(value) / divisor, 1)


def numa_node(address: str, root: Path = Path("/")) -> int | None:
    """Returns the NUMA node of a PCI device; None if the kernel states none. NVML writes the domain with eight digits
    (`00000000:3B:00.0`), the kernel with four."""
    domain, _, rest = address.lower().partition(":")
    try:
        number = int((root / f"sys/bus/pci/devices/{domain[-4:]}:{rest}/numa_node").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return number if number >= 0 else None


def load_library() -> Any:
    try:
        return importlib.import_module(MODULE)
    except ImportError as error:
        raise NvmlFailed("import", 0, f"nvidia-ml-py is not installed: {error}") from error
