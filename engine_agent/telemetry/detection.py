"""Which accelerators a machine has, by the files of their drivers, and the readers for them. It opens no device."""

from pathlib import Path

from engine_agent.telemetry.accelerators import AcceleratorMonitor, AcceleratorReader, OnFault, RepeatedFaults
from engine_agent.telemetry.neuron import NeuronReader
from engine_agent.telemetry.nvidia import NvidiaReader


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
