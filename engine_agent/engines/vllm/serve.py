"""Starts vLLM's OpenAI server for one node: `python -m engine_agent.engines.vllm.serve --node-id … [-- vLLM options]`.

Run by the engine's Python. It checks the weights and the port, sets what a node must set for any model, and then
becomes the server: what the model needs comes as vLLM options after `--`. It survives the agent that started it; its
own core never survives it. Until vLLM is imported it uses the standard library alone.

Exit status: 2 bad command line, 3 no vLLM here, 4 bad artifact, 5 address in use, 70 the engine's core ended by itself;
0 is what vLLM makes of everything else.
"""

import argparse
import ipaddress
import os
import shutil
import socket
import stat
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine_agent.engines.artifact import BadArtifact, verify_folder

EXIT_NO_VLLM = 3
EXIT_BAD_ARTIFACT = 4
EXIT_ADDRESS_IN_USE = 5
SHUTDOWN_TIMEOUT_S = 2
"""On SIGTERM. The agent stops an engine when it is idle or out of time, so this only lets last tokens out."""
ONE_PROCESS_EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""Keeps the worker in the engine's core. vLLM would start a third process for it on CPU, which takes 0.5 GB and another
import of vLLM, outlives a killed core by seconds and leaves segments in /dev/shm."""
CHOOSES_EXECUTOR = (
    "--distributed-executor-backend",
    "--tensor-parallel-size",
    "-tp",
    "--pipeline-parallel-size",
    "-pp",
)
"""vLLM options that decide where workers run."""


@dataclass(frozen=True)
class ServeOptions:
    """The launcher's own options; `vllm_args` is what followed `--`."""

    node_id: str
    host: str
    port: int
    served_model: str
    model_dir: Path
    digest: str
    vllm_args: tuple[str, ...]


class CannotServe(Exception):
    """A reason not to start, with the exit status that says which kind it is."""

    def __init__(self, exit_status: int, reason: str) -> None:
        super().__init__(reason)
        self.exit_status = exit_status


def parse(argv: Sequence[str]) -> ServeOptions:
    """Read the command line; exits with status 2 on a bad one."""
    own, vllm_args = list(argv), []
    if "--" in own:
        split = own.index("--")
        own, vllm_args = own[:split], own[split + 1 :]
    parser = argparse.ArgumentParser(prog="engine_agent.engines.vllm.serve", allow_abbrev=False)
    parser.add_argument("--node-id", required=True)
    parser.add_argument("--cell", required=True, help="for whoever reads the process list")
    parser.add_argument("--generation", required=True, type=int, help="for whoever reads the process list")
    parser.add_argument("--rank", required=True, type=int, choices=[0])
    parser.add_argument("--role", required=True, choices=["leader"])
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", required=True, type=int)
    parser.add_argument("--served-model", required=True)
    parser.add_argument("--model-dir", required=True, type=Path)
    parser.add_argument("--digest", required=True, help="sha256:… of the artifact's manifest")
    read = parser.parse_args(own)
    return ServeOptions(
        read.node_id, read.host, read.port, read.served_model, read.model_dir, read.digest, tuple(vllm_args)
    )


def vllm_argv(options: ServeOptions) -> list[str]:
    """Options of vLLM's server; the plan's come last and win. The access log would be the node's own health probes."""
    named = {argument.partition("=")[0].replace("_", "-") for argument in options.vllm_args}
    executor = () if named & set(CHOOSES_EXECUTOR) else ("--distributed-executor-backend", ONE_PROCESS_EXECUTOR)
    return [
        *("--model", str(options.model_dir)),
        *("--served-model-name", options.served_model),
        *("--host", options.host),
        *("--port", str(options.port)),
        "--disable-uvicorn-access-log",
        *("--shutdown-timeout", str(SHUTDOWN_TIMEOUT_S)),
        *executor,
        *options.vllm_args,
    ]


