"""Starts vLLM on one node of a cell: `python -m engine_agent.engines.vllm.serve --node-id … [-- vLLM options]`.

Run by the engine's Python. It checks the weights and the port, sets what a node must set for any model, and then
becomes vLLM's OpenAI server or, with `--role follower`, a worker that does as the leader's calls: what the model needs
comes as vLLM options after `--`. It survives the agent that started it; its own core never survives it. Until vLLM is
imported it loads nothing heavy.

Exit status: 2 bad command line, 3 no vLLM here, 4 bad artifact, 5 address in use, 70 the engine's core or the cell
ended by itself; 0 is what vLLM makes of everything else.
"""

import contextlib
import fcntl
import json
import os
import shutil
import socket
import stat
import struct
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from engine_agent.engines.artifacts import mark_damaged, verify_folder
from engine_agent.engines.member_health import LOOPBACK, MemberHealth
from engine_agent.engines.vllm import kv_transfer
from engine_agent.engines.vllm.cell.member import (
    EXIT_CELL_ENDED,
    MEMBER_VARIABLE,
    CellEnded,
    Shutdown,
    certificate_from,
    left_reason,
    secret_from,
)
from engine_agent.engines.vllm.class_scheduler import TOKENS_VARIABLE
from engine_agent.engines.vllm.core_process import one_process_server
from engine_agent.engines.vllm.kv_transfer import kv_transfer_config, kv_transfer_environment
from engine_agent.engines.vllm.middleware import FOLDER_VARIABLE, config_of
from engine_agent.engines.vllm.options import ServeOptions, parse
from engine_agent.engines.vllm.speculation_patches import EXTENSION, PATCHED_METHODS
from engine_agent.engines.vllm.steps import FOLLOWER_STEPS_PATH, written_steps
from engine_agent.protocol.manifest import BadArtifact
from engine_agent.protocol.states import MemberRole

EXIT_BAD_COMMAND_LINE = 2
EXIT_NO_VLLM = 3
EXIT_BAD_ARTIFACT = 4
EXIT_ADDRESS_IN_USE = 5
SHUTDOWN_TIMEOUT_S = 2
"""On SIGTERM. The agent stops an engine when it is idle or out of time, so this only lets last tokens out."""
ONE_PROCESS_EXECUTOR = "engine_agent.engines.vllm.executor.OneProcessExecutor"
"""vLLM's own for one process, with its steps measured. It keeps the worker in the engine's core. vLLM would start a
third process for it on CPU, which takes 0.5 GB and another import of vLLM, outlives a killed core by seconds and leaves
segments in /dev/shm."""
NO_HOST = "media.invalid"
"""A name that no host has (RFC 6761)."""
CELL_EXECUTOR = "engine_agent.engines.vllm.executor.LeaderFollowerExecutor"
CELL_HEALTH = "engine_agent.engines.vllm.middleware.LeaderHealth"
STEPS_PAGE = "engine_agent.engines.vllm.middleware.StepsPage"
CLASS_SCHEDULER = "engine_agent.engines.vllm.class_scheduler.class_aware_scheduler"
USAGE_LEDGER = "engine_agent.engines.vllm.middleware.VllmUsageLedger"
"""It knows this version of vLLM from within, so other builds do without."""
CHOOSES_EXECUTOR = (
    "--distributed-executor-backend",
    "--tensor-parallel-size",
    "-tp",
    "--pipeline-parallel-size",
    "-pp",
)
"""vLLM options that decide where workers run."""
WITHOUT_CACHE_EVENTS = ("--no-enable-prefix-caching", "--kv-events-config", "--data-parallel-size", "-dp")
SIOCGIFADDR = 0x8915
"""From <linux/sockios.h>."""
_NAME_BYTES = 15
_ADDRESS = slice(20, 24)
"""Of an IPv4 address in struct ifreq."""


class CannotServe(Exception):
    """A reason not to start, with the exit status that says which kind it is."""

    def __init__(self, exit_status: int, reason: str) -> None:
        super().__init__(reason)
        self.exit_status = exit_status


@dataclass(frozen=True)
class Server:
    """One build of vLLM's server: options that not every version has, and how it is run to its end.

    `run` is called with the options of vLLM and with what to do last, if the server must be made to end.
    """

    argv: tuple[str, ...]
    run: Callable[[Sequence[str], Callable[[], None]], None]
    scheduler: str = ""
    """One that knows classes; empty: it has a scheduler of its own."""
    speculation: str = ""
    """What is added to workers that guess tokens; empty: nothing."""
    tells_cache: bool = False
    """Its middleware says what is in the prefix cache."""


