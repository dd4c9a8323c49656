"""Facts of a node for the doctor, read from files and from the kernel. It starts no program and changes nothing; `root`
replaces `/`. Unreadable facts are None or left out."""

import ctypes
import os
import resource
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from engine_agent.node.telemetry.fingerprint import read_machine_stack
from engine_agent.node.telemetry.host import devices_on_bus, is_efa, neuron_device_count, nvidia_device_count
from engine_agent.protocol.ports import PORTS_PER_NODE

NEURON_TOOLS = Path("opt/aws/neuron/bin")
TOOLS_WANTED = ("neuron-ls", "neuron-monitor")
TIME_ERROR = 5
"""Result of ntp_adjtime while the clock is not synchronised: <sys/timex.h>."""
_TIMEX_BYTES = 256
"""More than the size of struct timex; all zero reads and sets nothing."""


@dataclass(frozen=True)
class NodeFacts:
    """`devices`: device files by maker; `on_bus`: devices on the bus. `distributions`: packages of each engine's
    environment. `ports_taken`: ports of the node in use by other programs, or None if not checked. `clock_synchronised`
    is None if this kernel does not report it. `stack`: as `read_machine_stack` returns it."""

    devices: Mapping[str, int]
    on_bus: Mapping[str, int]
    stack: Mapping[str, str]
    tools_missing: Sequence[str] = ()
    efa_devices: Sequence[str] = ()
    uverbs: int = 0
    memory_bytes: int = 0
    memory_limit_bytes: int | None = None
    cpu_quota: float | None = None
    shm_bytes: int | None = None
    huge_pages_free: int | None = None
    huge_page_bytes: int = 0
    disks_free_bytes: Mapping[str, int] = field(default_factory=dict)
    open_files: int = 0
    locked_memory_bytes: int | None = None
    clock_synchronised: bool | None = None
    kernel_log_readable: bool = False
    ports_taken: Sequence[int] | None = None
    distributions: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    python: str = ""


def read_node(
    *, root: Path, pythons: Mapping[str, Path], folders: Sequence[Path], host: str, port_base: int | None
) -> NodeFacts:
    memory = _meminfo(root)
    infiniband = root / "sys/class/infiniband"
    return NodeFacts(
        devices={"neuron": neuron_device_count(root), "nvidia": nvidia_device_count(root)},
        on_bus=devices_on_bus(root),
        stack=read_machine_stack(root),
        tools_missing=[name for name in TOOLS_WANTED if not (root / NEURON_TOOLS / name).exists()],
        efa_devices=[path.name for path in sorted(infiniband.glob("*")) if is_efa(path)],
        uverbs=len(list((root / "dev/infiniband").glob("uverbs*"))),
        memory_bytes=memory.get("MemTotal", 0) * 1024,
        memory_limit_bytes=_limit(root / "sys/fs/cgroup/memory.max"),
        cpu_quota=_cpu_quota(root / "sys/fs/cgroup/cpu.max"),
        shm_bytes=shutil.disk_usage(root / "dev/shm").total if (root / "dev/shm").is_dir() else None,
        huge_pages_free=memory.get("HugePages_Free"),
        huge_page_bytes=memory.get("Hugepagesize", 0) * 1024,
        disks_free_bytes={str(folder): shutil.disk_usage(_existing(folder)).free for folder in folders},
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        locked_memory_bytes=_locked_memory(),
        clock_synchronised=_clock_synchronised(),
        kernel_log_readable=os.access(root / "dev/kmsg", os.R_OK),
        ports_taken=None if port_base is None else taken_ports(host, port_base),
        distributions={engine: distributions_of(python) for engine, python in pythons.items()},
        python=".".join(map(str, sys.version_info[:3])),
    )


def distributions_of(python: Path) -> dict[str, str]:
    """Name -> version of the packages in an interpreter's environment, by its files only."""
    found = {}
    for entry in python.parent.parent.glob("lib*/python*/site-packages/*.dist-info"):
        name, _, version = entry.name.removesuffix(".dist-info").rpartition("-")
        found[name.lower().replace("_", "-").replace(".", "-")] = version
    return found


def taken_ports(host: str, port_base: int) -> list[int]:
    """The ports of a node that cannot be listened on."""
    taken = []
    for port in range(port_base, port_base + PORTS_PER_NODE):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except (OSError, OverflowError):
                taken.append(port)
    return taken


def _meminfo(root: Path) -> dict[str, int]:
    found = {}
    for line in _file_text(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        number = value.split()[:1]
        if number and number[0].isdecimal():
            found[name] = int(number[0])
    return found


def _limit(path: Path) -> int | None:
    text = _file_text(path)
    return int(text) if text.isdecimal() else None


def _cpu_quota(path: Path) -> float | None:
    quota, _, period = _file_text(path).partition(" ")
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() and int(period) else None


def _locked_memory() -> int | None:
    most = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    return None if most == resource.RLIM_INFINITY else most


def _clock_synchronised() -> bool | None:
    try:
        state = ctypes.CDLL(None, use_errno=True).ntp_adjtime(ctypes.create_string_buffer(_TIMEX_BYTES))
    except (OSError, AttributeError):
        return None
    return None if state < 0 else state != TIME_ERROR


def _existing(folder: Path) -> Path:
    return folder if folder.exists() else _existing(folder.parent)


def _file_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
