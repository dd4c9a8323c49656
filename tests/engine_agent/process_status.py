"""Rights of a process by the kernel, for tests."""

from pathlib import Path

import psutil


def status_of(pid: int) -> dict[str, str]:
    """The first value of each line of /proc/PID/status: `Uid` is the real one, `CapEff` what it may do as root."""
    lines = (line.partition(":") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {name: (value.split() or [""])[0] for name, _, value in lines}


def children_of(pid: int) -> list[int]:
    """Direct children of this process."""
    return [child.pid for child in psutil.Process(pid).children()]
