"""What a host is: cores, memory, disk, accelerators and their driver. It reads, and opens no device for longer."""

import asyncio
import os
import platform
import shutil
import socket
from pathlib import Path

import psutil

from engine_agent.machine.checks import HostFindings
from engine_agent.protocol.machine_messages import Device, MachineFacts
from engine_agent.protocol.messages import Accelerator
from engine_agent.telemetry.accelerators import AcceleratorMonitor
from engine_agent.telemetry.host import accelerators_here, neuron_device_count, nvidia_device_count

PREPARE_LIMIT_S = 30.0
NVIDIA_VENDOR, NVIDIA_CLASS = "0x10de", "0x0302"
"""A 3D controller: a device for computing. A card that drives a screen is none."""
AMAZON_VENDOR = "0x1d0f"
NEURON_DEVICES = ("0x7064", "0x7065", "0x7066", "0x7067", "0x7164", "0x7264", "0x7364", "0x7564", "0x7565")
"""Of inf1 (four), trn1, inf2, trn2 and trn3 (two): the ids in `neuron_device.h` of Neuron's kernel driver."""


def read_facts(address: str, port_base: int, state: Path, *, clock_ahead_s: float = 0.0) -> MachineFacts:
    """The host as it is now. `state`: the folder whose disk counts, or one above it that exists."""
    monitor = accelerators_here(lambda fault: None)
    asyncio.run(_prepare(monitor))
    return MachineFacts(
        address=address,
        port_base=port_base,
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=psutil.virtual_memory().total,
        disk_free_bytes=shutil.disk_usage(_existing(state)).free,
        devices=tuple(_device(device) for device in monitor.devices()),
        driver="; ".join(f"{make}: {trouble}" for make, trouble in monitor.trouble().items()),
        hostname=socket.gethostname(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        clock_ahead_s=round(clock_ahead_s, 3),
    )


def driverless(root: Path = Path("/")) -> HostFindings:
    """Accelerators that the bus shows and no driver serves."""
    found: dict[str, int] = {"NVIDIA": 0, "Neuron": 0}
    for device in (root / "sys/bus/pci/devices").glob("*"):
        vendor, kind, model = (_line(device / name) for name in ("vendor", "class", "device"))
        found["NVIDIA"] += vendor == NVIDIA_VENDOR and kind.startswith(NVIDIA_CLASS)
        found["Neuron"] += vendor == AMAZON_VENDOR and model in NEURON_DEVICES
    served = {"NVIDIA": nvidia_device_count(root), "Neuron": neuron_device_count(root)}
    return HostFindings({make: count for make, count in found.items() if count and not served[make]})


async def _prepare(monitor: AcceleratorMonitor) -> None:
    try:
        async with asyncio.timeout(PREPARE_LIMIT_S):
            await monitor.prepare()
    except TimeoutError:
        return


def _device(device: Accelerator) -> Device:
    return Device(device.kind, device.name, device.cores, device.memory_total_bytes)


def _existing(folder: Path) -> Path:
    return folder if folder.exists() else _existing(folder.parent)


def _line(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""
