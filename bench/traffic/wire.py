"""Builds `wire.c` and runs its two ends. What it measures is in the C file."""

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("wire.c")
ZIG = "ziglang==0.13.0"
"""A C compiler from PyPI, for machines without one."""
PATIENCE_S = 30.0


@dataclass(frozen=True)
class Round:
    """What one client run saw. `first_us` are times to the first event, in microseconds."""

    requests: int
    seconds: float
    errors: int
    events: int
    cpu_s: float
    complaint: str
    first_us: list[int]


def build(cache: Path) -> Path:
    """The program, compiled unless a newer one is there.

    Raises:
        RuntimeError: it does not compile.
    """
    program = cache / "wire"
    if program.exists() and program.stat().st_mtime > SOURCE.stat().st_mtime:
        return program
    cache.mkdir(parents=True, exist_ok=True)
    compiler = [found] if (found := shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")) else _zig(cache)
    done = subprocess.run(
        [*compiler, "-O2", "-o", str(program), str(SOURCE), "-lm"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{SOURCE.name} does not compile: {done.stderr.strip()}")
    return program


def _zig(cache: Path) -> list[str]:
    python = cache / "zig" / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "uv", "venv", "--quiet", str(cache / "zig")], check=True)
        subprocess.run(
            [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", str(python), ZIG], check=True
        )
    return [str(python), "-m", "ziglang", "cc"]


@contextlib.contextmanager
def cells(program: Path, port: int, count: int) -> Iterator[subprocess.Popen[bytes]]:
    """Stub cells on `port`, `port` + 1, …, in one process."""
    child = subprocess.Popen([program, "serve", str(port), str(count)])
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def ask(program: Path, how: str, port: int, count: int, seconds: float, body: dict[str, Any]) -> Round:
    """Run one client, `closed` with `count` connections or `rate` with `count` requests a second."""
    command = [str(program), how, str(port), str(count), str(seconds), json.dumps(body, separators=(",", ":"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + PATIENCE_S, check=True)
    measured = json.loads(done.stdout)
    return Round(**{name: measured[name] for name in Round.__dataclass_fields__})
