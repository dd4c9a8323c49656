"""Starts vLLM on one node of a cell: `python -m engine_agent.engines.vllm.serve --node-id … [-- vLLM options]`.

Run by the engine's Python. It checks the weights and the port, sets what a node must set for any model, and then
becomes vLLM's OpenAI server or, with `--role follower`, a worker that runs the leader's calls. The model's options
follow `--`. It outlives the agent that started it; its core never outlives it. Nothing heavy is loaded before vLLM.

Exit status: 2 bad command line, 3 no vLLM here, 4 bad artifact, 5 address in use, 6 too little shared memory, 70 the
engine's core or the cell failed; 0 is what vLLM makes of everything else."""

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
from dataclasses import dataclass, replace
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
    read_end_reason,
    secret_from,
)
from engine_agent.engines.vllm.class_scheduler import TOKENS_VARIABLE
from engine_agent.engines.vllm.core_process import one_process_server
from engine_agent.engines.vllm.idle_sleep import SLEEP_VARIABLE
from engine_agent.engines.vllm.kv_transfer import (
    installed_vllm,
    kv_store_config,
    kv_transfer_config,
    kv_transfer_environment,
    store_key,
)
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
EXIT_LITTLE_SHARED_MEMORY = 6
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  (where vLLM allocates it)
GROUP_MIB, CALLS_MIB, REPLIES_MIB = 24, 160, 240
"""Of vLLM's queues (`MessageQueue` of 0.32): one of a tensor-parallel group on one machine, 6 chunks of 4 MiB; and of
its own executor one for calls, 10 of 16, and one per worker for its replies, 10 of 24."""
SHUTDOWN_TIMEOUT_S = 2
"""After SIGTERM. The agent stops an engine when it is idle or out of time, so this only lets last tokens out."""
ONE_PROCESS_EXECUTOR = "engine_agent.engines.vllm.executor.OneProcessExecutor"
"""vLLM's executor for one process, with measured steps. It keeps the worker in the engine's core. On CPU vLLM would
start a third process for it, which takes 0.5 GB and another import of vLLM, outlives a killed core by seconds and
leaves segments in /dev/shm."""
NO_HOST = "media.invalid"
"""A name that no host has (RFC 6761)."""
STRUCTURED_OUTPUTS = json.dumps({"backend": "xgrammar"})
"""vLLM's `auto` (0.32, `v1/structured_output/__init__.py`) takes the library that the first request of an engine needs
for all later ones, which were checked with another library: one request could make others fail with 500, or have
keywords of their schemas ignored."""
CELL_EXECUTOR = "engine_agent.engines.vllm.executor.LeaderFollowerExecutor"
CELL_HEALTH = "engine_agent.engines.vllm.middleware.LeaderHealth"
IDLE_SLEEP = "engine_agent.engines.vllm.idle_sleep.IdleSleep"
STEPS_PAGE = "engine_agent.engines.vllm.middleware.StepsPage"
CLASS_SCHEDULER = "engine_agent.engines.vllm.class_scheduler.class_aware_scheduler"
USAGE_LEDGER = "engine_agent.engines.vllm.middleware.VllmUsageLedger"
CONTINUATIONS = "engine_agent.engines.vllm.continuation.middleware.Continuations"
"""Both depend on internals of this version of vLLM, so other builds do not use them."""
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
    def __init__(self, exit_status: int, reason: str) -> None:
        super().__init__(reason)
        self.exit_status = exit_status


@dataclass(frozen=True)
class Server:
    """One build of vLLM's server: options that not every version has, and how it is run. `run` is called with vLLM's
    options and with a hook to call last if the server is forced to exit."""

    argv: tuple[str, ...]
    run: Callable[[Sequence[str], Callable[[], None]], None]
    scheduler: str = ""
    """A scheduler that knows classes; empty if this build cannot use one."""
    speculation: str = ""
    """A worker extension that patches speculation; empty if there is none."""
    tells_cache: bool = False
    """Its middleware lists the prefix cache."""
    one_worker: bool = True
    """One worker drives all devices of a node, as Neuron's."""


