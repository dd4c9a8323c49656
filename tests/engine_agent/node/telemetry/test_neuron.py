"""The Neuron reader with substitutes for the tools: correct, broken and silent ones."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from engine_agent.node import procfs
from engine_agent.node.telemetry import neuron
from engine_agent.node.telemetry.accelerators import Restarts
from engine_agent.node.telemetry.neuron import NeuronReader
from engine_agent.protocol.messages import Fault
from tests.engine_agent.fake_control_plane import eventually

pytestmark = pytest.mark.processes

RECORDED = Path(__file__).parent / "recorded"
QUICK = Restarts(at_most=3, first_pause_s=0.01, longest_pause_s=0.02)


class Machine:
    def __init__(self, folder: Path, devices: int = 2) -> None:
        self.folder = folder
        self.faults: list[Fault] = []
        self.reader = NeuronReader(
            self.faults.append,
            devices,
            tools=folder,
            kernel_log=folder / "kmsg",
            sysfs=folder / "neuron_device",
            restarts=QUICK,
        )
        self.tool("neuron-ls", f"cat {RECORDED / 'neuron-ls-trn2.json'}")

    def tool(self, name: str, script: str) -> None:
        path = self.folder / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def lines(self, *lines: dict[str, Any]) -> None:
        """Lets the monitor print these lines and keep running."""
        (self.folder / "lines").write_text("".join(json.dumps(line) + "\n" for line in lines))
        self.tool("neuron-monitor", f"cat {self.folder / 'lines'}; exec sleep 60")

    def driver_counts(self, index: int, name: str, count: int, *, has_total: bool = False) -> None:
        """Let the driver count an error of a device, in a file or as it keeps what can also be read as `present`."""
        counter = self.folder / "neuron_device" / f"neuron{index}" / "stats" / "hardware" / name
        (counter if has_total else counter.parent).mkdir(parents=True, exist_ok=True)
        (counter / "total" if has_total else counter).write_text(f"{count}\n")

    @asynccontextmanager
    async def read(self) -> AsyncIterator[NeuronReader]:
        await self.reader.prepare()
        running = asyncio.create_task(self.reader.run())
        try:
            yield self.reader
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running


def line(**counters: int) -> dict[str, Any]:
    """A report with these ECC counters of device 0."""
    report: dict[str, Any] = json.loads((RECORDED / "neuron-monitor-trn2.json").read_text())
    report["system_data"]["neuron_hw_counters"]["neuron_devices"][0] |= counters
    return report


@pytest.mark.asyncio
async def test_devices_are_known_before_the_monitor_says_anything(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    await machine.reader.prepare()
    assert [device.index for device in machine.reader.devices] == [0, 15]
    assert (machine.reader.trouble, machine.faults) == ("", [])


@pytest.mark.asyncio
async def test_fewer_devices_than_files_is_a_hard_fault(tmp_path: Path) -> None:
    machine = Machine(tmp_path, devices=3)
    await machine.reader.prepare()
    (fault,) = machine.faults
    assert (fault.signature, fault.evidence) == (
        "accelerator_missing",
        {"expected": 3, "found": [0, 15], "hard": True},
    )


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("script", "said"),
    [("echo no driver >&2; exit 3", "status 3: no driver"), ("echo none", "printed no JSON"), (None, "No such file")],
)
async def test_a_listing_that_fails_is_trouble_and_no_more(tmp_path: Path, script: str | None, said: str) -> None:
    machine = Machine(tmp_path)
    if script is None:
        (tmp_path / "neuron-ls").unlink()
    else:
        machine.tool("neuron-ls", script)
    await machine.reader.prepare()
    assert said in machine.reader.trouble
    assert machine.faults == []


@pytest.mark.asyncio
async def test_what_the_monitor_says_becomes_use_of_the_devices(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.lines(line())
    async with machine.read() as reader:
        await eventually(lambda: reader.devices[0].utilisation_percent)
        assert reader.devices[0].memory_used_bytes == 782486784
        assert "neuron-monitor" not in reader.trouble


@pytest.mark.asyncio
async def test_an_uncorrectable_error_is_a_hard_fault_each_time_its_counter_grows(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.lines(line(), line(sram_ecc_uncorrected=1), line(sram_ecc_uncorrected=1), line(sram_ecc_uncorrected=4))
    async with machine.read():
        await eventually(lambda: len(machine.faults) == 2)
    assert [fault.signature for fault in machine.faults] == ["neuron_sram_uncorrectable"] * 2
    assert machine.faults[1].summary == "sram_ecc_uncorrected of neuron 0 grew by 3 to 4"
    assert machine.faults[1].evidence["hard"] is True


@pytest.mark.asyncio
@pytest.mark.parametrize("has_total", [True, False])
async def test_what_only_the_driver_counts_is_a_fault_too(tmp_path: Path, has_total: bool) -> None:
    machine = Machine(tmp_path)
    machine.driver_counts(15, "mem_ecc_repairable_uncorrected", 2, has_total=has_total)
    machine.driver_counts(0, "sram_ecc_uncorrected", 0, has_total=has_total)
    machine.lines(line())
    async with machine.read() as reader:
        await eventually(lambda: bool(machine.faults))
        assert reader.devices[15].errors == {"mem_ecc_repairable_uncorrected": 2}
    (fault,) = machine.faults
    assert (fault.signature, fault.evidence["hard"]) == ("neuron_hbm_repairable", False)
    assert fault.summary == "mem_ecc_repairable_uncorrected of neuron 15 grew by 2 to 2"


@pytest.mark.asyncio
async def test_executions_that_hang_or_fail_are_a_fault_that_blames_no_part(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    hung = line()
    hung["neuron_runtime_data"][0]["report"]["execution_stats"]["execution_summary"] |= {
        "timed_out": 2,
        "completed_with_err": 1,
        "completed_with_num_err": 7,
    }
    machine.lines(line(), hung)
    async with machine.read():
        await eventually(lambda: bool(machine.faults))
    (fault,) = machine.faults
    assert (fault.signature, fault.evidence["hard"]) == ("neuron_hardware_error", False)
    assert fault.summary == ("executions: 2 took longer than the runtime allows, 1 ended in a non-numeric error")


@pytest.mark.asyncio
async def test_a_corrected_error_is_counted_and_no_fault(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.lines(line(mem_ecc_corrected=7))
    async with machine.read() as reader:
        await eventually(lambda: reader.devices[0].errors.get("mem_ecc_corrected") == 7)
    assert machine.faults == []


@pytest.mark.asyncio
async def test_a_monitor_that_keeps_ending_is_given_up_and_the_kernel_log_is_still_followed(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "kmsg")
    machine = Machine(tmp_path)
    machine.tool("neuron-monitor", "echo usage; echo x >> starts; exit 1".replace("starts", str(tmp_path / "starts")))
    async with machine.read() as reader:
        await eventually(lambda: "gave up after 3 starts in a row" in reader.trouble)
        assert "it exited with status 1" in reader.trouble
        assert (tmp_path / "starts").read_text().count("x") == 3
        writer = os.open(tmp_path / "kmsg", os.O_WRONLY)
        record = (RECORDED / "kmsg.txt").read_text().replace("{now}", "999999999999999")
        os.write(writer, record.encode())
        await eventually(lambda: bool(machine.faults))
        os.close(writer)
    assert machine.faults[0].signature == "neuron_sram_uncorrectable"


@pytest.mark.asyncio
async def test_a_monitor_that_says_nothing_is_restarted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neuron, "SILENT_AFTER_S", 0.05)
    machine = Machine(tmp_path)
    machine.tool("neuron-monitor", f"echo $$ >> {tmp_path / 'pids'}; exec sleep 60")
    async with machine.read() as reader:
        await eventually(lambda: "silent for 0.05 s; gave up" in reader.trouble)
    for pid in (tmp_path / "pids").read_text().split():
        assert procfs.stat(int(pid)) is None


@pytest.mark.asyncio
async def test_a_reader_that_ends_leaves_no_monitor(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.tool("neuron-monitor", f"echo $$ > {tmp_path / 'pid'}; exec sleep 60")
    async with machine.read():
        await eventually(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip())
    assert procfs.stat(int((tmp_path / "pid").read_text())) is None
