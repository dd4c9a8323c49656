"""Machines as processes of this computer: a node is an agent and all that it starts, marked with the node's id.

Agents are started the way a cloud boots a machine, in sessions of their own, so that they outlive whoever asked for
them. What must be known to start one again lies in its folder.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil

from engine_agent.protocol.ports import PORTS_PER_NODE
from engine_agent.protocol.states import AgentKind
from fleet.planning.snapshot import ProviderStatus
from fleet.providers.base import LaunchSpec, ProviderError

NODE_VARIABLE = "SWITCHYARD_NODE_ID"
HOME_VARIABLE = "SWITCHYARD_HOME"
BOOT_FILE = "boot.json"
ENDED_KEPT = 50
"""Ended machines whose logs stay."""
MAX_BLOCKS = 500
TERM_GRACE_S = 3.0
STOP_ROUNDS = 2
"""A dying agent may have started something between the first look and its end."""
SPAWN_LIMIT_S = 10.0
_DETACH = "import os, sys; os.setsid(); os.fork() and os._exit(0); os.execv(sys.argv[1], sys.argv[1:])"
RACK_SIZE, RACKS_PER_ROW, HALLS = 4, 2, 2
"""Machines under one lowest network node, and so upwards: small enough that a demo fleet has near and far ones."""
PASSED_ON = (
    "PATH", "LANG", "HOME", "SWITCHYARD_CACHE", "SWITCHYARD_LOG_FORMAT", "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG", "OTEL_SDK_DISABLED",
)  # fmt: skip
"""Of our own environment. Not the name of our service: agents, proxies and ingresses have their own."""


class Boot(msgspec.Struct, frozen=True):
    """How a machine's agent was started. Kept beside the agent so that it can be started again."""

    id: str
    argv: list[str]


