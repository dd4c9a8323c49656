"""Reads NVIDIA devices from a separate thread: use, memory and error counters every few seconds, and error events as
they come. A GPU with MIG is shown as its instances, whose use NVML does not measure. A hanging driver blocks only that
thread; the node then reports how long it has been silent."""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from msgspec import structs

from engine_agent.node.planning.energy import Reading
from engine_agent.node.telemetry.accelerators import OnFault, Restarts, grown, hardware_fault
from engine_agent.node.telemetry.nvml import GPU_IS_LOST, KIND, RESET_REQUIRED, Nvml, NvmlFailed, Xid, load_library
from engine_agent.node.telemetry.throttling import ClockMeter
from engine_agent.protocol.signatures import FaultSignature
from engine_agent.protocol.telemetry_messages import Accelerator

log = logging.getLogger(__name__)

RELEASED_WITHIN_S = 10.0
HELD_POLL_S = 0.05

FATAL_XIDS: Mapping[int, str] = {
    46: "the GPU stopped processing",
    48: "double-bit ECC error",
    62: "the GPU's power controller halted",
    64: "a row or page with errors was not retired",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    95: "uncontained ECC error",
    109: "switching between applications timed out",
    110: "security fault",
    119: "the GPU's system processor timed out",
    120: "error of the GPU's system processor",
    136: "NVLink did not train",
    140: "unrecoverable ECC error",
    143: "the GPU did not start",
    155: "NVLink error of its software",
    158: "the GPU timed out for good",
}
"""XIDs whose immediate action by NVIDIA is to reset the GPU (RESET_GPU), to restart the machine (RESTART_BM) or a
workflow that leads to one: https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html. Not those that end the
application and leave the GPU healthy, such as 13, 31, 43 and 94: the engine exits, and its agent restarts it."""
RECOVERY_OF_DEVICE: Mapping[int, str] = {1: "a reset of the GPU", 2: "a restart of the machine"}
"""NVML's recovery actions without which nothing works. With the others (none, and 3 and 4: drain, at any time) the
device still computes correctly, because an ECC error was contained."""
_RECOVERY = "recovery_action"


@dataclass(frozen=True, slots=True)
class NvidiaTimes:
    """How often devices are read, and when the thread counts as blocked. `wait_ms` bounds one wait for an event."""

    read_every_s: float = 5.0
    wait_ms: int = 1000
    first_read_s: float = 10.0
    silent_after_s: float = 30.0
    fault_after_s: float = 120.0
    """Silence that is a fault of the machine: no reset of a GPU takes longer, and a loaded driver answers within
    seconds."""
    restarts: Restarts = field(default_factory=Restarts)


