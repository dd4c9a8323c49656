"""What keeps a host from joining: one sentence each, with the remedy."""

import msgspec
import pytest

from engine_agent.node.machine.checks import HostFindings, Seen, failures
from engine_agent.protocol.machine_messages import MachineFacts

GIB = 2**30
GOOD = MachineFacts("10.0.0.7", 21000, cores=8, memory_bytes=32 * GIB, disk_free_bytes=200 * GIB)
REACHED = Seen("10.0.0.7", local=True, trouble="")
PORTS = "21000 to 21019"


def found(facts: MachineFacts = GOOD, findings: HostFindings | None = None, seen: Seen = REACHED, *taken: int) -> str:
    return "\n".join(failures(facts, findings or HostFindings(), seen, taken, PORTS))


def test_a_good_host_may_join() -> None:
    assert found() == ""


@pytest.mark.parametrize(("ahead_s", "direction"), [(600.0, "ahead of"), (-600.0, "behind")])
def test_a_clock_ten_minutes_off(ahead_s: float, direction: str) -> None:
    assert found(msgspec.structs.replace(GOOD, clock_ahead_s=ahead_s)) == (
        f"the clock is 600 s {direction} the control plane's; set it, such as by `timedatectl set-ntp true`,"
        " and run the line again"
    )


def test_a_full_disk() -> None:
    assert found(msgspec.structs.replace(GOOD, disk_free_bytes=GIB)) == (
        "1.0 GiB of disk are free, and 2 are needed; make room, or name a folder on another disk with SWITCHYARD_PREFIX"
    )


def test_accelerators_without_a_driver() -> None:
    assert found(GOOD, HostFindings({"NVIDIA": 8})) == (
        "8 NVIDIA accelerators have no driver; install the NVIDIA driver, or take them out"
    )


def test_a_driver_that_does_not_answer() -> None:
    assert "does not answer (nvidia: not loaded)" in found(msgspec.structs.replace(GOOD, driver="nvidia: not loaded"))


def test_ports_that_are_taken() -> None:
    assert found(GOOD, None, REACHED, 21003) == (
        "port 21003 of 21000 to 21019 is in use; end what listens there,"
        " or give the first of other free ports with --port"
    )
    assert found(GOOD, None, REACHED, 1, 2, 3, 4, 5).startswith("port 1, 2, 3 and 2 more of")


def test_a_host_that_is_not_reached_back() -> None:
    assert found(GOOD, None, Seen("10.0.0.7", local=True, trouble="nothing answers at 10.0.0.7:21000")) == (
        "the control plane does not reach this host: nothing answers at 10.0.0.7:21000; let TCP to ports 21000 to 21019"
        " pass from the control plane and from the ingresses"
    )


def test_a_host_behind_address_translation() -> None:
    assert "sees this host as 203.0.113.9, which is no address of its own" in found(
        GOOD, None, Seen("203.0.113.9", local=False, trouble="")
    )
