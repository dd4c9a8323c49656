"""The NVIDIA reader with a substitute library: its results for answers, errors and events."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine_agent.node.devices import own_faults, visible_devices
from engine_agent.node.telemetry.accelerators import AcceleratorMonitor, Restarts
from engine_agent.node.telemetry.energy import energy_here
from engine_agent.node.telemetry.nvidia import NvidiaReader, NvidiaTimes
from engine_agent.node.telemetry.nvml import NvmlFailed, numa_node
from engine_agent.protocol.machine_messages import NodeResources
from engine_agent.protocol.messages import Fault
from engine_agent.protocol.signatures import FaultSignature, fault_scope, is_hard
from engine_agent.protocol.telemetry_messages import DeviceClocks
from tests.engine_agent.fake_control_plane import eventually
from tests.engine_agent.node.telemetry.nvml_library import NOT_SUPPORTED, UNKNOWN, Library

NOWHERE = Path("/nowhere")
QUICK = NvidiaTimes(read_every_s=0.01, wait_ms=5, restarts=Restarts(at_most=3, first_pause_s=0.01))
TIRELESS = replace(QUICK, restarts=Restarts(at_most=1_000_000, first_pause_s=0.01, longest_pause_s=0.01))
"""For tests that repair the library: a busy machine may run any number of sessions before the repair."""


class Machine:
    def __init__(self, library: Library, files: int = 1, times: NvidiaTimes = QUICK) -> None:
        self.library = library
        self.faults: list[Fault] = []
        self.reader = NvidiaReader(self.faults.append, files, library=lambda: library, times=times)

    @asynccontextmanager
    async def read(self) -> AsyncIterator[NvidiaReader]:
        await self.reader.prepare()
        running = asyncio.create_task(self.reader.run())
        try:
            yield self.reader
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running
            self.library.blocked.set()

    async def signature(self) -> str:
        await eventually(lambda: bool(self.faults))
        return self.faults[0].signature


@pytest.mark.asyncio
async def test_a_device_has_name_use_memory_and_error_counters() -> None:
    async with Machine(Library()).read() as reader:
        (device,) = reader.devices
    assert str(device) == "nvidia 0: NVIDIA H100 80GB HBM3, 80 GiB"
    assert (device.uuid, device.numa) == ("GPU-00000000-1111-2222-3333-444444444444", None)
    assert (device.utilisation_percent, device.memory_used_bytes) == (37.0, 5 * 2**30)
    assert (device.temperature_c, device.power_watts) == (61.0, 412.5)
    assert device.errors["ecc_corrected"] == 2
    assert device.errors["pcie_replay"] == 3
    assert not any(name.startswith("nvlink") for name in device.errors), "it has no links"
    assert device.errors.keys() >= {"ecc_uncorrected", "row_remap_failed", "recovery_action"}
    assert reader.trouble == ""


@pytest.mark.asyncio
async def test_errors_of_links_are_counted_by_kind() -> None:
    library = Library()
    library.link_errors = {38: 5, 52: 0}
    async with Machine(library).read() as reader:
        (device,) = reader.devices
    assert {name: device.errors.get(name) for name in ("nvlink_crc_flit", "nvlink_replay", "nvlink_recovery")} == {
        "nvlink_crc_flit": 5,
        "nvlink_replay": 0,
        "nvlink_recovery": None,
    }


def test_the_numa_node_of_a_device_is_found_by_its_pci_address(tmp_path: Path) -> None:
    file = tmp_path / "sys/bus/pci/devices/0000:3b:00.0/numa_node"
    file.parent.mkdir(parents=True)
    for text, number in (("1\n", 1), ("-1\n", None), ("", None)):
        file.write_text(text)
        assert numa_node("00000000:3B:00.0", tmp_path) == number
    assert numa_node("00000000:5E:00.0", tmp_path) is None


@pytest.mark.asyncio
@pytest.mark.parametrize(("share", "microjoules"), [(1.0, 3_000), (0.5, 1_500)])
async def test_energy_of_a_node_is_that_of_its_devices_or_of_its_share(share: float, microjoules: int) -> None:
    machine = Machine(Library(devices=2), files=2)
    owns = NodeResources("nvidia", (1,), ("GPU-00000001-1111-2222-3333-444444444444",), share=share)
    monitor = energy_here(AcceleratorMonitor([machine.reader], owns), NOWHERE)
    async with machine.read() as reader:
        await eventually(lambda: reader.energy is not None)
        monitor.read()
        machine.library.millijoules = {0: 2, 1: 3}

        def is_counted() -> bool:
            monitor.read()
            return monitor.meters()[0].microjoules > 0

        await eventually(is_counted)
        assert [meter.microjoules for meter in monitor.meters()] == [microjoules]


@pytest.mark.asyncio
async def test_energy_of_all_devices_becomes_a_meter_and_of_a_part_of_them_none() -> None:
    library = Library(devices=2)
    machine = Machine(library, files=2)
    monitor = energy_here(AcceleratorMonitor([machine.reader]), NOWHERE)
    async with machine.read() as reader:
        await eventually(lambda: reader.energy is not None)
        monitor.read()
        library.millijoules = {0: 2, 1: 3}

        def is_counted() -> bool:
            monitor.read()
            return monitor.meters()[0].microjoules >= 5_000

        await eventually(is_counted)
        (meter,) = monitor.meters()
        assert (meter.name, meter.covers, meter.microjoules) == ("nvidia", "accelerators", 5_000)
        library.lost.add(1)
        await eventually(lambda: reader.energy is None)


@pytest.mark.asyncio
async def test_what_a_device_does_not_support_is_left_out() -> None:
    library = Library()
    for call in (
        *("UtilizationRates", "TotalEccErrors", "RemappedRows"),
        *("PcieReplayCounter", "Temperature", "PowerUsage"),
    ):
        library.broken[f"nvmlDeviceGet{call}"] = NOT_SUPPORTED
    library.broken["nvmlDeviceRegisterEvents"] = NOT_SUPPORTED
    machine = Machine(library)
    async with machine.read() as reader:
        (device,) = reader.devices
    assert (device.utilisation_percent, device.errors) == (None, {"recovery_action": 0})
    assert (device.temperature_c, device.power_watts) == (None, None)
    assert machine.faults == []


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("xid", "signature", "hard"),
    [
        *((xid, "nvidia_xid_fatal", True) for xid in (46, 48, 62, 64, 74, 79, 95, 109, 119, 120, 140)),
        *((xid, "nvidia_xid", False) for xid in (13, 31, 43, 45, 63, 94)),
    ],
)
async def test_an_error_event_is_a_fault_and_a_fatal_one_is_hard(xid: int, signature: str, hard: bool) -> None:
    library = Library(devices=2)
    machine = Machine(library, files=2)
    async with machine.read():
        library.xids.append((1, xid))
        assert await machine.signature() == signature
    assert machine.faults[0].evidence["xid"] == xid
    assert machine.faults[0].evidence["device"] == 1
    assert machine.faults[0].evidence["hard"] is hard
    assert str(machine.faults[0].evidence["uuid"]).startswith("GPU-00000001")
    assert machine.faults[0].summary.startswith(f"XID {xid} on nvidia 1")


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("change", "signature"),
    [
        ({"uncorrected": 3}, "nvidia_ecc_contained"),
        ({"recovery_action": 4, "uncorrected": 3}, "nvidia_ecc_contained"),
        ({"recovery_action": 1, "uncorrected": 3}, "nvidia_ecc_uncorrectable"),
        ({"recovery_action": 1}, "nvidia_recovery_needed"),
        ({"recovery_action": 2}, "nvidia_recovery_needed"),
        ({"rows": (0, 1, 1, 0)}, "nvidia_row_remap_pending"),
        ({"rows": (0, 9, 0, 1)}, "nvidia_row_remap_failed"),
    ],
)
async def test_counters_that_grow_are_faults(change: dict[str, Any], signature: str) -> None:
    machine = Machine(Library())
    async with machine.read():
        for name, value in change.items():
            setattr(machine.library, name, value)
        await eventually(lambda: signature in {fault.signature for fault in machine.faults})


@pytest.mark.asyncio
async def test_an_uncorrected_error_counts_as_one_that_spread_where_the_driver_does_not_say() -> None:
    library = Library()
    library.broken["nvmlDeviceGetFieldValues"] = NOT_SUPPORTED
    machine = Machine(library)
    async with machine.read():
        library.uncorrected = 1
        assert await machine.signature() == "nvidia_ecc_uncorrectable"
    assert machine.faults[0].evidence["hard"] is True


def test_only_what_needs_a_reset_or_a_restart_of_the_machine_is_hard() -> None:
    assert is_hard("nvidia_recovery_needed")
    assert not is_hard("nvidia_ecc_contained")


@pytest.mark.asyncio
async def test_a_device_that_is_lost_is_one_fault_and_the_others_are_still_read() -> None:
    machine = Machine(Library(devices=2), files=2)
    async with machine.read() as reader:
        machine.library.lost.add(1)
        assert await machine.signature() == "nvidia_gpu_lost"
        await asyncio.sleep(0)
        assert [device.index for device in reader.devices] == [0, 1]
    assert len(machine.faults) == 1


@pytest.mark.asyncio
async def test_fewer_devices_than_files_is_a_fault() -> None:
    machine = Machine(Library(devices=7), files=8)
    async with machine.read():
        assert await machine.signature() == "accelerator_missing"


@pytest.mark.asyncio
async def test_a_driver_that_refuses_is_asked_again_a_few_times_and_then_given_up() -> None:
    machine = Machine(Library())
    machine.library.broken["nvmlInit"] = UNKNOWN
    async with machine.read() as reader:
        await eventually(lambda: "gave up after 3 sessions in a row" in reader.trouble)
        assert reader.trouble.startswith("nvmlInit: code 999")
    assert machine.library.sessions == 3


@pytest.mark.asyncio
async def test_an_answer_of_another_form_is_trouble_and_ends_nothing() -> None:
    machine = Machine(Library(), times=TIRELESS)
    machine.library.rows = (0, 0)  # type: ignore[assignment]
    async with machine.read() as reader:
        await eventually(lambda: reader.trouble.startswith("ValueError: "))
        machine.library.rows = (0, 0, 0, 0)
        await eventually(lambda: bool(reader.devices) and not reader.trouble)


@pytest.mark.asyncio
async def test_events_that_cannot_be_waited_for_any_more_start_a_new_session() -> None:
    machine = Machine(Library(), times=TIRELESS)
    async with machine.read():
        machine.library.broken["nvmlEventSetWait_v2"] = UNKNOWN
        await eventually(lambda: machine.library.sessions >= 2)
        machine.library.broken.clear()
        await eventually(lambda: machine.reader.trouble == "")


@pytest.mark.asyncio
async def test_a_driver_that_hangs_holds_up_nobody_and_is_named() -> None:
    machine = Machine(Library(), times=NvidiaTimes(first_read_s=0.05, silent_after_s=0.01))
    machine.library.blocked.clear()
    async with machine.read() as reader:
        assert reader.devices == ()
        assert reader.trouble.startswith("the driver has not answered for")


@pytest.mark.asyncio
async def test_a_driver_that_stays_silent_is_a_fault_of_the_machine() -> None:
    times = NvidiaTimes(first_read_s=0.05, read_every_s=0.01, fault_after_s=0.01)
    machine = Machine(Library(), times=times)
    machine.library.blocked.clear()
    async with machine.read():
        await eventually(lambda: len(machine.faults) == 1)
        (fault,) = machine.faults
        assert (fault.signature, fault.evidence["hard"]) == ("nvidia_driver_silent", True)
        assert fault_scope(fault.signature, fault.evidence) == "machine"


@pytest.mark.asyncio
async def test_a_released_driver_has_no_session_of_the_agent_until_it_resumes() -> None:
    machine = Machine(Library(), times=TIRELESS)
    async with machine.read() as reader:
        await eventually(lambda: bool(reader.devices))
        async with AcceleratorMonitor([reader]).released():
            assert machine.library.shutdowns == machine.library.sessions == 1
        await eventually(lambda: machine.library.sessions == 2)
    assert (reader.trouble, machine.faults) == ("", [])


@pytest.mark.asyncio
@pytest.mark.parametrize("broken", ["", "nvmlDeviceGetCurrentClocksEventReasons"])
async def test_a_hot_gpu_states_its_clock_the_reason_and_for_how_long(broken: str) -> None:
    machine = Machine(Library(), times=TIRELESS)
    machine.library.clock_mhz, machine.library.clock_reasons = 990, 0x48
    if broken:  # a driver with the older name only
        machine.library.broken[broken] = NOT_SUPPORTED
    async with machine.read() as reader:
        await eventually(lambda: bool(reader.devices) and clocks(reader).sampled_ms > 0)
    seen = clocks(reader)
    assert (seen.clock_mhz, seen.max_clock_mhz) == (990, 1980)
    assert seen.reasons == ("hw_slowdown", "hw_thermal_slowdown")
    assert seen.reason_ms == dict.fromkeys(seen.reasons, seen.sampled_ms)
    assert seen.full_clock_ms == pytest.approx(seen.sampled_ms / 2, rel=0.2, abs=2)


def clocks(reader: NvidiaReader) -> DeviceClocks:
    found = reader.devices[0].clocks
    assert found is not None
    return found


@pytest.mark.asyncio
async def test_a_driver_without_clocks_is_read_all_the_same() -> None:
    machine = Machine(Library())
    machine.library.broken["nvmlDeviceGetClockInfo"] = NOT_SUPPORTED
    async with machine.read() as reader:
        await eventually(lambda: bool(reader.devices))
        assert reader.devices[0].clocks is None


@pytest.mark.asyncio
async def test_a_machine_without_the_library_says_which_package_is_missing() -> None:
    def missing() -> Any:
        raise NvmlFailed("import", 0, "nvidia-ml-py is not installed")

    faults: list[Fault] = []
    reader = NvidiaReader(faults.append, 1, library=missing, times=QUICK)
    await reader.prepare()
    running = asyncio.create_task(reader.run())
    await eventually(lambda: "nvidia-ml-py is not installed; gave up" in reader.trouble)
    running.cancel()
    assert faults == []


@pytest.mark.asyncio
async def test_a_gpu_with_mig_is_shown_as_its_instances_and_its_faults_are_theirs() -> None:
    library = Library(devices=2)
    library.profiles = {0: ["1g.10gb", "", "3g.40gb"]}
    machine = Machine(library, files=2)
    async with machine.read() as reader:
        await eventually(lambda: len(reader.devices) == 3)
        assert [str(device) for device in reader.devices] == [
            "nvidia 1: NVIDIA H100 80GB HBM3, 80 GiB",
            "nvidia 1000: NVIDIA H100 80GB HBM3 MIG 1g.10gb, 10 GiB",
            "nvidia 1002: NVIDIA H100 80GB HBM3 MIG 3g.40gb, 10 GiB",
        ]
        assert [device.utilisation_percent for device in reader.devices] == [37.0, None, None]
        owns = NodeResources("nvidia", (1002,), (reader.devices[2].uuid,))
        assert visible_devices(owns, reader.devices) == {
            "SWITCHYARD_DEVICES": "nvidia 1002",
            "CUDA_VISIBLE_DEVICES": "MIG-02000000-1111-2222-3333-444444444444",
        }
        taken: list[Fault] = []
        filtered = own_faults(owns, taken.append, lambda: reader.devices[2:])
        for device in (0, 1, 1000, 1002):
            filtered(Fault(FaultSignature.NVIDIA_XID_FATAL, "text", {"device": device}))
        assert [fault.evidence["device"] for fault in taken] == [0, 1002]
        library.profiles = {0: ["1g.10gb"]}
        await eventually(lambda: [device.index for device in reader.devices] == [1, 1000])
        assert machine.faults == []
