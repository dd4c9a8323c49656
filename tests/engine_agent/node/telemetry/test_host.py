"""A node reports its machine's hardware and use, and has readers only for its accelerators."""

import os
from pathlib import Path

import psutil
import pytest

from engine_agent.node.telemetry.host import (
    EfaDevices,
    accelerators_here,
    neuron_device_count,
    nvidia_device_count,
    read_host_use,
    read_inventory,
    read_usage,
)
from engine_agent.protocol.messages import Fault
from engine_agent.protocol.signatures import UNATTRIBUTED_SIGNATURES, FaultSignature, is_hard


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


NET_DEV = """Inter-|   Receive                                   |  Transmit
 face |bytes packets errs drop fifo frame compressed multicast|bytes packets errs drop fifo colls carrier compressed
    lo: 918273645 8081231 0 0 0 0 0 0 918273645 8081231 0 0 0 0 0 0
  ens5: 73400320 101233 0 0 0 0 0 0 5242880 88213 0 0 0 0 0 0
docker0: 73400000 101200 0 0 0 0 0 0 5242000 88200 0 0 0 0 0 0
"""
"""`/proc/net/dev` of a virtual machine with Docker, with fewer spaces."""


@pytest.mark.parametrize(("hardware", "received", "sent"), [(("ens5",), 73400320, 5242880), ((), 146800320, 10484880)])
def test_bytes_of_the_network_are_those_of_devices_with_hardware(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hardware: tuple[str, ...], received: int, sent: int
) -> None:
    (tmp_path / "net").mkdir()
    (tmp_path / "net/dev").write_text(NET_DEV)
    for name in hardware:
        (tmp_path / "sys/class/net" / name / "device").mkdir(parents=True)
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    use = read_host_use(2**34, tmp_path, tmp_path)
    assert (use.network_received_bytes, use.network_sent_bytes) == (received, sent)
    assert use.memory_bytes == 2**34
    assert 0 < (use.filesystem_used_bytes or 0) <= (use.filesystem_bytes or 0)


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


class Machine:
    def __init__(self, root: Path, counters: dict[str, int] | None = None) -> None:
        self.port = root / "sys/class/infiniband/efa_0/ports/1"
        (self.port / "hw_counters").mkdir(parents=True)
        self.faults: list[Fault] = []
        self.says("4: ACTIVE", counters)
        self.efa = EfaDevices(self.faults.append, root)

    def says(self, state: str, counters: dict[str, int] | None = None) -> None:
        (self.port / "state").write_text(state + "\n")
        for name, count in (counters or {}).items():
            (self.port / "hw_counters" / name).write_text(f"{count}\n")


def test_what_stood_there_before_is_no_fault(tmp_path: Path) -> None:
    machine = Machine(tmp_path, {"rdma_read_wr_err": 7, "retrans_pkts": 10**6})
    machine.efa.read()
    machine.efa.read()
    (device,) = machine.efa.devices
    assert (device.name, device.state, device.errors) == (
        "efa_0",
        "ACTIVE",
        {"rdma_read_wr_err": 7, "retrans_pkts": 10**6},
    )
    assert machine.faults == []


@pytest.mark.parametrize(
    ("counter", "growth", "is_fault"),
    [
        ("rdma_write_wr_err", 1, True),
        ("unresponsive_remote_events", 9, False),
        ("unresponsive_remote_events", 10, True),
        ("retrans_pkts", 10**6, False),
        ("rx_drops", 10**6, False),
    ],
)
def test_growth_of_what_hurts_is_a_fault_of_nobody_in_particular(
    counter: str, growth: int, is_fault: bool, tmp_path: Path
) -> None:
    machine = Machine(tmp_path, {counter: 5})
    machine.efa.read()
    machine.says("4: ACTIVE", {counter: 5 + growth})
    machine.efa.read()
    assert [fault.signature for fault in machine.faults] == (["efa_errors"] if is_fault else [])
    assert FaultSignature.EFA_ERRORS in UNATTRIBUTED_SIGNATURES
    assert not is_hard(FaultSignature.EFA_ERRORS)


def test_a_port_that_goes_down_is_said_once_until_it_is_up_again(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    for state in ("4: ACTIVE", "1: DOWN", "1: DOWN", "4: ACTIVE", "1: DOWN"):
        machine.says(state)
        machine.efa.read()
    assert [fault.summary for fault in machine.faults] == ["the port of efa_0 is DOWN"] * 2


def test_a_machine_without_efa_is_silent(tmp_path: Path) -> None:
    other = tmp_path / "sys/class/infiniband/mlx5_0/ports/1"
    other.mkdir(parents=True)
    efa = EfaDevices(lambda fault: None, tmp_path)
    efa.read()
    assert (efa.is_any, efa.devices) == (False, ())
