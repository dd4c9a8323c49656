"""A substitute for `pynvml` with the functions that the reader uses: test machines have no driver."""

# ruff: noqa: N802 - the names are the library's

import threading
from types import SimpleNamespace

from engine_agent.node.telemetry.nvml import GPU_IS_LOST

TIMEOUT, NOT_SUPPORTED, NOT_FOUND, UNKNOWN = 10, 3, 6, 999


class NvmlError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"code {value}")
        self.value = value


class Library:
    """The functions that the reader calls; a handle is the device's index. `broken` maps a call to its error."""

    NVMLError = NvmlError

    def __init__(self, devices: int = 1) -> None:
        self.devices = devices
        self.broken: dict[str, int] = {}
        self.lost: set[int] = set()
        self.uncorrected = 0
        self.rows = (0, 0, 0, 0)
        self.recovery_action = 0
        self.link_errors: dict[int, int] = {}
        """NVML's field -> its count; devices without NVLink have none."""
        self.clock_mhz, self.clock_reasons = 1755, 0x4
        self.xids: list[tuple[int, int]] = []
        self.sessions = self.shutdowns = 0
        self.millijoules: dict[int, int] = {}
        self.profiles: dict[int, list[str]] = {}
        """GPU -> the profiles of its MIG instances, "" for a place without one; GPUs without MIG are left out."""
        self.blocked = threading.Event()
        self.blocked.set()

    def _may(self, call: str) -> None:
        self.blocked.wait()
        if call in self.broken:
            raise NvmlError(self.broken[call])

    def nvmlInit(self) -> None:
        self.sessions += 1
        self._may("nvmlInit")

    def nvmlShutdown(self) -> None:
        self.shutdowns += 1
        self._may("nvmlShutdown")

    def nvmlDeviceGetCount(self) -> int:
        return self.devices

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        self._may("nvmlDeviceGetHandleByIndex")
        if index in self.lost:
            raise NvmlError(GPU_IS_LOST)
        return index

    def nvmlDeviceGetMigMode(self, handle: int) -> list[int]:
        self._may("nvmlDeviceGetMigMode")
        return [int(handle in self.profiles)] * 2

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: int) -> int:
        return len(self.profiles[handle])

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: int, number: int) -> tuple[int, int]:
        if not self.profiles[handle][number]:
            raise NvmlError(NOT_FOUND)
        return handle, number

    def nvmlDeviceGetName(self, handle: int | tuple[int, int]) -> bytes:
        """Of an instance as in NVIDIA's MIG User Guide: `NVIDIA A100-SXM4-40GB MIG 1g.5gb`."""
        if isinstance(handle, tuple):
            return f"NVIDIA H100 80GB HBM3 MIG {self.profiles[handle[0]][handle[1]]}".encode()
        return b"NVIDIA H100 80GB HBM3"

    def nvmlDeviceGetUUID(self, handle: int | tuple[int, int]) -> bytes:
        if isinstance(handle, tuple):
            return f"MIG-{handle[0]}{handle[1]}000000-1111-2222-3333-444444444444".encode()
        return f"GPU-0000000{handle}-1111-2222-3333-444444444444".encode()

    def nvmlDeviceGetMemoryInfo(self, handle: int | tuple[int, int]) -> SimpleNamespace:
        if isinstance(handle, tuple):
            return SimpleNamespace(total=10 * 2**30, used=2**20)
        return SimpleNamespace(total=80 * 2**30, used=5 * 2**30)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        self._may("nvmlDeviceGetUtilizationRates")
        return SimpleNamespace(gpu=37, memory=12)

    def nvmlDeviceGetTotalEccErrors(self, handle: int, kind: int, counter: int) -> int:
        self._may("nvmlDeviceGetTotalEccErrors")
        return self.uncorrected if kind == 1 else 2

    def nvmlDeviceGetRemappedRows(self, handle: int) -> tuple[int, int, int, int]:
        self._may("nvmlDeviceGetRemappedRows")
        return self.rows

    def nvmlDeviceGetFieldValues(self, handle: int, fields: list[int]) -> list[SimpleNamespace]:
        self._may("nvmlDeviceGetFieldValues")
        if fields == [230]:
            return [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=self.recovery_action))]
        return [
            SimpleNamespace(
                nvmlReturn=0 if field in self.link_errors else NOT_SUPPORTED,
                value=SimpleNamespace(ullVal=self.link_errors.get(field, 0)),
            )
            for field in fields
        ]

    def nvmlDeviceGetPcieReplayCounter(self, handle: int) -> int:
        self._may("nvmlDeviceGetPcieReplayCounter")
        return 3

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        self._may("nvmlDeviceGetTemperature")
        assert sensor == 0
        return 61

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        self._may("nvmlDeviceGetPowerUsage")
        return 412_480

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:
        self._may("nvmlDeviceGetTotalEnergyConsumption")
        return self.millijoules.get(handle, 0)

    def nvmlDeviceGetPowerManagementLimitConstraints(self, handle: int) -> list[int]:
        return [200_000, 700_000]

    def nvmlDeviceGetClockInfo(self, handle: int, kind: int) -> int:
        self._may("nvmlDeviceGetClockInfo")
        assert kind == 1
        return self.clock_mhz

    def nvmlDeviceGetMaxClockInfo(self, handle: int, kind: int) -> int:
        assert kind == 1
        return 1980

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: int) -> int:
        self._may("nvmlDeviceGetCurrentClocksEventReasons")
        return self.clock_reasons

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:
        return self.clock_reasons

    def nvmlEventSetCreate(self) -> str:
        return "events"

    def nvmlEventSetFree(self, events: str) -> None:
        self._may("nvmlEventSetFree")

    def nvmlDeviceRegisterEvents(self, handle: int, kinds: int, events: str) -> None:
        assert (kinds, events) == (8, "events")
        self._may("nvmlDeviceRegisterEvents")

    def nvmlEventSetWait_v2(self, events: str, within_ms: int) -> SimpleNamespace:
        self._may("nvmlEventSetWait_v2")
        if not self.xids:
            threading.Event().wait(within_ms / 1000)
            raise NvmlError(TIMEOUT)
        device, xid = self.xids.pop(0)
        return SimpleNamespace(device=device, eventType=8, eventData=xid)

    def nvmlDeviceGetIndex(self, handle: int) -> int:
        return handle
