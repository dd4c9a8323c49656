"""The machine as the operating system describes it: hardware, use, accelerators by their device files, and EFA network
devices. It opens no device. EFA counters live as long as the device, also over restarts of the machine, so only their
growth matters. Names and meaning: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-working-monitor.html
("Monitor an Elastic Fabric Adapter") and drivers/infiniband/hw/efa/efa_verbs.c of Linux."""

import contextlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import psutil

from engine_agent.node.devices import own_faults
from engine_agent.node.telemetry.accelerators import (
    AcceleratorMonitor,
    AcceleratorReader,
    OnFault,
    RepeatedFaults,
    grown,
    hardware_fault,
)
from engine_agent.node.telemetry.neuron import NeuronReader
from engine_agent.node.telemetry.nvidia import NvidiaReader
from engine_agent.protocol.machine_messages import NodeResources
from engine_agent.protocol.messages import Inventory
from engine_agent.protocol.signatures import FaultSignature
from engine_agent.protocol.telemetry_messages import HostUse, NetworkDevice, NodeTelemetry


def read_inventory(instance_type: str, address: str, port_base: int, owns: NodeResources | None = None) -> Inventory:
    """The hardware: cores that this process may use, and the node's memory in bytes."""
    return Inventory(
        instance_type=instance_type,
        address=address,
        port_base=port_base,
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=(owns.memory_bytes if owns else 0) or psutil.virtual_memory().total,
    )


def read_usage(engine_pid: int | None, home: Path = Path("/"), root: Path = Path("/")) -> NodeTelemetry:
    """Use since the last call of the CPUs that this process may use, current memory of the machine, the agent and the
    engine's main process, and the machine's file system at `home`, disks and network. `root` replaces `/` for the
    list of network devices."""
    memory = psutil.virtual_memory()
    return NodeTelemetry(
        host_cpu_percent=_own_cpu_percent(),
        host_memory_used_bytes=memory.total - memory.available,
        agent_rss_bytes=_rss_bytes(os.getpid()),
        engine_rss_bytes=_rss_bytes(engine_pid) if engine_pid is not None else None,
        host=read_host_use(memory.total, home, root),
    )


def read_host_use(memory_bytes: int, home: Path, root: Path = Path("/")) -> HostUse:
    """A container without access to one of the sources reports the others."""
    used = total = read = written = received = sent = None
    with contextlib.suppress(OSError):
        filesystem = psutil.disk_usage(str(home))
        used, total = filesystem.used, filesystem.total
    with contextlib.suppress(OSError, ValueError, RuntimeError, NotImplementedError):
        if (disks := psutil.disk_io_counters()) is not None:
            read, written = disks.read_bytes, disks.write_bytes
    with contextlib.suppress(OSError, ValueError):
        moved = psutil.net_io_counters(pernic=True)
        names = _network_devices(root, moved)
        received = sum(moved[name].bytes_recv for name in names)
        sent = sum(moved[name].bytes_sent for name in names)
    return HostUse(memory_bytes, used, total, read, written, received, sent)


def _network_devices(root: Path, names: Iterable[str]) -> list[str]:
    """Devices with hardware, because bridges and tunnels would count the same bytes again. A container may have none
    of them: all but the loopback."""
    others = [name for name in names if name != "lo"]
    return [name for name in others if (root / "sys/class/net" / name / "device").exists()] or others


def _own_cpu_percent() -> float:
    own, by_cpu = os.sched_getaffinity(0), psutil.cpu_percent(interval=None, percpu=True)
    if len(own) >= len(by_cpu):
        return psutil.cpu_percent(interval=None)
    used = [percent for cpu, percent in enumerate(by_cpu) if cpu in own]
    return round(sum(used) / max(1, len(used)), 1)


def _rss_bytes(pid: int) -> int | None:
    try:
        return psutil.Process(pid).memory_info().rss
    except psutil.Error:
        return None


def accelerators_here(
    on_fault: OnFault, root: Path = Path("/"), owns: NodeResources | None = None
) -> AcceleratorMonitor:
    """Readers for the accelerators of this machine, of which a node shows those that it owns. `root` replaces `/`."""
    readers: list[AcceleratorReader] = []
    monitor = AcceleratorMonitor(readers, owns)
    take = RepeatedFaults(own_faults(owns, on_fault, monitor.devices))
    if neurons := neuron_device_count(root):
        readers.append(NeuronReader(take, neurons))
    if gpus := nvidia_device_count(root):
        readers.append(NvidiaReader(take, gpus))
    return monitor


def neuron_device_count(root: Path) -> int:
    return sum(path.name.removeprefix("neuron").isdecimal() for path in (root / "dev").glob("neuron*"))


def nvidia_device_count(root: Path) -> int:
    """Devices of the NVIDIA driver. A container sees only the files that it was given."""
    bound = len(list((root / "proc/driver/nvidia/gpus").glob("*")))
    files = sum(path.name.removeprefix("nvidia").isdecimal() for path in (root / "dev").glob("nvidia*"))
    return min(bound, files) if bound and files else files


