"""Checks before the start: free ports and disk space. Changes nothing."""

import contextlib
import json
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from controlplane.embedded.configuration import CHECKOUT, CannotStart, Configuration, Engine
from controlplane.embedded.console import Console
from controlplane.embedded.process_ownership import belongs, describe
from controlplane.embedded.processes import Program, require_oneshot
from controlplane.embedded.state_directory import StateDirectory
from engine_agent.protocol.ports import (
    INGRESS_CLAIM,
    PORTS_PER_NODE,
    PortUse,
    fixed_ports,
    node_blocks,
    node_ports,
    overlap,
)

HOST = "127.0.0.1"

GIB = 1024**3
HOME_BYTES = 1 * GIB
"""Database, journals and logs of a demo fleet, with room to grow."""
ENGINE_BYTES = {Engine.VLLM: 6 * GIB, Engine.LLAMA_CPP: 1 * GIB, Engine.TRITON: 1 * GIB}
"""The engine's environment (vLLM 2.4 GB, Triton 0.3 GB, llama.cpp 0.1 GB), its downloads while it installs, and the
weights."""


def wanted_ports(configuration: Configuration) -> list[PortUse]:
    public = {configuration.port, configuration.agent_port, *configuration.ingress_ports.values()}
    return [use for use in _fixed_ports(configuration) if use.port in public]


def require_distinct_ports(configuration: Configuration) -> None:
    """Raises CannotStart if a port has two users, of which nodes that this home has from an earlier start may be one,
    or there is none left for nodes."""
    fixed = _fixed_ports(configuration)
    nodes = [use for name, base in _placed_nodes(configuration.home) for use in node_ports(name, base)]
    if sentence := overlap([*fixed, *nodes]):
        raise CannotStart(sentence)
    if not any(True for _ in node_blocks(configuration.node_ports, [use.port for use in fixed])):
        raise CannotStart(
            f"SWITCHYARD_NODE_PORTS {configuration.node_ports} leaves no block of {PORTS_PER_NODE} ports for a node:"
            " set it to a lower port."
        )


def _fixed_ports(configuration: Configuration) -> list[PortUse]:
    return fixed_ports(
        dashboard=configuration.port, agents=configuration.agent_port, ingresses=configuration.ingress_ports
    )