def vllm_argv(options: ServeOptions, own: Sequence[str] = ()) -> list[str]:
    """Options of vLLM's server: the node's, the server's `own`, the plan's, which win where they may state them.

    It listens on loopback: only the cell proxy beside it speaks to it, whoever reaches the node's address.

    The access log would be the node's own health probes. Media come in the request: an address in one would be fetched
    from inside the fleet's network, and vLLM asks no more than whether its host is of this list.
    """
    return [
        *("--model", str(options.model_dir)),
        *("--served-model-name", options.served_model),
        *("--host", LOOPBACK),
        *("--port", str(options.port)),
        "--disable-uvicorn-access-log",
        *("--middleware", STEPS_PAGE),
        *("--allowed-media-domains", NO_HOST),
        *own,
        *(("--kv-transfer-config", kv_transfer_config()) if options.kv_port else ()),
        *_executor(options),
        *_adapter_modules(options),
        *options.vllm_args,
    ]


def _adapter_modules(options: ServeOptions) -> tuple[str, ...]:
    """As JSON, for a path may hold what `name=path` cannot; so the list of models names their parent, too."""
    modules = (
        json.dumps({"name": name, "path": folder, "base_model_name": options.served_model})
        for name, folder, _ in options.adapters
    )
    return ("--lora-modules", *modules) if options.adapters else ()


def _executor(options: ServeOptions) -> tuple[str, ...]:
    if options.followers > 0:
        return ("--distributed-executor-backend", CELL_EXECUTOR, "--middleware", CELL_HEALTH)
    named = {argument.partition("=")[0].replace("_", "-") for argument in options.vllm_args}
    return () if named & set(CHOOSES_EXECUTOR) else ("--distributed-executor-backend", ONE_PROCESS_EXECUTOR)


def scheduler_argv(options: ServeOptions, server: Server) -> tuple[str, ...]:
    """The scheduler that knows classes, where it is wanted and there is one."""
    return ("--scheduler-cls", server.scheduler) if options.batch_prompt_tokens and server.scheduler else ()


def speculation_argv(options: ServeOptions, server: Server) -> tuple[str, ...]:
    """What mends vLLM's workers, where they guess tokens in a way that needs it."""
    needs = options.speculation_method in PATCHED_METHODS
    return ("--worker-extension-cls", server.speculation) if needs and server.speculation else ()


def cache_argv(options: ServeOptions, server: Server, runtime: Path) -> tuple[str, ...]:
    """Has the core publish what it stores, in the engine's own folder, unless it stores nothing or the plan says where
    to. Each of several data-parallel cores would need a socket of its own, which vLLM makes of TCP ports only."""
    named = {argument.partition("=")[0].replace("_", "-") for argument in options.vllm_args}
    if not server.tells_cache or named & set(WITHOUT_CACHE_EVENTS):
        return ()
    return ("--kv-events-config", json.dumps(config_of(runtime)))


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
        # A thread that waits for work must not keep others from theirs. Measured on two cores that had much else to do:
        # 7 tokens/s spinning and 15 to 20 passive, with n-gram speculation 1 and 28.
        "OMP_WAIT_POLICY": "passive",
    }
    if "--enforce-eager" in options.vllm_args:
        # vLLM compiles some functions all the same, at the first request and anew in every start: 20 s on two cores.
        wanted["TORCH_COMPILE_DISABLE"] = "1"
    interface = interface_of(options.host)
    if interface is not None:
        # Collectives between nodes, and gloo's within one, stay on the interface that the node's address is on.
        wanted |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    if options.kv_port:
        wanted |= kv_transfer_environment(options.host, options.kv_port, interface)
    if options.batch_prompt_tokens:
        wanted[TOKENS_VARIABLE] = str(options.batch_prompt_tokens)
    if options.followers > 0:
        wanted[MEMBER_VARIABLE] = options.member(runtime).to_variable()
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
        mark_damaged(folder)
        raise CannotServe(EXIT_BAD_ARTIFACT, f"will not load {folder}: {error}") from error


def check_artifacts(options: ServeOptions) -> None:
    """Read every weight file of the model, of its draft if it has one, and of its adapters.

    Raises:
        CannotServe: a folder is not the artifact that the plan names.
    """
    check_artifact(options.model_dir, options.digest)
    if options.draft is not None:
        folder, digest = options.draft
        check_artifact(Path(folder), digest)
    for _, folder, digest in options.adapters:
        check_artifact(Path(folder), digest)


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


def run_vllm(argv: Sequence[str], shutdown_hook: Callable[[], None]) -> None:
    """Be vLLM's server until it ends, or until it must: then `shutdown_hook` runs first.

    Raises:
        CannotServe: vLLM is not installed in this Python.
    """
    try:
        serve_api = one_process_server(shutdown_hook)
    except ImportError as error:
        raise _no_vllm(error) from error
    sys.argv = ["vllm", *argv]
    serve_api()