class LocalProvider:
    """The embedded default: no cloud, but real processes."""

    name = "local"

    def __init__(self, *, home: Path, checkout: Path, server_url: str, first_port: int) -> None:
        self.home = home
        self.checkout = checkout
        self.server_url = server_url
        self.first_port = first_port

    def free_ports(self, taken: Sequence[int]) -> int:
        for block in range(MAX_BLOCKS):
            base = self.first_port + block * PORTS_PER_NODE
            if base not in taken and _all_free(base):
                return base
        raise ProviderError(
            f"no free block of {PORTS_PER_NODE} ports from {self.first_port} upwards; set SWITCHYARD_NODE_PORTS"
        )

    def topology(self, region: str, position: int) -> tuple[str, ...]:
        """Racks of `RACK_SIZE` in turn below two widest network nodes, two racks a row, as halls fill up."""
        rack, hall = divmod(position // RACK_SIZE, HALLS)
        widest = f"{region}-nn{hall}"
        return (widest, f"{widest}-{rack // RACKS_PER_ROW}", f"{widest}-{rack // RACKS_PER_ROW}-{rack % RACKS_PER_ROW}")

    def launch(self, spec: LaunchSpec) -> None:
        home = self._folder(spec.id)
        boot = Boot(id=spec.id, argv=self._argv(spec, home))
        try:
            home.mkdir(parents=True, exist_ok=True, mode=0o700)
            (home / BOOT_FILE).write_bytes(msgspec.json.encode(boot))
        except OSError as error:
            raise ProviderError(f"cannot make the folder of {spec.id}: {error}") from error
        self._spawn(boot, home, {"SWITCHYARD_JOIN_TOKEN": spec.join_token})

    def restart_agent(self, node_id: str) -> None:
        home = self._folder(node_id)
        try:
            boot = msgspec.json.decode((home / BOOT_FILE).read_bytes(), type=Boot)
        except (OSError, msgspec.DecodeError) as error:
            raise ProviderError(f"cannot start the agent of {node_id} again: {error}") from error
        self._spawn(Boot(id=boot.id, argv=self._moved(boot.argv)), home, {})

    def describe(self, node_ids: Sequence[str]) -> dict[str, ProviderStatus]:
        processes = _processes_by_node(self.home)
        return {node_id: _status(processes.get(node_id, [])) for node_id in node_ids}

    def terminate(self, node_id: str) -> None:
        for _ in range(STOP_ROUNDS):
            stop_processes(_processes_by_node(self.home).get(node_id, []))
        self._keep_logs_only(self._folder(node_id))

    def terminate_all(self) -> int:
        """End every machine of this home. Returns how many processes that were."""
        stopped = 0
        for _ in range(STOP_ROUNDS):
            processes = [process for group in _processes_by_node(self.home).values() for process in group]
            stop_processes(processes)
            stopped += len(processes)
        return stopped

    def _keep_logs_only(self, folder: Path) -> None:
        """A machine that is gone can never start again, but why it went can still be read; the oldest logs go."""
        for path in folder.glob("*"):
            if path.suffix != ".log":
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        ended = [other for other in folder.parent.glob("*") if not (other / BOOT_FILE).exists()]
        ended.sort(key=lambda other: other.stat().st_mtime, reverse=True)
        for old in ended[ENDED_KEPT:]:
            shutil.rmtree(old, ignore_errors=True)

    def _folder(self, node_id: str) -> Path:
        return self.home / ("ingresses" if node_id.startswith("i-") else "nodes") / node_id

    def _argv(self, spec: LaunchSpec, home: Path) -> list[str]:
        common = ["--home", str(home), "--server", self.server_url, "--region", spec.region, "--host", spec.address]
        if spec.kind is AgentKind.INGRESS:
            own = ["ingress", "--ingress-id", spec.id, "--port", str(spec.port)]
        else:
            own = ["node", "--node-id", spec.id, "--port-base", str(spec.port), "--instance-type", spec.instance_type]
            own += ["--topology", ",".join(spec.topology)]
        return [sys.executable, "-m", "engine_agent", *own, *common]

    def _moved(self, argv: list[str]) -> list[str]:
        """The same command for today's server: its port may have been changed since the machine was launched."""
        server = argv.index("--server") + 1
        return [*argv[:server], self.server_url, *argv[server + 1 :]]

    def _spawn(self, boot: Boot, home: Path, secrets: dict[str, str]) -> None:
        kept = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        environment = {
            **kept,
            **secrets,
            NODE_VARIABLE: boot.id,
            HOME_VARIABLE: str(self.home),
            "PYTHONPATH": str(self.checkout),
            "PYTHONUNBUFFERED": "1",
        }
        try:
            _spawn_detached(boot.argv, environment, home / "agent.log")
        except (OSError, subprocess.SubprocessError) as error:
            raise ProviderError(f"the agent of {boot.id} did not start: {error}") from error


def _spawn_detached(argv: list[str], environment: dict[str, str], log: Path) -> None:
    """Start a program in a session of its own and as nobody's child, its output appended to `log`.

    A machine must not hang on the worker that booted it, neither by its session nor by its place in the process tree.
    """
    with log.open("ab") as output:
        subprocess.run(
            [sys.executable, "-I", "-S", "-c", _DETACH, *argv],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=SPAWN_LIMIT_S,
            check=True,
        )


def _all_free(base: int) -> bool:
    for port in range(base, base + PORTS_PER_NODE):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                return False
    return True


def _processes_by_node(home: Path) -> dict[str, list[psutil.Process]]:
    """Live processes of this home's machines, by node id, as their environment says."""
    found: dict[str, list[psutil.Process]] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            environment: dict[str, Any] = process.environ()
            node_id = environment.get(NODE_VARIABLE)
            if node_id and environment.get(HOME_VARIABLE) == str(home):
                found.setdefault(node_id, []).append(process)
    return found


def _status(processes: list[psutil.Process]) -> ProviderStatus:
    """A machine is there while its agent or its engine is: a cell proxy alone serves nobody."""
    commands = [_command(process) for process in processes]
    if any("engine_agent" in command for command in commands):
        return ProviderStatus.RUNNING
    bystanders = ("engine_agent.proxy", "multiprocessing.resource_tracker")
    engines = [command for command in commands if not any(name in " ".join(command) for name in bystanders)]
    return ProviderStatus.AGENT_DEAD if any(engines) else ProviderStatus.GONE


def _command(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


def stop_processes(processes: list[psutil.Process]) -> None:
    """SIGTERM, a short grace, SIGKILL. Returns when they are gone."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(signal.SIGTERM)
    _, alive = psutil.wait_procs(processes, timeout=TERM_GRACE_S)
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.kill()
    deadline = time.monotonic() + TERM_GRACE_S
    psutil.wait_procs(alive, timeout=max(0.0, deadline - time.monotonic()))
