"""Reads Neuron devices: `neuron-ls` once, `neuron-monitor` for the life of the agent, the driver's counters with each
of its lines, and the kernel log. The monitor is a child that exits with the agent. It is restarted a bounded number of
times; its output cannot end the agent."""

import asyncio
import contextlib
import json
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from time import monotonic

import msgspec

from engine_agent.node.telemetry.accelerators import OnFault, Restarts, grown, hardware_fault
from engine_agent.node.telemetry.fault_logs import KERNEL_LOG, KernelLog, kernel_fault
from engine_agent.node.telemetry.neuron_output import (
    KIND,
    MonitorReport,
    UnreadableOutput,
    parse_monitor_line,
    parse_neuron_ls,
    with_report,
)
from engine_agent.protocol.signatures import FaultSignature
from engine_agent.protocol.telemetry_messages import Accelerator

log = logging.getLogger(__name__)

TOOLS = Path("/opt/aws/neuron/bin")
"""The folder of the package aws-neuronx-tools, which is rarely on the PATH of a service."""
SYSFS = Path("/sys/devices/virtual/neuron_device")
"""Counters of the driver that `neuron-monitor` does not show:
https://awsdocs-neuron.readthedocs-hosted.com/en/latest/tools/neuron-sys-tools/neuron-sysfs-user-guide.html"""
LIST_TIMEOUT_S = 20.0
PERIOD_S = 5.0
SILENT_AFTER_S = 6 * PERIOD_S
STOP_GRACE_S = 2.0
MAX_LINE_BYTES = 4 * 1024 * 1024
"""A trn2.48xlarge with many loaded models prints about 100 KiB."""

MONITOR_CONFIGURATION = {
    "period": f"{PERIOD_S:g}s",
    "neuron_runtimes": [
        {
            "tag_filter": ".*",
            "metrics": [{"type": "neuroncore_counters"}, {"type": "memory_used"}, {"type": "execution_stats"}],
        }
    ],
    "system_metrics": [{"type": "neuron_hw_counters"}],
}

COUNTER_FAULTS: Mapping[str, FaultSignature] = {
    "mem_ecc_uncorrected": FaultSignature.NEURON_HBM_UNCORRECTABLE,
    "sram_ecc_uncorrected": FaultSignature.NEURON_SRAM_UNCORRECTABLE,
    "mem_ecc_repairable_uncorrected": FaultSignature.NEURON_HBM_REPAIRABLE,
}


EXECUTIONS: Mapping[str, str] = {
    "hardware_errors": "ended with a hardware error",
    "timed_out": "took longer than the runtime allows",
    "completed_with_err": "ended in a non-numeric error",
}
"""Outcomes of executions that hardware may cause: hangs and broken memory also appear as the last two."""


