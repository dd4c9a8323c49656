"""Reads what the EFA driver counts of each of its devices, and whether their ports are up. It opens no device.

Counters live as long as the device, over restarts of the machine: only their growth says anything. Names and meaning:
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-working-monitor.html ("Monitor an Elastic Fabric Adapter") and
drivers/infiniband/hw/efa/efa_verbs.c of Linux.
"""

import contextlib
from collections.abc import Mapping
from pathlib import Path

from engine_agent.node.telemetry.accelerators import OnFault, grown, hardware_fault
from engine_agent.protocol.messages import NetworkDevice
from engine_agent.protocol.signatures import FaultSignature

INFINIBAND = Path("sys/class/infiniband")
READ_EVERY_S = 10.0
COUNTERS = (
    *("impaired_remote_conn_events", "rdma_read_wr_err", "rdma_write_wr_err", "retrans_bytes", "retrans_pkts"),
    *("retrans_timeout_events", "rx_drops", "unresponsive_remote_events"),
)
FAULTY_GROWTH: Mapping[str, tuple[int, str]] = {
    "rdma_read_wr_err": (1, "reads of other nodes' memory failed"),
    "rdma_write_wr_err": (1, "writes to other nodes' memory failed"),
    "unresponsive_remote_events": (10, "connections in which the other side did not answer"),
    "impaired_remote_conn_events": (100, "connections that were slowed down"),
    "retrans_timeout_events": (1000, "times that traffic took another path for want of an answer"),
}
"""By how much a counter may grow within `READ_EVERY_S` before it is a fault. The first two are errors that a program
saw; the other figures are ours: AWS gives none."""
ACTIVE = "ACTIVE"


class EfaDevices:
    """The EFA devices of this machine; none and silent where there are none. `root` is where `/` is."""

    def __init__(self, on_fault: OnFault, root: Path = Path("/")) -> None:
        self._on_fault = on_fault
        self._folders = [path for path in sorted((root / INFINIBAND).glob("*")) if _is_efa(path)]
        self._before: dict[str, Mapping[str, int]] = {}
        self._down: set[str] = set()
        self.devices: tuple[NetworkDevice, ...] = ()

    @property
    def is_any(self) -> bool:
        """Whether there is anything to read."""
        return bool(self._folders)

    def read(self) -> None:
        """Take in what the driver says now, and report what became worse."""
        self.devices = tuple(_read(folder) for folder in self._folders)
        for device in self.devices:
            more = grown(self._before[device.name], device.errors) if device.name in self._before else {}
            self._before[device.name] = device.errors
            self._judge(device, more)

    def _judge(self, device: NetworkDevice, more: Mapping[str, int]) -> None:
        worse = [
            f"{more[name]} {means}" for name, (least, means) in FAULTY_GROWTH.items() if more.get(name, 0) >= least
        ]
        evidence = {"device": device.name, "grew": dict(more), "counters": device.errors}
        if worse:
            summary = f"{device.name} within {READ_EVERY_S:g} s: {', '.join(worse)}"
            self._on_fault(hardware_fault(FaultSignature.EFA_ERRORS, summary, evidence))
        if device.state and device.state != ACTIVE and device.name not in self._down:
            self._down.add(device.name)
            summary = f"the port of {device.name} is {device.state}"
            self._on_fault(hardware_fault(FaultSignature.EFA_PORT_DOWN, summary, evidence))
        elif device.state == ACTIVE:
            self._down.discard(device.name)


def _is_efa(folder: Path) -> bool:
    """Called efa_0, or rdmap16s27 by newer rules of udev; the driver tells."""
    return folder.name.startswith("efa") or (folder / "device/driver").resolve().name == "efa"


def _read(folder: Path) -> NetworkDevice:
    """The sums over its ports; a device of EFA has one."""
    counters: dict[str, int] = {}
    for port in sorted((folder / "ports").glob("*")):
        for name in COUNTERS:
            with contextlib.suppress(OSError, ValueError):  # an older driver or device counts less
                counters[name] = counters.get(name, 0) + int((port / "hw_counters" / name).read_text())
    return NetworkDevice(folder.name, _state(folder), counters)


def _state(folder: Path) -> str:
    """`4: ACTIVE` as `ACTIVE`; empty where it is not said."""
    with contextlib.suppress(OSError):
        for port in sorted((folder / "ports").glob("*/state")):
            return port.read_text(encoding="ascii", errors="replace").partition(":")[2].strip()[:32]
    return ""