class NvidiaReader:
    """See `AcceleratorReader`. `device_count` is the number of devices with files of the driver."""

    kind = KIND

    def __init__(
        self,
        on_fault: OnFault,
        device_count: int,
        *,
        library: Callable[[], Any] = load_library,
        times: NvidiaTimes | None = None,
    ) -> None:
        self._on_fault = on_fault
        self._device_count = device_count
        self._library = library
        self._times = times or NvidiaTimes()
        self._devices: dict[int, Accelerator] = {}
        self._meters: dict[int, tuple[float, ClockMeter]] = {}
        self._lost: set[int] = set()
        self._energy: tuple[float, Mapping[str, Reading]] | None = None
        self._trouble = ""
        self._silent_checks = 0
        self._last_response_s = monotonic()
        self._stop, self._held, self._closed = threading.Event(), threading.Event(), threading.Event()
        self._first_read = asyncio.Event()

    @property
    def devices(self) -> Sequence[Accelerator]:
        return tuple(self._devices[index] for index in sorted(self._devices))

    @property
    def trouble(self) -> str:
        silent_s = monotonic() - self._last_response_s
        if not self._trouble and silent_s > self._times.silent_after_s:
            return f"the driver has not answered for {silent_s:.0f} s"
        return self._trouble

    @property
    def energy(self) -> tuple[float, Mapping[str, Reading]] | None:
        """The energy of all devices since their driver was loaded, and the time of reading (monotonic seconds); None if
        not all were read."""
        return self._energy

    async def prepare(self) -> None:
        threading.Thread(target=_Session(self, asyncio.get_running_loop()).run, name="nvml", daemon=True).start()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._first_read.wait(), self._times.first_read_s)

    async def run(self) -> None:
        """The thread reads until this is cancelled. A driver that does not answer blocks the thread, but not this."""
        try:
            while True:
                await asyncio.sleep(self._times.read_every_s)
                self._check_silence(monotonic() - self._last_response_s)
        finally:
            self._stop.set()

    def _check_silence(self, silent_s: float) -> None:
        """Reports once per silence, and not before a second check: after a pause of the agent the thread answers
        first."""
        is_silent = not self._trouble and not self._held.is_set() and silent_s > self._times.fault_after_s
        self._silent_checks = self._silent_checks + 1 if is_silent else 0
        if self._silent_checks == 2:
            summary = f"the NVIDIA driver has not answered for {silent_s:.0f} s"
            evidence = {"silent_s": round(silent_s)}
            self._on_fault(hardware_fault(FaultSignature.NVIDIA_DRIVER_SILENT, summary, evidence))

    async def release(self) -> None:
        self._held.set()
        await asyncio.to_thread(self._closed.wait, RELEASED_WITHIN_S)

    def resume(self) -> None:
        self._note_response()
        self._held.clear()

    # --- called in the loop, by the thread ---------------------------------------------------------------------------

    def _note_response(self, trouble: str = "") -> None:
        self._last_response_s = monotonic()
        self._trouble = trouble
        if trouble:
            log.warning("nvidia: %s", trouble)
            self._first_read.set()

    def _apply_readings(self, read: Mapping[int, Accelerator | NvmlFailed], count: int) -> None:
        """`count`: of GPUs. Instances that were removed are shown no more."""
        self._note_response()
        self._devices = {index: device for index, device in self._devices.items() if index in read}
        for index, device in read.items():
            if isinstance(device, NvmlFailed):
                self._mark_lost(index, device)
            else:
                self._lost.discard(index)
                before = self._devices.get(index)
                self._devices[index] = self._with_sums(index, device)
                self._report_counters(device, before.errors if before is not None else {})
        if not self._first_read.is_set():
            self._first_read.set()
            self._check_device_count(count)

    def _with_sums(self, index: int, device: Accelerator) -> Accelerator:
        """The device with the sums of its clocks. The reading counts for the time since the one before."""
        if device.clocks is None:
            return device
        now_s = monotonic()
        read_s, meter = self._meters.get(index, (now_s, ClockMeter()))
        self._meters[index] = (now_s, meter)
        return structs.replace(device, clocks=meter.add(device.clocks, round((now_s - read_s) * 1000)))

    def _note_energy(self, at_s: float, readings: Mapping[str, Reading]) -> None:
        self._energy = (at_s, readings) if readings else None

    def _mark_lost(self, index: int, failed: NvmlFailed) -> None:
        if failed.code not in (GPU_IS_LOST, RESET_REQUIRED):
            self._trouble = f"device {index}: {failed}"
        elif index not in self._lost:
            self._lost.add(index)
            evidence = {**self._named(index), "nvml_error": failed.code}
            self._on_fault(
                hardware_fault(FaultSignature.NVIDIA_GPU_LOST, f"nvidia {index} is lost: {failed}", evidence)
            )

    def _check_device_count(self, count: int) -> None:
        if count < self._device_count:
            summary = f"NVML shows {count} of {self._device_count} devices"
            evidence = {"expected": self._device_count, "found": count}
            self._on_fault(hardware_fault(FaultSignature.ACCELERATOR_MISSING, summary, evidence))

    def _report_counters(self, device: Accelerator, before: Mapping[str, int]) -> None:
        more, action = grown(before, device.errors), device.errors.get(_RECOVERY)
        contained = action is not None and action not in RECOVERY_OF_DEVICE
        ecc = FaultSignature.NVIDIA_ECC_CONTAINED if contained else FaultSignature.NVIDIA_ECC_UNCORRECTABLE
        for counter, signature in (
            ("ecc_uncorrected", ecc),
            ("row_remap_failed", FaultSignature.NVIDIA_ROW_REMAP_FAILED),
            ("row_remap_pending", FaultSignature.NVIDIA_ROW_REMAP_PENDING),
        ):
            if counter in more:
                summary = f"{counter} of nvidia {device.index} grew by {more[counter]} to {device.errors[counter]}"
                evidence = {**self._named(device.index), "counter": counter, "counters": device.errors}
                self._on_fault(hardware_fault(signature, summary, evidence))
        if action is not None and action in RECOVERY_OF_DEVICE and before.get(_RECOVERY) != action:
            summary = f"the driver of nvidia {device.index} requests {RECOVERY_OF_DEVICE[action]}"
            evidence = {**self._named(device.index), _RECOVERY: action, "counters": device.errors}
            self._on_fault(hardware_fault(FaultSignature.NVIDIA_RECOVERY_NEEDED, summary, evidence))

    def _report_xid(self, xid: Xid) -> None:
        self._note_response()
        means = FATAL_XIDS.get(xid.code)
        signature = FaultSignature.NVIDIA_XID if means is None else FaultSignature.NVIDIA_XID_FATAL
        where = "an unknown device" if xid.device is None else f"nvidia {xid.device}"
        summary = f"XID {xid.code} on {where}" + (f": {means}" if means is not None else "")
        self._on_fault(hardware_fault(signature, summary, {"xid": xid.code, **self._named(xid.device)}))

    def _named(self, index: int | None) -> dict[str, object]:
        """A device in evidence: its number, which may change, and its UUID if it was read."""
        known = self._devices.get(index) if index is not None else None
        return {"device": index, "uuid": known.uuid} if known is not None and known.uuid else {"device": index}