def vllm_argv(options: ServeOptions, own: Sequence[str] = ()) -> list[str]:
    """Returns the options of vLLM's server: the node's, the server's `own`, and the plan's, which take precedence where
    they may.

    It listens on loopback, because only the cell proxy on the same node connects to it. The access log would contain
    only health probes. Media must be part of the request: an address in a request would be fetched from inside the
    fleet's network, so the list of allowed hosts has no real one."""
    return [
        *("--model", str(options.model_dir)),
        *("--served-model-name", options.served_model),
        *("--host", LOOPBACK),
        *("--port", str(options.port)),
        "--disable-uvicorn-access-log",
        *("--middleware", STEPS_PAGE),
        *("--allowed-media-domains", NO_HOST),
        *("--structured-outputs-config", STRUCTURED_OUTPUTS),
        *own,
        *(("--kv-transfer-config", kv_transfer_config()) if options.kv_port else ()),
        *_kv_store(options),
        *_executor(options),
        *_adapter_modules(options),
        *(("--enable-sleep-mode", "--middleware", IDLE_SLEEP) if options.sleep else ()),
        *options.vllm_args,
    ]


def _adapter_modules(options: ServeOptions) -> tuple[str, ...]:
    """As JSON, because a path may contain characters that `name=path` cannot, and because the list of models then names
    their parent."""
    modules = (
        json.dumps({"name": name, "path": folder, "base_model_name": options.served_model})
        for name, folder, _ in options.adapters
    )
    return ("--lora-modules", *modules) if options.adapters else ()


def _kv_store(options: ServeOptions) -> tuple[str, ...]:
    """Blocks are shared by engines with the same weights, arguments and vLLM."""
    if options.kv_store is None:
        return ()
    weights = (options.digest, options.draft and options.draft[1], *((name, sha) for name, _, sha in options.adapters))
    key = store_key(installed_vllm(), weights, options.vllm_args)
    return ("--kv-transfer-config", kv_store_config(options.kv_store, key, *options.kv_store_gib))


def _executor(options: ServeOptions) -> tuple[str, ...]:
    if options.followers > 0:
        return ("--distributed-executor-backend", CELL_EXECUTOR, "--middleware", CELL_HEALTH)
    named = {argument.partition("=")[0].replace("_", "-") for argument in options.vllm_args}
    return () if named & set(CHOOSES_EXECUTOR) else ("--distributed-executor-backend", ONE_PROCESS_EXECUTOR)


def scheduler_argv(options: ServeOptions, server: Server) -> tuple[str, ...]:
    """Selects the scheduler that knows classes, if batch prompts are limited and there is one."""
    return ("--scheduler-cls", server.scheduler) if options.batch_prompt_tokens and server.scheduler else ()


def speculation_argv(options: ServeOptions, server: Server) -> tuple[str, ...]:
    """Selects the patches of vLLM's workers, if the method of speculation needs them."""
    needs = options.speculation_method in PATCHED_METHODS
    return ("--worker-extension-cls", server.speculation) if needs and server.speculation else ()


def cache_argv(options: ServeOptions, server: Server, runtime: Path) -> tuple[str, ...]:
    """Has the core publish its cache events in the engine's folder, unless it has no cache or the plan states another
    place. Several data-parallel cores would need a socket each, and vLLM supports that only for TCP ports."""
    named = {argument.partition("=")[0].replace("_", "-") for argument in options.vllm_args}
    if not server.tells_cache or named & set(WITHOUT_CACHE_EVENTS):
        return ()
    return ("--kv-events-config", json.dumps(config_of(runtime)))


