"""A node states what its machine has, what of it is in use, and has readers only for accelerators that are there."""

import os
from pathlib import Path

from engine_agent.node.telemetry.host import (
    accelerators_here,
    neuron_device_count,
    nvidia_device_count,
    read_inventory,
    read_usage,
)
from engine_agent.protocol.messages import Fault


def test_states_what_the_machine_has() -> None:
    seen = read_inventory("cpu-small", "127.0.0.1", 21000)
    assert (seen.instance_type, seen.address, seen.port_base) == ("cpu-small", "127.0.0.1", 21000)
    assert seen.cores >= 1
    assert seen.memory_bytes > 2**28


def test_states_what_is_in_use_and_nothing_of_an_engine_that_is_gone() -> None:
    seen = read_usage(os.getpid())
    assert seen.engine_rss_bytes == seen.agent_rss_bytes
    assert (seen.agent_rss_bytes or 0) > 0
    assert (seen.host_memory_used_bytes or 0) > 0
    assert read_usage(None).engine_rss_bytes is None
    assert read_usage(2**22 + 1).engine_rss_bytes is None


def touch(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


def test_a_machine_without_device_files_has_no_readers(tmp_path: Path) -> None:
    for name in ("neuron", "neuron_dev", "nvidiactl", "nvidia-uvm", "null"):
        touch(tmp_path / "dev" / name)
    faults: list[Fault] = []
    assert accelerators_here(faults.append, tmp_path).readers == []


def test_devices_are_counted_by_their_files(tmp_path: Path) -> None:
    for name in ("neuron0", "neuron1", "nvidia0", "nvidia1", "nvidia-modeset"):
        touch(tmp_path / "dev" / name)
    assert (neuron_device_count(tmp_path), nvidia_device_count(tmp_path)) == (2, 2)
    faults: list[Fault] = []
    assert [reader.kind for reader in accelerators_here(faults.append, tmp_path).readers] == ["neuron", "nvidia"]


def test_a_container_has_the_devices_that_it_was_given(tmp_path: Path) -> None:
    touch(tmp_path / "dev" / "nvidia3")
    for bus in range(8):
        (tmp_path / f"proc/driver/nvidia/gpus/0000:0{bus}:00.0").mkdir(parents=True)
    assert nvidia_device_count(tmp_path) == 1
