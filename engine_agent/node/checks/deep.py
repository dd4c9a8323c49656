"""`python -m engine_agent deep-checks --state DIR`: every deep check of this node, one line of JSON each; this file
also has the checks of memory and disk. It needs only the standard library.

The agent runs it as a child at low priority; users can run it by hand. Computation is checked in the engine's own
Python, which may have torch, by a child with its own time limit. The plan of links, which contains a secret, is read
from standard input. Exit status: 1 if a check failed."""

import argparse
import contextlib
import fcntl
import hashlib
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from time import monotonic

from engine_agent.node.checks.links import LinkPlan, check_links, plan_from
from engine_agent.node.checks.result import Result, printed, result_from, timed

MIB = 1024 * 1024
BLOCK_BYTES = 8 * MIB
PATTERNS = (0x00, 0xFF, 0x55, 0xAA)
"""Every bit in both states, and next to its opposite."""
MEMORY_SHARE = 0.05
"""At most this share of the available memory: a serving node must not swap because of a check."""
DISK_SLOW_MIB_S = 20.0
"""A slower disk is faulty: at this speed weights of 16 GiB take a quarter of an hour."""
LOCK_FILE = ".disk-check.lock"
DISK_KEPT_FREE = 4
"""The disk must have this many times the size of the check."""