def node_environment(options: ServeOptions, runtime: Path, cores: int, given: Mapping[str, str]) -> dict[str, str]:
    """Returns variables to set, except those that the plan has `given`.

    Args:
        options: the launcher's options.
        runtime: a folder for this engine's sockets and other files, deleted with it.
        cores: processors that this process may use.
        given: the current environment."""
    wanted = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": options.host,
        "VLLM_PROCESS_NAME_PREFIX": f"vllm {options.node_id}",
        # vLLM leaves its ZeroMQ sockets and rendezvous files behind wherever TMPDIR points.
        "TMPDIR": str(runtime),
        # One core stays free for the agent, the proxy and the engine's HTTP. No thread is bound to a core: several
        # nodes can share a machine, and each would bind its threads to the same first core.
        "OMP_NUM_THREADS": str(max(1, (cores - 1) // options.workers)),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # Waiting threads must not use the processor. Measured on two busy cores: 7 tokens/s with spinning threads and
        # 15 to 20 with passive ones; with n-gram speculation 1 and 28.
        "OMP_WAIT_POLICY": "passive",
    }
    if "--enforce-eager" in options.vllm_args:
        # vLLM would still compile some functions, at the first request after every start: 20 s on two cores.
        wanted["TORCH_COMPILE_DISABLE"] = "1"
    else:
        # vLLM's keys of compiled code contain the prefix, so with the node's name no node could use another's code.
        wanted["VLLM_PROCESS_NAME_PREFIX"] = "vllm"
    interface = interface_of(options.host)
    if interface is not None:
        # Collectives between nodes, and gloo's within one, use the interface of the node's address.
        wanted |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    if options.kv_port:
        wanted |= kv_transfer_environment(options.host, options.kv_port, interface)
    if options.batch_prompt_tokens:
        wanted[TOKENS_VARIABLE] = str(options.batch_prompt_tokens)
    if options.sleep is not None:
        wanted[SLEEP_VARIABLE] = "{} {}".format(*options.sleep)
    if options.followers > 0:
        wanted[MEMBER_VARIABLE] = options.member(runtime).to_variable()
    return {name: value for name, value in wanted.items() if name not in given or name == "TMPDIR"}


def reserve_port(host: str, port: int) -> socket.socket:
    """Reserves a port, or fails if it is taken, until vLLM listens on it after its imports. Bound, not listening and
    reusable, it cannot be taken by another program's outgoing connection meanwhile. Raises CannotServe if a program
    listens there, or the address is not this machine's."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        held.bind((host, port))
    except OSError as error:
        held.close()
        raise CannotServe(EXIT_ADDRESS_IN_USE, f"cannot listen on {host}:{port}: {error.strerror}") from error
    return held


def check_artifact(folder: Path, digest: str) -> None:
    """Reads every weight file once. Raises CannotServe if the folder is not the artifact that the plan names."""
    try:
        verify_folder(folder, digest)
    except BadArtifact as error:
        mark_damaged(folder)
        raise CannotServe(EXIT_BAD_ARTIFACT, f"will not load {folder}: {error}") from error


def check_artifacts(options: ServeOptions) -> None:
    """Reads every weight file of the model, of its draft and of its adapters. Raises CannotServe if a folder is not the
    artifact that the plan names."""
    check_artifact(options.model_dir, options.digest)
    if options.draft is not None:
        folder, digest = options.draft
        check_artifact(Path(folder), digest)
    for _, folder, digest in options.adapters:
        check_artifact(Path(folder), digest)


def fresh_runtime_folder(node_id: str) -> Path:
    """Returns an empty folder for this node's engine; deletes files of an engine that was killed. It is in the system's
    temporary folder because a socket's path may have at most 107 bytes."""
    folder = Path(tempfile.gettempdir()) / f"switchyard-engine-{os.getuid()}-{node_id}"
    if folder.is_symlink() or (folder.exists() and folder.stat().st_uid != os.getuid()):
        raise CannotServe(1, f"{folder} is in the way: it is not a folder of this user")
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(mode=stat.S_IRWXU)
    return folder


def run_vllm(argv: Sequence[str], shutdown_hook: Callable[[], None]) -> None:
    """Runs vLLM's server until it exits; `shutdown_hook` runs first if it is forced to. Raises CannotServe if vLLM is
    not installed in this Python."""
    try:
        serve_api = one_process_server(shutdown_hook)
    except ImportError as error:
        raise _no_vllm(error) from error
    sys.argv = ["vllm", *argv]
    serve_api()


# The option came with vLLM 0.18: https://github.com/vllm-project/vllm/pull/34730.
OWN_SERVER = Server(
    ("--shutdown-timeout", str(SHUTDOWN_TIMEOUT_S), "--middleware", CONTINUATIONS, "--middleware", USAGE_LEDGER),
    run_vllm,
    CLASS_SCHEDULER,
    EXTENSION,
    tells_cache=True,
    one_worker=False,
)


def _no_vllm(error: ImportError) -> CannotServe:
    reason = f"{sys.executable} has no working vLLM ({error}); install the engine's environment"
    return CannotServe(EXIT_NO_VLLM, reason)


def main(argv: Sequence[str], server: Server | None = None) -> int:
    server = server or OWN_SERVER
    options = replace(parse(argv), one_worker=server.one_worker)
    try:
        if options.followers > 0:
            _check_membership(options.role)
        _check_packages(options)
        check_shared_memory(options, SHARED_MEMORY)
        if options.kv_store is not None:
            own_store(options.kv_store)
            os.umask(0o077)  # the folder may be deleted meanwhile, and vLLM makes it again
        if options.role is MemberRole.FOLLOWER:
            return _follow(options)
        with reserve_port(LOOPBACK, options.port):
            check_artifacts(options)
            return _serve(options, server)
    except CannotServe as error:
        print(f"node {options.node_id}: {error}", file=sys.stderr)
        return error.exit_status


def _check_packages(options: ServeOptions) -> None:
    """Fails before vLLM's imports instead of after them."""
    if options.kv_port and find_spec(kv_transfer.PACKAGE) is None:
        missing = f"{kv_transfer.PACKAGE}, {kv_transfer.USE}: {kv_transfer.HOW}"
        raise CannotServe(EXIT_NO_VLLM, f"{sys.executable} has no {missing}")
    if options.kv_store is not None and not _has_module(kv_transfer.STORE_NEEDS):
        reason = f"{installed_vllm() or sys.executable} has no store of KV blocks in files: leave kv_store_size out"
        raise CannotServe(EXIT_NO_VLLM, reason)


def _has_module(name: str) -> bool:
    """Without importing vLLM, which takes seconds."""
    package, _, rest = name.partition(".")
    found = find_spec(package)
    folders = found.submodule_search_locations if found is not None else None
    return any(Path(folder, *rest.split(".")).is_dir() for folder in folders or ())


def check_shared_memory(options: ServeOptions, folder: Path) -> None:
    """Raises CannotServe if the queues of this node's workers, and the memory before a store of KV blocks, would not
    find room. vLLM would fail after a minute, with the traceback of one worker."""
    parts = dict[str, int]()
    if options.workers > 1:
        queues = CALLS_MIB + REPLIES_MIB * options.workers if options.followers == 0 else 0
        parts[f"the queues of {options.workers} workers need"] = GROUP_MIB + queues
    if options.kv_store is not None:
        parts["kv_offloading_size needs"] = int(options.kv_store_gib[1] * 1024)
    needed_mib, found = sum(parts.values()), os.statvfs(folder)
    free_mib = found.f_bavail * found.f_frsize >> 20
    if free_mib < needed_mib:
        stated = " and ".join(f"{what} {mib} MiB" for what, mib in parts.items())
        raise CannotServe(
            EXIT_LITTLE_SHARED_MEMORY,
            f"{folder} has {free_mib} MiB free, and {stated}; "
            f"in a container, start it with --shm-size={needed_mib}m or more",
        )


def own_store(folder: Path) -> None:
    """Closes the folder for KV blocks to other users. Raises CannotServe if it is another user's: its owner could read
    prompts and change answers."""
    try:
        folder.mkdir(mode=stat.S_IRWXU, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            raise CannotServe(1, f"{folder}, for KV blocks, is a folder of another user; remove it")
        folder.chmod(stat.S_IRWXU)
    except OSError as error:
        raise CannotServe(1, f"cannot use {folder} for KV blocks: {error.strerror}") from error


def _check_membership(role: MemberRole) -> None:
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
        """Writes the reason of the cell's end as the last line of the log; deletes all files."""
        if os.getpid() == server_pid and runtime.exists():
            reason = read_end_reason(ended_file)
            shutil.rmtree(runtime, ignore_errors=True)
            if reason:
                print(f"node {options.node_id}: {reason}", file=sys.stderr, flush=True)

    cache_options = cache_argv(options, server, runtime)
    if cache_options:
        os.environ[FOLDER_VARIABLE] = str(runtime)
    own = (*server.argv, *scheduler_argv(options, server), *speculation_argv(options, server), *cache_options)
    try:
        server.run(vllm_argv(options, own), tidy_up)
    except Exception:
        if not read_end_reason(ended_file):
            raise
        traceback.print_exc()
    finally:
        failed = read_end_reason(ended_file) != ""
        tidy_up()
    return EXIT_CELL_ENDED if failed else 0


def _follow(options: ServeOptions) -> NoReturn:
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
    tempfile.tempdir = None  # computed before TMPDIR changed
    return runtime


def interface_of(address: str) -> str | None:
    """Returns the name of the interface whose first address this is; None if there is none. IPv4 only, as for gloo and
    NCCL."""
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
