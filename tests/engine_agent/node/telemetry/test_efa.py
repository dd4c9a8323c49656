"""EFA devices are told by their driver; what grows in their counters is a fault, what stood there before is none."""

from pathlib import Path

import pytest

from engine_agent.node.telemetry.efa import EfaDevices
from engine_agent.protocol.messages import Fault
from engine_agent.protocol.signatures import UNATTRIBUTED_SIGNATURES, FaultSignature, is_hard


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
