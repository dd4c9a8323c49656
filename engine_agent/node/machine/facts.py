"""Facts of a host (cores, memory, disk, accelerators and their driver), and the problems that prevent it from joining,
one sentence each with the remedy."""

import asyncio
import os
import platform
import shutil
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from engine_agent.node.telemetry.accelerators import AcceleratorMonitor
from engine_agent.node.telemetry.host import accelerators_here, devices_on_bus, neuron_device_count, nvidia_device_count
from engine_agent.protocol.machine_messages import Device, MachineFacts
from engine_agent.protocol.telemetry_messages import Accelerator

GIB = 1024**3
DISK_LEAST_BYTES = 2 * GIB
"""For releases, logs and journals. Weights need more; a full disk has its own notice."""
CLOCK_MOST_S = 60.0
"""Certificates are valid for a day, and reports are judged by their age: seconds do no harm, minutes do."""


@dataclass(frozen=True, slots=True)
class Seen:
    """The control plane's view of the host. `trouble`: why it cannot connect; `local`: the host has this address."""

    address: str
    local: bool
    trouble: str


def failures(
    facts: MachineFacts, driverless: Mapping[str, int], seen: Seen, taken: Sequence[int], ports: str
) -> list[str]:
    """All problems, in the order of repair. `taken`: ports of `ports` in use; `driverless`: see `read_driverless`."""
    found = []
    if abs(facts.clock_ahead_s) > CLOCK_MOST_S:
        direction = "ahead of" if facts.clock_ahead_s > 0 else "behind"
        found.append(
            f"the clock is {abs(facts.clock_ahead_s):.0f} s {direction} the control plane's; set it, for example with"
            " `timedatectl set-ntp true`, and run the line again"
        )
    if facts.disk_free_bytes < DISK_LEAST_BYTES:
        found.append(
            f"{facts.disk_free_bytes / GIB:.1f} GiB of disk are free, but {DISK_LEAST_BYTES / GIB:.0f} are needed;"
            " free some, or name a folder on another disk with SWITCHYARD_PREFIX"
        )
    for make, count in driverless.items():
        found.append(f"{count} {make} accelerators have no driver; install the {make} driver, or remove them")
    if facts.driver:
        found.append(
            f"the driver of the accelerators does not answer ({facts.driver}); check its tools and the kernel log"
        )
    if taken:
        more = f" and {len(taken) - 3} more" if len(taken) > 3 else ""
        named = ", ".join(map(str, taken[:3]))
        found.append(
            f"port {named}{more} of {ports} is in use; stop the program that listens there, or pass the first of"
            " other free ports with --port"
        )
    elif not seen.local:
        found.append(
            f"the control plane sees this host as {seen.address}, which is not an address of the host; other hosts"
            " cannot reach a host behind address translation: give it an address that they can reach"
        )
    elif seen.trouble:
        found.append(
            f"the control plane cannot connect to this host: {seen.trouble}; allow TCP to ports {ports} from the"
            " control plane and from the ingresses"
        )
    return found


PREPARE_LIMIT_S = 30.0


def read_facts(address: str, port_base: int, state: Path, *, clock_ahead_s: float = 0.0) -> MachineFacts:
    """The current facts. `state`: the folder whose disk counts; it need not exist yet."""
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
        cpus=cpus_by_numa(os.sched_getaffinity(0)),
    )


def cpus_by_numa(usable: Collection[int], root: Path = Path("/")) -> tuple[tuple[int, ...], ...]:
    """The usable CPUs of each NUMA node, ordered by core, so that a cut between two entries rarely divides the threads
    of a core. One group if the kernel states no NUMA nodes."""
    system = root / "sys/devices/system"

    def first_thread(cpu: int) -> int:
        siblings = _cpu_list(system / f"cpu/cpu{cpu}/topology/thread_siblings_list")
        return min(siblings, default=cpu)

    left, groups = set(usable), []
    nodes = (path for path in (system / "node").glob("node*") if path.name.removeprefix("node").isdecimal())
    for node in sorted(nodes, key=lambda path: int(path.name.removeprefix("node"))):
        groups.append(left & _cpu_list(node / "cpulist"))
        left -= groups[-1]
    if left:
        groups.append(left)
    return tuple(tuple(sorted(group, key=lambda cpu: (first_thread(cpu), cpu))) for group in groups)


def _cpu_list(path: Path) -> set[int]:
    """`0-3,8` of the kernel as numbers; empty if unreadable."""
    try:
        parts = path.read_text(encoding="ascii").strip().split(",")
        ranges = [part.partition("-") for part in parts if part]
        return {cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1)}
    except (OSError, ValueError):
        return set()


def read_driverless(root: Path = Path("/")) -> dict[str, int]:
    """By make, the number of accelerators without a driver."""
    on_bus = devices_on_bus(root)
    found = {"NVIDIA": on_bus["nvidia"], "Neuron": on_bus["neuron"]}
    served = {"NVIDIA": nvidia_device_count(root), "Neuron": neuron_device_count(root)}
    return {make: count for make, count in found.items() if count and not served[make]}


async def _prepare(monitor: AcceleratorMonitor) -> None:
    try:
        async with asyncio.timeout(PREPARE_LIMIT_S):
            await monitor.prepare()
    except TimeoutError:
        return


def _device(device: Accelerator) -> Device:
    return Device(
        kind=device.kind,
        name=device.name,
        cores=device.cores,
        memory_bytes=device.memory_total_bytes,
        index=device.index,
        uuid=device.uuid,
        numa=device.numa,
    )


def _existing(folder: Path) -> Path:
    return folder if folder.exists() else _existing(folder.parent)