class _Session:
    """The thread's side: it calls the library and posts results into the reader's loop."""

    def __init__(self, reader: NvidiaReader, loop: asyncio.AbstractEventLoop) -> None:
        self._reader = reader
        self._loop = loop

    def run(self) -> None:
        """Reads until the reader stops, its loop is closed, or too many sessions failed in a row."""
        reader, times = self._reader, self._reader._times
        with contextlib.suppress(RuntimeError):  # the loop is closed
            failures, reason = 0, ""
            while failures < times.restarts.at_most:
                began_s = monotonic()
                try:
                    self._read_until_stopped()
                    if not self._wait_while_held():
                        return
                    continue
                except NvmlFailed as failed:
                    reason = str(failed)
                except Exception as error:
                    if self._loop.is_closed():
                        return
                    log.exception("error in the nvml thread")  # an unknown answer of the library
                    reason = f"{type(error).__name__}: {error}"
                self._post(reader._note_response, reason)
                failures = 1 + times.restarts.counted(failures, monotonic() - began_s)
                if reader._stop.wait(times.restarts.pause_s(failures)):
                    return
            self._post(reader._note_response, f"{reason}; gave up after {failures} sessions in a row")

    def _read_until_stopped(self) -> None:
        nvml = Nvml(self._reader._library())
        times, stop = self._reader._times, self._reader._stop
        read_at_s = monotonic()
        try:
            while not stop.is_set() and not self._reader._held.is_set():
                if monotonic() >= read_at_s:
                    self._post(self._reader._apply_readings, _read_all(nvml), nvml.device_count)
                    self._post(self._reader._note_energy, monotonic(), _energy_of_all(nvml))
                    read_at_s = monotonic() + times.read_every_s
                xid = nvml.next_xid(times.wait_ms)
                if xid is not None:
                    self._post(self._reader._report_xid, xid)
                elif not nvml.has_events:
                    stop.wait(times.wait_ms / 1000)
        finally:
            with contextlib.suppress(NvmlFailed):
                nvml.close()

    def _wait_while_held(self) -> bool:
        """Waits without a session; returns False if the reader stops."""
        reader = self._reader
        reader._closed.set()
        while reader._held.is_set() and not reader._stop.wait(HELD_POLL_S):
            pass
        reader._closed.clear()
        return not reader._stop.is_set()

    def _post(self, call: Callable[..., None], *arguments: object) -> None:
        self._loop.call_soon_threadsafe(call, *arguments)


def _energy_of_all(nvml: Nvml) -> dict[str, Reading]:
    """Of all devices, or of none, because a partial sum would look complete."""
    read = {f"nvidia{index}": nvml.energy(index) for index in range(nvml.device_count)}
    known = {name: reading for name, reading in read.items() if reading is not None}
    return known if len(known) == len(read) else {}


def _read_all(nvml: Nvml) -> dict[int, Accelerator | NvmlFailed]:
    read: dict[int, Accelerator | NvmlFailed] = {}
    for index in range(nvml.device_count):
        try:
            instances = nvml.instances(index)
            if instances is None:
                read[index] = nvml.read(index)
            else:
                read |= {instance.index: instance for instance in instances}
        except NvmlFailed as failed:
            read[index] = failed
    return read
