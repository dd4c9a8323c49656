"""Readers are there only where their hardware is."""

from pathlib import Path

from engine_agent.protocol.messages import Fault
from engine_agent.telemetry.detection import accelerators_here, neuron_device_count, nvidia_device_count


def put(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


def test_a_machine_without_device_files_has_no_readers(tmp_path: Path) -> None:
    for name in ("neuron", "neuron_dev", "nvidiactl", "nvidia-uvm", "null"):
        put(tmp_path / "dev" / name)
    faults: list[Fault] = []
    assert accelerators_here(faults.append, tmp_path).readers == []


def test_devices_are_counted_by_their_files(tmp_path: Path) -> None:
    for name in ("neuron0", "neuron1", "nvidia0", "nvidia1", "nvidia-modeset"):
        put(tmp_path / "dev" / name)
    assert (neuron_device_count(tmp_path), nvidia_device_count(tmp_path)) == (2, 2)
    faults: list[Fault] = []
    assert [reader.kind for reader in accelerators_here(faults.append, tmp_path).readers] == ["neuron", "nvidia"]


def test_a_container_has_the_devices_that_it_was_given(tmp_path: Path) -> None:
    put(tmp_path / "dev" / "nvidia3")
    for bus in range(8):
        (tmp_path / f"proc/driver/nvidia/gpus/0000:0{bus}:00.0").mkdir(parents=True)
    assert nvidia_device_count(tmp_path) == 1