def check_memory(most_mib: int, within_s: float, available_bytes: int) -> Result:
    """Writes patterns over a part of memory and reads them back: each bit in both states, then random bytes."""
    block_count = max(1, min(most_mib * MIB, int(available_bytes * MEMORY_SHARE)) // BLOCK_BYTES)
    ends_s = monotonic() + within_s
    noise = random.Random(block_count).randbytes(BLOCK_BYTES)
    contents = [bytes([pattern]) * BLOCK_BYTES for pattern in PATTERNS] + [noise]
    blocks: list[bytearray] = []
    rounds = 0
    for content in contents:
        for index in range(block_count):
            if index == len(blocks):
                blocks.append(bytearray(BLOCK_BYTES))
            blocks[index][:] = content
        for index, block in enumerate(blocks):
            if block != content:
                return Result(
                    "memory", False, _differing(index, block, content), "memory returns what was written to it"
                )
        rounds += 1
        if monotonic() >= ends_s:
            break
    size_mib = block_count * BLOCK_BYTES // MIB
    found = f"{size_mib} MiB held {rounds} of {len(contents)} patterns"
    return Result("memory", True, found, numbers={"mib": size_mib, "patterns": rounds})


def _differing(index: int, block: bytearray, content: bytes) -> str:
    at = next(place for place, (is_, was) in enumerate(zip(block, content, strict=True)) if is_ != was)
    return f"byte {at} of block {index} is {block[at]:#04x} and {content[at]:#04x} was written"


def check_disk(folder: Path, size_mib: int, within_s: float) -> Result:
    """Writes a file to the disk and reads it back from there, not from the page cache."""
    free = shutil.disk_usage(folder).free
    if free < DISK_KEPT_FREE * size_mib * MIB:
        return Result(
            "disk",
            None,
            f"{free // MIB} MiB are free in {folder}; not checked with less than {DISK_KEPT_FREE * size_mib}",
        )
    ends_s = monotonic() + within_s
    descriptor, name = tempfile.mkstemp(prefix=".check-", dir=folder)
    try:
        return _disk_round_trip(descriptor, size_mib, ends_s)
    finally:
        os.close(descriptor)
        with contextlib.suppress(OSError):
            os.unlink(name)


def _disk_round_trip(descriptor: int, size_mib: int, ends_s: float) -> Result:
    block = random.Random(size_mib).randbytes(MIB)
    written, began_s = hashlib.sha256(), monotonic()
    count = 0
    while count < size_mib and monotonic() < ends_s:
        part = count.to_bytes(8, "little") + block[8:]
        _write_all(descriptor, part)
        written.update(part)
        count += 1
    os.fsync(descriptor)
    wrote_s = max(monotonic() - began_s, 1e-6)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.lseek(descriptor, 0, os.SEEK_SET)
    read, began_s = hashlib.sha256(), monotonic()
    for _ in range(count):
        read.update(_read_all(descriptor, MIB))
    read_s = max(monotonic() - began_s, 1e-6)
    speeds = {"mib": count, "write_mib_s": count / wrote_s, "read_mib_s": count / read_s}
    if read.digest() != written.digest():
        return Result(
            "disk", False, f"{count} MiB came back changed", "a disk returns what was written", numbers=speeds
        )
    slowest = min(speeds["write_mib_s"], speeds["read_mib_s"])
    found = f"{count} MiB written at {speeds['write_mib_s']:.0f} and read at {speeds['read_mib_s']:.0f} MiB/s"
    if slowest < DISK_SLOW_MIB_S:
        return Result("disk", False, found, f"at least {DISK_SLOW_MIB_S:.0f} MiB/s", numbers=speeds)
    return Result("disk", True, found, numbers=speeds)


def _write_all(descriptor: int, content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[os.write(descriptor, left) :]


def _read_all(descriptor: int, length: int) -> bytes:
    parts = []
    while length and (part := os.read(descriptor, length)):
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


def available_memory_bytes() -> int:
    """Memory that can be used without swapping, by /proc/meminfo; 0 if unknown."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 0


ROOT = Path(__file__).resolve().parents[3]
COMPUTE_STARTS_S = 60.0
"""Importing torch on a busy machine."""
NICE = 10


@dataclass(frozen=True)
class DeepPlan:
    """The extent of the checks. `seconds`: approximate time of each check of memory and computation."""

    state: Path
    pythons: tuple[Path, ...] = ()
    seconds: float = 3.0
    memory_mib: int = 256
    disk_mib: int = 64
    disk_s: float = 20.0
    links: LinkPlan | None = None
    computes: bool = True


def run_deep(plan: DeepPlan) -> Iterator[Result]:
    available = available_memory_bytes()
    yield timed("memory", lambda: check_memory(plan.memory_mib, plan.seconds, available))
    with _alone_on_disk(plan.state.parent):
        yield timed("disk", lambda: check_disk(plan.state, plan.disk_mib, plan.disk_s))
    if plan.computes:
        yield from _compute(plan)
    if plan.links is not None:
        yield from check_links(plan.links)


@contextlib.contextmanager
def _alone_on_disk(folder: Path) -> Iterator[None]:
    """Nodes that share a machine have their folders next to each other. They check its disk one after the other,
    because each would measure only its share of the speed."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            lock = stack.enter_context((folder / LOCK_FILE).open("ab"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _compute(plan: DeepPlan) -> Iterator[Result]:
    """Uses the first engine's Python that works, or this one."""
    found: list[Result] = []
    for python in (*plan.pythons, Path(sys.executable)):
        found = _compute_in(python, plan.seconds)
        if any(result.ok is not None for result in found):
            break
    yield from found


def _compute_in(python: Path, seconds: float) -> list[Result]:
    argv = [str(python), "-m", "engine_agent.node.checks.compute", "--seconds", f"{seconds:g}"]
    limit_s = COMPUTE_STARTS_S + 20 * seconds
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    try:
        done = subprocess.run(argv, capture_output=True, timeout=limit_s, env=environment, cwd=ROOT, check=False)
    except subprocess.TimeoutExpired as error:
        partly = _results(error.stdout or b"")
        wanted = f"products within {limit_s:.0f} s"
        return [*partly, Result("matmul", False, f"no answer from {python} within {limit_s:.0f} s", wanted)]
    except OSError as error:
        return [Result("matmul", None, f"{python} does not start: {error.strerror}")]
    results = _results(done.stdout)
    if done.returncode not in (0, 1):
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["no reason given"]
        ended = f"{python} exited with status {done.returncode}: {last[0]}"
        is_crash = done.returncode < 0
        results.append(Result("matmul", False if is_crash else None, ended, "a normal exit" if is_crash else ""))
    return results


def _results(lines: bytes) -> list[Result]:
    return [result_from(line) for line in lines.splitlines() if line.startswith(b"{")]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m engine_agent deep-checks", description=__doc__)
    parser.add_argument("--state", required=True, type=Path, help="a folder on the disk to check")
    parser.add_argument("--python", action="append", default=[], type=Path, help="an engine's Python; may be repeated")
    parser.add_argument(
        "--seconds", type=float, default=3.0, help="approximate time of each check of memory and computation"
    )
    parser.add_argument("--light", action="store_true", help="only memory and disk, because an engine runs here")
    parser.add_argument("--links", action="store_true", help="read a plan of links from standard input")
    parser.add_argument("--arriving", action="store_true", help="first what doctor finds, because the node will join")
    options = parser.parse_args(argv)
    try:
        links = plan_from(sys.stdin.read()) if options.links else None
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    os.nice(NICE)
    plan = DeepPlan(options.state, tuple(options.python), options.seconds, links=links, computes=not options.light)
    return printed(chain(_arrival(options.state) if options.arriving else (), run_deep(plan)))


def _arrival(state: Path) -> Iterator[Result]:
    from engine_agent.node.checks.doctor import arrival  # which needs the agent's own packages

    return arrival(state)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