def _placed_nodes(home: Path) -> Iterator[tuple[str, int]]:
    """Nodes that were launched from this home and not terminated, with their first ports: they keep them."""
    for boot in sorted((home / "nodes").glob("*/boot.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, IndexError, TypeError):
            argv = json.loads(boot.read_bytes())["argv"]
            yield boot.parent.name, int(argv[argv.index("--port-base") + 1])


def require_free_port(wanted: PortUse, home: Path) -> None:
    """Accept a port that is free, or held only by processes of this home, which we adopt or replace. Raises CannotStart
    if another process listens there or is about to, or we may not."""
    holders = _holders(wanted.port)
    stranger = next((holder for holder in holders if not belongs(holder, home)), None)
    if stranger is None and (holders or _can_be_bound(wanted)):
        return
    by = f" by process {describe(stranger)}" if stranger else ""
    raise CannotStart(
        f"Port {wanted.port} for {wanted.purpose} is taken{by}: free it, or set {wanted.variable} to another port."
    )


def _can_be_bound(wanted: PortUse) -> bool:
    problem = bind_problem(HOST, wanted.port)
    if isinstance(problem, PermissionError):
        raise CannotStart(
            f"Port {wanted.port} for {wanted.purpose} is reserved for root: set {wanted.variable} to one above 1023."
        )
    return problem is None


def bind_problem(address: str, port: int) -> OSError | None:
    """Why nothing could listen at that address of this host, or None. Sockets of the last minute do not count."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address, port))
    except OSError as problem:
        return problem
    return None


def _holders(port: int) -> list[psutil.Process]:
    """Processes that listen on a port or claim it for an ingress. HAProxy shares ports, so there may be several."""
    claim = INGRESS_CLAIM.format(host=HOST, port=port).replace("\0", "@")
    pids: set[int] = set()
    with contextlib.suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            address = connection.laddr
            listens = connection.status == psutil.CONN_LISTEN and address and address.port == port
            pids |= {connection.pid} if listens and connection.pid else set()
        pids |= {each.pid for each in psutil.net_connections("unix") if str(each.laddr) == claim and each.pid}
    return [process for pid in sorted(pids) if (process := _process(pid))]


def _process(pid: int) -> psutil.Process | None:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid)
    return None


def require_disk_space(configuration: Configuration) -> float:
    """The room left where the home lies, in GiB. Raises CannotStart if there is too little for the home, or for the
    engine that is still to be installed."""
    needs = [(configuration.home, HOME_BYTES, "SWITCHYARD_HOME")]
    if configuration.engine in ENGINE_BYTES and not is_installed(configuration.engine, configuration.cache):
        needs.append((configuration.cache, ENGINE_BYTES[configuration.engine], "SWITCHYARD_CACHE"))
    for folder, needed_bytes, variable in needs:
        free_bytes = _free_bytes(folder)
        if free_bytes < needed_bytes:
            raise CannotStart(
                f"{folder} has {free_bytes / GIB:.1f} GiB free and {needed_bytes / GIB:.0f} GiB are needed: "
                f"make room, or set {variable} to a folder on a larger disk."
            )
    return _free_bytes(configuration.home) / GIB


def _free_bytes(folder: Path) -> int:
    existing = next(each for each in (folder, *folder.parents) if each.exists())
    return shutil.disk_usage(existing).free


_INSTALL_WITHIN_S = 3600.0
"""An hour: 2.4 GB over a slow line."""
_BUILD_WITHIN_S = 900.0
_FOR_TWO_RANKS = ("--ranks", "2")
"""The demo serves smollm2 from cells of two nodes, and its 9 heads do not divide by 2."""


@dataclass(frozen=True, slots=True)
class Weights:
    uri: str
    digest: str


ENVIRONMENTS = {Engine.VLLM: "vllm-cpu", Engine.LLAMA_CPP: "llama-cpp", Engine.TRITON: "triton"}
"""The folder of each engine's environment in `<cache>/engines`."""
TITLES = {Engine.VLLM: "vLLM", Engine.LLAMA_CPP: "llama.cpp", Engine.TRITON: "Triton"}


def is_installed(engine: Engine, cache: Path) -> bool:
    """Whether there is an environment at all; its installer judges whether it is whole and current."""
    return (cache / "engines" / ENVIRONMENTS[engine] / "installed").exists()


READABLE = 0o022
"""Of an engine's environment and weights: engines run under another account."""


async def install_engine(
    engine: Engine, cache: Path, inherited: Mapping[str, str], home: StateDirectory, console: Console
) -> Weights:
    """Install the environment and build the weights; a second time both are there already. Raises CannotStart if this
    machine cannot have the engine, or the weights could not be built."""
    own, more = Path(sys.executable), _FOR_TWO_RANKS if engine is Engine.VLLM else ()
    builder, others, package = own, "ENGINE=sim", engine.replace("-", "_")
    module, weights = f"engine_agent.engines.{package}", "engine_agent.engines.llama_cpp.weights"
    if engine is Engine.VLLM:
        others, weights = "ENGINE=llama-cpp` or `make up ENGINE=sim", f"{module}.weights"
        builder = cache / "engines" / ENVIRONMENTS[engine] / "bin" / "python"
    title = TITLES[engine]
    try:
        with console.step(f"{title}'s environment"):
            install = _program(own, f"{module}.environment", "install", cache, inherited)
            await require_oneshot("engine", install, home, console, deadline_s=_INSTALL_WITHIN_S)
        with console.step("weights of smollm2"):
            build = _program(builder, weights, "build", cache, inherited, more)
            described = await require_oneshot("weights", build, home, console, deadline_s=_BUILD_WITHIN_S)
        return _read_weights(described)
    except CannotStart as error:
        raise CannotStart(
            f"{title} cannot be had on this machine: {error} `make up {others}` does without it."
        ) from error


def _program(
    python: Path, module: str, command: str, cache: Path, inherited: Mapping[str, str], more: tuple[str, ...] = ()
) -> Program:
    return Program(
        arguments=(str(python), "-m", module, command, "--cache", str(cache), *more),
        environment={**inherited, "PYTHONPATH": str(CHECKOUT), "PYTHONUNBUFFERED": "1"},
        folder=CHECKOUT,
        umask=READABLE,
    )


def _read_weights(line: str) -> Weights:
    try:
        described = json.loads(line)
        return Weights(uri=str(described["uri"]), digest=str(described["digest"]))
    except (ValueError, TypeError, KeyError):
        raise CannotStart(f"the weights' builder ended with {line!r} instead of their uri and digest.") from None
