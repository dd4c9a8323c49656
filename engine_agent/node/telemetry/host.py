"""The machine as the operating system describes it: what it has, what is in use, and its accelerators by the files of
their drivers. It opens no device, and never acts."""

import os
from pathlib import Path

import psutil

from engine_agent.node.telemetry.accelerators import AcceleratorMonitor, AcceleratorReader, OnFault, RepeatedFaults
from engine_agent.node.telemetry.neuron import NeuronReader
from engine_agent.node.telemetry.nvidia import NvidiaReader
from engine_agent.protocol.messages import Inventory, NodeTelemetry


def read_inventory(instance_type: str, address: str, port_base: int) -> Inventory:
    """What the machine has: cores that this process may use and memory in bytes."""
    return Inventory(
        instance_type=instance_type,
        address=address,
        port_base=port_base,
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=psutil.virtual_memory().total,
    )


def read_usage(engine_pid: int | None) -> NodeTelemetry:
    """Use of the machine since the last call (CPU) and now (memory), of the agent and of the engine's main process."""
    memory = psutil.virtual_memory()
    return NodeTelemetry(
        host_cpu_percent=psutil.cpu_percent(interval=None),
        host_memory_used_bytes=memory.total - memory.available,
        agent_rss_bytes=_rss_bytes(os.getpid()),
        engine_rss_bytes=_rss_bytes(engine_pid) if engine_pid is not None else None,
    )


def _rss_bytes(pid: int) -> int | None:
    try:
        return psutil.Process(pid).memory_info().rss
    except psutil.Error:
        return None


def accelerators_here(on_fault: OnFault, root: Path = Path("/")) -> AcceleratorMonitor:
    """Readers for what is here; none on a machine without accelerators. `root` is where `/` is."""
    take = RepeatedFaults(on_fault)
    readers: list[AcceleratorReader] = []
    if neurons := neuron_device_count(root):
        readers.append(NeuronReader(take, neurons))
    if gpus := nvidia_device_count(root):
        readers.append(NvidiaReader(take, gpus))
    return AcceleratorMonitor(readers)


def neuron_device_count(root: Path) -> int:
    """Device files of the Neuron driver: /dev/neuron0, …"""
    return sum(path.name.removeprefix("neuron").isdecimal() for path in (root / "dev").glob("neuron*"))


def nvidia_device_count(root: Path) -> int:
    """Devices that the NVIDIA driver has bound. A container sees their files only if it was given them."""
    bound = len(list((root / "proc/driver/nvidia/gpus").glob("*")))
    files = sum(path.name.removeprefix("nvidia").isdecimal() for path in (root / "dev").glob("nvidia*"))
    return min(bound, files) if bound and files else files


NVIDIA_VENDOR, NVIDIA_CLASS = "0x10de", "0x0302"
"""A 3D controller: a device for computing. A card that drives a screen is none."""
AMAZON_VENDOR = "0x1d0f"
NEURON_DEVICES = ("0x7064", "0x7065", "0x7066", "0x7067", "0x7164", "0x7264", "0x7364", "0x7564", "0x7565")
"""Of inf1 (four), trn1, inf2, trn2 and trn3 (two): the ids in `neuron_device.h` of Neuron's kernel driver."""


def devices_on_bus(root: Path) -> dict[str, int]:
    """Accelerators that the bus shows, by maker, whether a driver serves them or not."""
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