NVIDIA_VENDOR, NVIDIA_CLASS = "0x10de", "0x0302"
"""A 3D controller, which is a computing device; a graphics card is not."""
AMAZON_VENDOR = "0x1d0f"
NEURON_DEVICES = ("0x7064", "0x7065", "0x7066", "0x7067", "0x7164", "0x7264", "0x7364", "0x7564", "0x7565")
"""Of inf1 (four), trn1, inf2, trn2 and trn3 (two): the ids in `neuron_device.h` of Neuron's kernel driver."""


def devices_on_bus(root: Path) -> dict[str, int]:
    """Accelerators on the bus by maker, with or without a driver."""
    found = {"nvidia": 0, "neuron": 0}
    for device in (root / "sys/bus/pci/devices").glob("*"):
        vendor, kind, model = (_line(device / name) for name in ("vendor", "class", "device"))
        found["nvidia"] += vendor == NVIDIA_VENDOR and kind.startswith(NVIDIA_CLASS)
        found["neuron"] += vendor == AMAZON_VENDOR and model in NEURON_DEVICES
    return found


def _line(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""


INFINIBAND = Path("sys/class/infiniband")
READ_EFA_EVERY_S = 10.0
COUNTERS = (
    *("impaired_remote_conn_events", "rdma_read_wr_err", "rdma_write_wr_err", "retrans_bytes", "retrans_pkts"),
    *("retrans_timeout_events", "rx_drops", "unresponsive_remote_events"),
)
FAULTY_GROWTH: Mapping[str, tuple[int, str]] = {
    "rdma_read_wr_err": (1, "reads of other nodes' memory failed"),
    "rdma_write_wr_err": (1, "writes to other nodes' memory failed"),
    "unresponsive_remote_events": (10, "connections whose other side did not answer"),
    "impaired_remote_conn_events": (100, "connections that were slowed down"),
    "retrans_timeout_events": (1000, "times that traffic took another path without an answer"),
}
"""By how much a counter may grow within `READ_EFA_EVERY_S` before it is a fault. The first two are errors that a
program saw; the other figures are ours, because AWS gives none."""
ACTIVE = "ACTIVE"


class EfaDevices:
    """The EFA devices of this machine. `root` replaces `/`."""

    def __init__(self, on_fault: OnFault, root: Path = Path("/")) -> None:
        self._on_fault = on_fault
        self._folders = [path for path in sorted((root / INFINIBAND).glob("*")) if is_efa(path)]
        self._before: dict[str, Mapping[str, int]] = {}
        self._down: set[str] = set()
        self.devices: tuple[NetworkDevice, ...] = ()

    @property
    def is_any(self) -> bool:
        return bool(self._folders)

    def read(self) -> None:
        self.devices = tuple(_read(folder) for folder in self._folders)
        for device in self.devices:
            more = grown(self._before[device.name], device.errors) if device.name in self._before else {}
            self._before[device.name] = device.errors
            self._report_growth(device, more)

    def _report_growth(self, device: NetworkDevice, more: Mapping[str, int]) -> None:
        worse = [
            f"{more[name]} {means}" for name, (least, means) in FAULTY_GROWTH.items() if more.get(name, 0) >= least
        ]
        evidence = {"device": device.name, "grew": dict(more), "counters": device.errors}
        if worse:
            summary = f"{device.name} within {READ_EFA_EVERY_S:g} s: {', '.join(worse)}"
            self._on_fault(hardware_fault(FaultSignature.EFA_ERRORS, summary, evidence))
        if device.state and device.state != ACTIVE and device.name not in self._down:
            self._down.add(device.name)
            summary = f"the port of {device.name} is {device.state}"
            self._on_fault(hardware_fault(FaultSignature.EFA_PORT_DOWN, summary, evidence))
        elif device.state == ACTIVE:
            self._down.discard(device.name)


def is_efa(folder: Path) -> bool:
    """Devices are named efa_0, or rdmap16s27 under newer udev rules; the driver identifies them."""
    return folder.name.startswith("efa") or (folder / "device/driver").resolve().name == "efa"


def _read(folder: Path) -> NetworkDevice:
    """The sums over its ports; an EFA device has one."""
    counters: dict[str, int] = {}
    for port in sorted((folder / "ports").glob("*")):
        for name in COUNTERS:
            with contextlib.suppress(OSError, ValueError):  # an older driver or device has fewer counters
                counters[name] = counters.get(name, 0) + int((port / "hw_counters" / name).read_text())
    return NetworkDevice(folder.name, _state(folder), counters)


def _state(folder: Path) -> str:
    """`4: ACTIVE` as `ACTIVE`; empty if unknown."""
    with contextlib.suppress(OSError):
        for port in sorted((folder / "ports").glob("*/state")):
            return port.read_text(encoding="ascii", errors="replace").partition(":")[2].strip()[:32]
    return ""
