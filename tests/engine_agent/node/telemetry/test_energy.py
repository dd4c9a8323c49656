"""Power is read from files as the kernel and the Neuron driver write them, and from NVIDIA's library."""

from pathlib import Path

import pytest

from engine_agent.node.planning.energy import Reading
from engine_agent.node.telemetry.accelerators import AcceleratorMonitor
from engine_agent.node.telemetry.energy import (
    NEURON,
    NEURON_STALE_AFTER_S,
    RAPL,
    EnergyMonitor,
    NeuronPowerSource,
    RaplSource,
    energy_here,
    parse_power_share,
)
from engine_agent.node.telemetry.nvml import Nvml
from engine_agent.protocol.telemetry_messages import EnergyMeter
from tests.engine_agent.node.telemetry.nvml_library import Library


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def zone(root: Path, path: str, name: str, counter: int, most_uw: int | None = None) -> Path:
    folder = root / RAPL / path
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in (("name", name), ("energy_uj", str(counter)), ("max_energy_range_uj", "262143328850")):
        (folder / file).write_text(text + "\n")
    if most_uw is not None:
        (folder / "constraint_0_max_power_uw").write_text(f"{most_uw}\n")
    return folder


def device(root: Path, index: int, text: str) -> Path:
    file = root / NEURON / f"neuron{index}" / "stats/power/utilization"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def test_packages_and_their_memory_are_added_up_and_cores_are_not_counted_twice(tmp_path: Path) -> None:
    package = zone(tmp_path, "intel-rapl:0", "package-0", 1_000_000, most_uw=150_000_000)
    memory = zone(tmp_path, "intel-rapl:0:1", "dram", 500)
    zone(tmp_path, "intel-rapl:0:0", "core", 77)
    zone(tmp_path, "intel-rapl:1", "psys", 99)
    clock = Clock()
    monitor = EnergyMonitor([RaplSource(tmp_path, clock)], lambda: "life")
    monitor.read()
    (package / "energy_uj").write_text("401000000")
    (memory / "energy_uj").write_text("50000500")
    clock.now_s += 5
    monitor.read()
    assert monitor.meters() == (EnergyMeter("rapl", "host", "life", microjoules=450_000_000, covered_ms=5000),)


def test_a_counter_of_processors_wraps_at_its_range(tmp_path: Path) -> None:
    package = zone(tmp_path, "intel-rapl:0", "package-0", 262_143_000_000)
    clock = Clock()
    monitor = EnergyMonitor([RaplSource(tmp_path, clock)])
    monitor.read()
    (package / "energy_uj").write_text("99671150")
    clock.now_s += 5
    monitor.read()
    assert [(meter.microjoules, meter.refused) for meter in monitor.meters()] == [(100_000_000, 0)]


def test_what_may_not_be_read_is_not_there(tmp_path: Path) -> None:
    folder = zone(tmp_path, "intel-rapl:0", "package-0", 5)
    (folder / "energy_uj").unlink()
    assert RaplSource(tmp_path).read() is None
    assert energy_here(AcceleratorMonitor(), tmp_path).meters() == ()


def test_neuron_devices_tell_a_share_of_their_power_and_are_not_believed_for_ever(tmp_path: Path) -> None:
    device(tmp_path, 0, "POWER_STATUS_VALID,1700000000,10.00,90.00,40.00\n")
    second = device(tmp_path, 1, "POWER_STATUS_VALID,1700000000,10.00,30.00,20.00\n")
    clock = Clock()
    source = NeuronPowerSource(tmp_path, clock)
    monitor = EnergyMonitor([source], lambda: "life")
    monitor.read()
    clock.now_s += 10
    monitor.read()
    assert monitor.meters() == (EnergyMeter("neuron", "accelerators", "life", full_power_ms=3000, covered_ms=10_000),)
    clock.now_s += NEURON_STALE_AFTER_S + 1
    second.write_text("POWER_STATUS_VALID,1700000190,10.00,30.00,25.00\n")
    said = source.read()
    assert said is not None
    assert said[1] == {"neuron0": Reading(share=None), "neuron1": Reading(share=0.25)}


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("POWER_STATUS_VALID,1700000000,10.00,90.00,40.00", 0.4),
        ("POWER_STATUS_VALID, 1700000000, 10.00, 90.00, 40.00%", 0.4),
        ("POWER_STATUS_NO_DATA,1700000000,0.00,0.00,0.00", None),
        ("POWER_STATUS_INVALID,0,0,0,0", None),
        ("POWER_STATUS_VALID,1,1,1,nan", None),
        ("POWER_STATUS_VALID,1,1,1,900", None),
        ("", None),
    ],
)
def test_a_line_of_power_is_read_or_says_nothing(text: str, share: float | None) -> None:
    assert parse_power_share(text) == share


def test_nvidia_devices_count_since_their_driver_was_loaded() -> None:
    library = Library(devices=2)
    library.millijoules = {0: 5_000, 1: 7_000}
    nvml = Nvml(library)
    assert nvml.energy(0) == Reading(microjoules=5_000_000, most_watts=700.0)
    library.broken["nvmlDeviceGetTotalEnergyConsumption"] = 3
    assert nvml.energy(1) is None
    library.broken = {}
    library.lost.add(1)
    assert nvml.energy(1) is None
