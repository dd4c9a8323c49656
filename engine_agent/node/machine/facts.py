"""What a host is: cores, memory, disk, accelerators and their driver. It reads, and opens no device for longer."""

import asyncio
import os
import platform
import shutil
import socket
from pathlib import Path

import psutil

from engine_agent.node.machine.checks import HostFindings
from engine_agent.node.telemetry.accelerators import AcceleratorMonitor
from engine_agent.node.telemetry.host import accelerators_here, devices_on_bus, neuron_device_count, nvidia_device_count
from engine_agent.protocol.machine_messages import Device, MachineFacts
from engine_agent.protocol.messages import Accelerator

PREPARE_LIMIT_S = 30.0


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
    on_bus = devices_on_bus(root)
    found = {"NVIDIA": on_bus["nvidia"], "Neuron": on_bus["neuron"]}
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