def node_environment(options: ServeOptions, runtime: Path, cores: int, given: Mapping[str, str]) -> dict[str, str]:
    """Variables to set, apart from those that the plan has `given` already.

    Args:
        options: where the node serves.
        runtime: a folder of this engine's own for sockets and other files that end with it.
        cores: processors that this process may use.
        given: the environment as it is.
    """
    wanted = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": options.host,
        "VLLM_PROCESS_NAME_PREFIX": f"vllm {options.node_id}",
        # vLLM leaves its ZeroMQ sockets and rendezvous files behind wherever TMPDIR points.
        "TMPDIR": str(runtime),
        # One core stays free for the agent, the proxy and the engine's own HTTP, and no thread is tied to a core:
        # several nodes can share a machine, and each would tie its threads to the same first core.
        "OMP_NUM_THREADS": str(max(1, cores - 1)),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    if ipaddress.ip_address(options.host).is_loopback:
        wanted["GLOO_SOCKET_IFNAME"] = "lo"
    return {name: value for name, value in wanted.items() if name not in given or name == "TMPDIR"}


def hold_address(host: str, port: int) -> socket.socket:
    """Find a taken port now, and keep a free one until vLLM listens on it, which is after its imports.

    Held this way (bound, not listening, reusable) no other program's outgoing connection gets the port meanwhile.

    Raises:
        CannotServe: something listens there, or the address is not this machine's.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        held.bind((host, port))
    except OSError as error:
        held.close()
        raise CannotServe(EXIT_ADDRESS_IN_USE, f"cannot listen on {host}:{port}: {error.strerror}") from error
    return held


def check_artifact(folder: Path, digest: str) -> None:
    """Read every weight file once.

    Raises:
        CannotServe: the folder is not the artifact that the plan names.
    """
    try:
        verify_folder(folder, digest)
    except BadArtifact as error:
        raise CannotServe(EXIT_BAD_ARTIFACT, f"will not load {folder}: {error}") from error


def fresh_runtime_folder(node_id: str) -> Path:
    """An empty folder for this node's engine, without what an engine that was killed may have left in it.

    It lies in the system's temporary folder because a socket's path may have no more than 107 bytes.
    """
    folder = Path(tempfile.gettempdir()) / f"switchyard-engine-{os.getuid()}-{node_id}"
    if folder.is_symlink() or (folder.exists() and folder.stat().st_uid != os.getuid()):
        raise CannotServe(1, f"{folder} is in the way: it is not a folder of this user")
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(mode=stat.S_IRWXU)
    return folder


def run_vllm(argv: Sequence[str], last_act: Callable[[], None]) -> None:
    """Be vLLM's server until it ends, or until it must: then `last_act` runs first.

    Raises:
        CannotServe: vLLM is not installed in this Python.
    """
    try:
        from engine_agent.engines.vllm.quick_start import start_from_one_process
    except ImportError as error:
        reason = f"{sys.executable} has no working vLLM ({error}); install the engine's environment"
        raise CannotServe(EXIT_NO_VLLM, reason) from error
    sys.argv = ["vllm", *argv]
    start_from_one_process(last_act)


def main(argv: Sequence[str]) -> int:
    """Serve; returns the exit status, see the module's text."""
    options = parse(argv)
    try:
        with hold_address(options.host, options.port):
            check_artifact(options.model_dir, options.digest)
            _serve(options)
    except CannotServe as error:
        print(f"node {options.node_id}: {error}", file=sys.stderr)
        return error.exit_status
    return 0


def _serve(options: ServeOptions) -> None:
    runtime = fresh_runtime_folder(options.node_id)
    cores = len(os.sched_getaffinity(0))
    os.environ.update(node_environment(options, runtime, cores, os.environ))
    tempfile.tempdir = None  # forget the folder that was found before TMPDIR changed
    server = os.getpid()

    def remove_runtime() -> None:
        if os.getpid() == server:
            shutil.rmtree(runtime, ignore_errors=True)

    try:
        run_vllm(vllm_argv(options), remove_runtime)
    finally:
        remove_runtime()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