# The option came with vLLM 0.18: https://github.com/vllm-project/vllm/pull/34730.
OWN_SERVER = Server(
    ("--shutdown-timeout", str(SHUTDOWN_TIMEOUT_S), "--middleware", USAGE_LEDGER),
    run_vllm,
    CLASS_SCHEDULER,
    EXTENSION,
    tells_cache=True,
)


def _no_vllm(error: ImportError) -> CannotServe:
    reason = f"{sys.executable} has no working vLLM ({error}); install the engine's environment"
    return CannotServe(EXIT_NO_VLLM, reason)


def main(argv: Sequence[str], server: Server | None = None) -> int:
    """Serve, or follow; returns the exit status, see the module's text."""
    options = parse(argv)
    try:
        if options.followers > 0:
            _check_membership(options.role)
        _check_packages(options)
        if options.role is MemberRole.FOLLOWER:
            return _follow(options)
        with hold_address(LOOPBACK, options.port):
            check_artifacts(options)
            return _serve(options, server or OWN_SERVER)
    except CannotServe as error:
        print(f"node {options.node_id}: {error}", file=sys.stderr)
        return error.exit_status


def _check_packages(options: ServeOptions) -> None:
    """Find now what vLLM would miss only after its imports."""
    if options.kv_port and find_spec(kv_transfer.PACKAGE) is None:
        missing = f"{kv_transfer.PACKAGE}, {kv_transfer.USE}: {kv_transfer.HOW}"
        raise CannotServe(EXIT_NO_VLLM, f"{sys.executable} has no {missing}")


def _check_membership(role: MemberRole) -> None:
    """Find now what the core would miss only after its imports."""
    try:
        secret_from(os.environ)
        if role is MemberRole.LEADER:
            certificate_from(os.environ)
    except CellEnded as error:
        raise CannotServe(EXIT_BAD_COMMAND_LINE, str(error)) from error


def _serve(options: ServeOptions, server: Server) -> int:
    runtime = _prepare(options)
    ended_file = options.member(runtime).ended_file
    server_pid = os.getpid()

    def tidy_up() -> None:
        """Say why, if the cell is over, as the last line of the log; leave no file."""
        if os.getpid() == server_pid and runtime.exists():
            reason = left_reason(ended_file)
            shutil.rmtree(runtime, ignore_errors=True)
            if reason:
                print(f"node {options.node_id}: {reason}", file=sys.stderr, flush=True)

    told = cache_argv(options, server, runtime)
    if told:
        os.environ[FOLDER_VARIABLE] = str(runtime)
    own = (*server.argv, *scheduler_argv(options, server), *speculation_argv(options, server), *told)
    try:
        server.run(vllm_argv(options, own), tidy_up)
    except Exception:
        if not left_reason(ended_file):
            raise
        traceback.print_exc()
    finally:
        failed = left_reason(ended_file) != ""
        tidy_up()
    return EXIT_CELL_ENDED if failed else 0


def _follow(options: ServeOptions) -> NoReturn:
    """Be a follower until the cell ends, and the process with it."""
    shutdown = Shutdown()
    shutdown.on_signals()
    try:
        health = MemberHealth(options.admin_port, "importing vLLM")
    except OSError as error:
        reason = f"cannot listen on the administration port {options.admin_port}: {error.strerror}"
        raise CannotServe(EXIT_ADDRESS_IN_USE, reason) from error
    check_artifacts(options)
    runtime = _prepare(options)
    health.page(FOLLOWER_STEPS_PATH, lambda: written_steps(runtime))
    try:
        from engine_agent.engines.vllm.cell.worker import follow
    except ImportError as error:
        raise _no_vllm(error) from error
    shutdown.hooks.append(lambda _: shutil.rmtree(runtime, ignore_errors=True))
    follow(options.member(runtime), options.model_dir, health.say, shutdown)


def _prepare(options: ServeOptions) -> Path:
    runtime = fresh_runtime_folder(options.node_id)
    cores = len(os.sched_getaffinity(0))
    os.environ.update(node_environment(options, runtime, cores, os.environ))
    tempfile.tempdir = None  # forget the folder that was found before TMPDIR changed
    return runtime


def interface_of(address: str) -> str | None:
    """Name of the interface whose first address this is; None if there is none. IPv4 only, as for gloo and NCCL."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:_NAME_BYTES])
            with contextlib.suppress(OSError):  # an interface without an IPv4 address
                reply = fcntl.ioctl(probe, SIOCGIFADDR, request)
                if socket.inet_ntoa(reply[_ADDRESS]) == address:
                    return name
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