class NeuronReader:
    """See `AcceleratorReader`. `device_count` is the number of device files."""

    kind = KIND

    def __init__(
        self,
        on_fault: OnFault,
        device_count: int,
        *,
        tools: Path = TOOLS,
        kernel_log: Path = KERNEL_LOG,
        sysfs: Path = SYSFS,
        restarts: Restarts | None = None,
    ) -> None:
        self._on_fault = on_fault
        self._device_count = device_count
        self._tools = tools
        self._kernel_log = KernelLog(self._kernel_line, kernel_log)
        self._sysfs = sysfs
        self._restarts = restarts or Restarts()
        self._devices: tuple[Accelerator, ...] = ()
        self._counters: dict[int, Mapping[str, int]] = {}
        self._troubles: dict[str, str] = {}
        self._monitor: asyncio.subprocess.Process | None = None
        self._may_monitor = asyncio.Event()
        self._may_monitor.set()

    @property
    def devices(self) -> Sequence[Accelerator]:
        return self._devices

    @property
    def trouble(self) -> str:
        return "; ".join(text for text in self._troubles.values() if text)

    async def prepare(self) -> None:
        try:
            self._devices = await self._list()
            self._troubles["neuron-ls"] = ""
        except (OSError, TimeoutError, UnreadableOutput) as error:
            self._troubles["neuron-ls"] = f"neuron-ls: {error}"
            return
        if len(self._devices) < self._device_count:
            self._on_fault(
                hardware_fault(
                    FaultSignature.ACCELERATOR_MISSING,
                    f"neuron-ls shows {len(self._devices)} of {self._device_count} devices",
                    {"expected": self._device_count, "found": [device.index for device in self._devices]},
                )
            )

    async def _list(self) -> tuple[Accelerator, ...]:
        return parse_neuron_ls(await _output_of(str(self._tools / "neuron-ls"), "-j"))

    async def run(self) -> None:
        self._troubles["kernel log"] = self._kernel_log.open()
        try:
            await self._monitor_with_restarts()
            await asyncio.Event().wait()  # the kernel log is followed for the life of the agent
        finally:
            self._kernel_log.close()

    async def release(self) -> None:
        """Stops `neuron-monitor`, because the driver cannot be reloaded while a program uses it."""
        self._may_monitor.clear()
        if self._monitor is not None:
            await _stop_monitor(self._monitor)

    def resume(self) -> None:
        self._may_monitor.set()

    async def _monitor_with_restarts(self) -> None:
        failures = 0
        while failures < self._restarts.at_most:
            await self._may_monitor.wait()
            began_s = monotonic()
            try:
                reason = await self._monitor_once()
            except (OSError, ValueError) as error:
                reason = str(error)
            failures = 1 + self._restarts.counted(failures, monotonic() - began_s)
            self._troubles["neuron-monitor"] = f"neuron-monitor: {reason}"
            log.warning("neuron-monitor: %s (%d of %d)", reason, failures, self._restarts.at_most)
            await asyncio.sleep(self._restarts.pause_s(failures))
        self._troubles["neuron-monitor"] += f"; gave up after {failures} starts in a row"

    async def _monitor_once(self) -> str:
        with tempfile.NamedTemporaryFile("w", prefix="neuron-monitor-", suffix=".json") as configuration:
            json.dump(MONITOR_CONFIGURATION, configuration)
            configuration.flush()
            process = await asyncio.create_subprocess_exec(
                *(str(self._tools / "neuron-monitor"), "-c", configuration.name),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                limit=MAX_LINE_BYTES,
                env=_environment(),
            )
            self._monitor = process
            try:
                return await self._read(process)
            finally:
                self._monitor = None
                await _stop_monitor(process)

    async def _read(self, process: asyncio.subprocess.Process) -> str:
        output = process.stdout
        if output is None:
            raise ValueError("it has no output")
        while True:
            try:
                async with asyncio.timeout(SILENT_AFTER_S):
                    line = await output.readline()
            except TimeoutError:
                return f"silent for {SILENT_AFTER_S:g} s"
            except ValueError:
                return f"it printed a line of more than {MAX_LINE_BYTES} bytes"
            if not line:
                return f"it exited with status {await process.wait()}"
            self._read_monitor_line(line)

    def _read_monitor_line(self, line: bytes) -> None:
        try:
            report = parse_monitor_line(line)
        except UnreadableOutput as error:
            self._troubles["neuron-monitor"] = str(error)
            return
        self._troubles["neuron-monitor"] = "; ".join(report.errors)
        self._devices = tuple(self._with_driver_counters(device) for device in with_report(self._devices, report))
        for device in self._devices:
            self._report_counters(device)
        self._report_executions(report)

    def _with_driver_counters(self, device: Accelerator) -> Accelerator:
        """The device with the driver's counters. If both count, the larger value is the later one."""
        errors = {name: max(count, device.errors.get(name, 0)) for name, count in self._driver_counters(device.index)}
        return msgspec.structs.replace(device, errors={**device.errors, **errors})

    def _driver_counters(self, index: int) -> Iterator[tuple[str, int]]:
        for name in COUNTER_FAULTS:
            counter = self._sysfs / f"neuron{index}" / "stats" / "hardware" / name
            with contextlib.suppress(OSError, ValueError):  # an older driver has none
                yield name, int((counter / "total" if counter.is_dir() else counter).read_text())

    def _report_counters(self, device: Accelerator) -> None:
        """Counters live as long as the driver: their value when an agent starts is as bad as later growth."""
        more = grown(self._counters.get(device.index, {}), device.errors)
        self._counters[device.index] = device.errors
        for name, signature in COUNTER_FAULTS.items():
            if name in more:
                summary = f"{name} of neuron {device.index} grew by {more[name]} to {device.errors[name]}"
                evidence = {"device": device.index, "counter": name, "grew": more[name], "counters": device.errors}
                self._on_fault(hardware_fault(signature, summary, evidence))

    def _report_executions(self, report: MonitorReport) -> None:
        """Outcomes do not identify hardware; ECC counters and the kernel log do."""
        outcomes = [
            f"{report.executions[name]} {text}" for name, text in EXECUTIONS.items() if name in report.executions
        ]
        if outcomes:
            evidence = {"executions": dict(report.executions)}
            fault = hardware_fault(FaultSignature.NEURON_HARDWARE_ERROR, f"executions: {', '.join(outcomes)}", evidence)
            self._on_fault(fault)

    def _kernel_line(self, line: str) -> None:
        fault = kernel_fault(line)
        if fault is not None:
            self._on_fault(fault)


async def _output_of(*argv: str) -> bytes:
    """Standard output of a successful program. Raises OSError if it cannot be started, or failed. Raises TimeoutError
    if it did not exit within `LIST_TIMEOUT_S`."""
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=_environment(),
    )
    try:
        async with asyncio.timeout(LIST_TIMEOUT_S):
            output, errors = await process.communicate()
    except TimeoutError as error:
        raise TimeoutError(f"no answer within {LIST_TIMEOUT_S:g} s") from error
    finally:
        await _stop_monitor(process)
    if process.returncode:
        message = errors.decode(errors="replace").strip()[:200]
        raise OSError(f"it exited with status {process.returncode}: {message or 'no reason given'}")
    return output


async def _stop_monitor(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(STOP_GRACE_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


def _environment() -> dict[str, str]:
    return {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH") if name in os.environ}
