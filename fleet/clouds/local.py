"""The `local` provider: machines as processes on this computer. The folder of a machine has what a restart needs, its
ports and its place in a simulated network.

With `SWITCHYARD_LOCAL_LAYOUT`, each region has one machine instead, an equal part of this computer: a row as of joined
hosts, whose slots are its nodes."""

import fcntl
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import psutil
from django.conf import settings

from engine_agent.protocol.machine_messages import MachineFacts, release_in
from engine_agent.protocol.ports import (
    MAX_BLOCKS,
    PORTS_PER_NODE,
    PortUse,
    demo_ingresses,
    fixed_ports,
    ingress_ports,
    node_blocks,
    node_ports,
    overlap,
)
from engine_agent.protocol.states import AgentKind
from fleet.agents.selectors import trust_now
from fleet.clouds.base import LaunchSpec, Machine, NoCapacity, ProviderError
from fleet.clouds.local_processes import (
    CODE_VARIABLE,
    HOME_VARIABLE,
    NODE_VARIABLE,
    agent_of,
    code_of,
    kill_agent,
    machine_status,
    processes_by_node,
    spawn_detached,
    stop_processes,
)
from fleet.clouds.machines import host_assign
from fleet.machines.layouts import InvalidLayout
from fleet.machines.models import MachineSlot
from fleet.machines.selectors import hosts_running
from fleet.machines.services.layouts import computer_divide, slot_wiped
from fleet.placement.planning.distance import free_position
from fleet.reconcile.planning.snapshot import ProviderStatus
from fleet.regions.models import Region
from kernel import clock

ADDRESS = "127.0.0.1"
BOOT_FILE = "boot.json"
LOCK_FILE = "launch.lock"
"""Locked while ports and a place are chosen, so that two workers choose different ones."""
MOVED_FILE = "moved"
"""Touched before an agent is killed to be started from another release."""
MOVED_WITHIN_S = 15.0
"""Time until the next agent must run. A machine that is gone for good is detected this late."""
ENDED_KEPT = 50
"""Terminated machines whose logs are kept."""
STOP_ROUNDS = 2
"""An exiting agent may have started a process after the first scan."""
RACK_SIZE, RACKS_PER_ROW, HALLS = 4, 2, 2
"""Machines per rack and so on: small enough that a demo fleet has near and far machines."""
PASSED_ON = (
    "PATH", "LANG", "HOME", "SWITCHYARD_CACHE", "SWITCHYARD_LOG_FORMAT", "OTEL_EXPORTER_OTLP_ENDPOINT",
    "SWITCHYARD_SERVICE_UIDS", "SWITCHYARD_PLAIN_LINKS", "SWITCHYARD_ARTIFACT_CACHE_GIB", "AWS_REGION",
    "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL_STS", "AWS_CA_BUNDLE",
    "AWS_PROFILE",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG", "OTEL_SDK_DISABLED",
)  # fmt: skip
"""Environment variables that are passed on. Without the service name: agents, proxies and ingresses have their own."""


class Boot(msgspec.Struct, frozen=True):
    """How a machine's agent was started; kept in its folder for restarts. `release` "": the checkout."""

    id: str
    argv: list[str]
    release: str = ""

    def option(self, name: str) -> str:
        """Returns the value of a command-line option, or ""."""
        return self.argv[self.argv.index(name) + 1] if name in self.argv else ""

    @property
    def topology(self) -> tuple[str, ...]:
        return tuple(self.option("--topology").split(",")) if self.option("--topology") else ()

    @property
    def machine(self) -> Machine:
        return Machine(self.option("--host"), int(self.option("--port-base") or self.option("--port")), self.topology)


class LocalProvider:
    """The default provider: no cloud, but real processes."""

    name = "local"

    def __init__(
        self,
        *,
        home: Path,
        checkout: Path,
        server_url: str,
        first_port: int,
        reserved: Collection[int] = (),
        layout: str = "",
    ) -> None:
        """`first_port`: of nodes; `reserved`: ports that nodes may not use. `layout`: how the part of this computer in
        each region is divided into nodes, until the fleet or an operator changes it; empty: every node uses all CPUs.
        """
        self.home = home
        self.reserved = frozenset(reserved)
        self.checkout = checkout
        self.server_url = server_url
        self.first_port = first_port
        self.layout = layout

    @classmethod
    def from_settings(cls) -> "LocalProvider":
        return cls(
            home=settings.SWITCHYARD_HOME,
            checkout=settings.BASE_DIR,
            server_url=settings.SWITCHYARD_AGENT_URL,
            first_port=settings.SWITCHYARD_NODE_PORTS,
            layout=settings.SWITCHYARD_LOCAL_LAYOUT,
            reserved=[
                use.port
                for use in fixed_ports(
                    dashboard=settings.SWITCHYARD_PORT,
                    agents=settings.SWITCHYARD_AGENT_PORT,
                    ingresses=demo_ingresses(settings.SWITCHYARD_INGRESS_PORT, settings.SWITCHYARD_INGRESSES),
                )
            ],
        )

    def launch(self, specs: Sequence[LaunchSpec]) -> tuple[Machine, ...]:
        machines: list[Machine] = []
        for spec in specs:
            beside = (machines[0].topology if machines else None) or ()
            machines.append(self._launch(replace(spec, near=spec.near or beside)))
        return tuple(machines)

    def _launch(self, spec: LaunchSpec) -> Machine:
        known = self._boot_of(spec.id)
        if known and self.describe([spec.id])[spec.id] is not ProviderStatus.GONE:
            return known.machine
        slot = self._slot_of(spec) if self.layout and spec.kind is AgentKind.NODE else None
        try:
            with self._placement_lock():
                is_other = slot is not None and known is not None and known.option("--owns") != _owned(slot)
                if known is None or spec.port is not None or is_other:  # a fixed port may have changed
                    known = Boot(spec.id, self._agent_argv(spec, slot), spec.release)
                    self._write_boot(known)
                self._write_bundle(spec.id, spec.bundle)
            self._spawn_agent(known, {"SWITCHYARD_JOIN_TOKEN": spec.join_token})
        except ProviderError:
            if slot is not None:
                slot_wiped(slot, now=clock.now())
            raise
        return known.machine

    def restart_agent(self, node_id: str) -> None:
        boot = self._boot_of(node_id)
        if boot is None:
            raise ProviderError(f"cannot start the agent of {node_id} again: its folder has no {BOOT_FILE}")
        if not self._bundle_file(node_id).exists() and (trust := trust_now()):
            self._write_bundle(node_id, trust.bundle)  # a home that is older than the authority
        self._spawn_agent(Boot(boot.id, self._with_current_server(boot.argv), boot.release), {})

    def reboot(self, node_id: str) -> None:
        """Kills all processes of a machine and starts its agent again, as after a loss of power."""
        if self._boot_of(node_id) is None:
            raise ProviderError(f"cannot reboot {node_id}: its folder has no {BOOT_FILE}")
        for _ in range(STOP_ROUNDS):
            stop_processes(processes_by_node(self.home).get(node_id, []))
        self.restart_agent(node_id)

    def move_agents(self, releases: Mapping[str, str]) -> dict[str, str]:
        """Kills each agent and starts it from the folder of its release. The order is written first, so that after a
        crash in between, the next start uses the right release."""
        processes = processes_by_node(self.home)
        troubles = {}
        for name, release in releases.items():
            try:
                self._move_agent(name, release, agent_of(processes.get(name, [])))
            except (ProviderError, OSError) as error:
                troubles[name] = str(error)
        return troubles

    def _move_agent(self, name: str, release: str, agent: psutil.Process | None) -> None:
        boot = self._boot_of(name)
        if boot is None:
            raise ProviderError(f"{name} was not launched here: its folder has no {BOOT_FILE}")
        code = self._release_folder(release)
        if release_in(code) is None:
            raise ProviderError(f"release {release} is not on this host: {code} is missing")
        is_new = boot.release != release
        if is_new:
            boot = Boot(boot.id, self._with_current_server(boot.argv), release)
            self._write_boot(boot)
        if agent is not None and code_of(agent) != str(code):
            (self._machine_folder(name) / MOVED_FILE).touch()
            kill_agent(agent)
            is_new = True
        if is_new:  # an agent that exits is restarted like any other
            self._spawn_agent(boot, {})

    def describe(self, node_ids: Sequence[str]) -> dict[str, ProviderStatus]:
        processes = processes_by_node(self.home)
        found = {node_id: machine_status(processes.get(node_id, [])) for node_id in node_ids}
        # A spare runs only its agent: between two agents it counts as booting.
        moving = {name for name, status in found.items() if status is ProviderStatus.GONE and self._is_moving(name)}
        return {**found, **dict.fromkeys(moving, ProviderStatus.RUNNING)}

    def terminate(self, node_id: str) -> None:
        for _ in range(STOP_ROUNDS):
            stop_processes(processes_by_node(self.home).get(node_id, []))
        boot = self._boot_of(node_id)
        if self.layout or (boot is not None and boot.option("--owns")):
            host = hosts_running([node_id]).get(node_id)
            if host is not None and host.slot is not None:
                slot_wiped(host.slot, now=clock.now())
        self._keep_logs_only(self._machine_folder(node_id))

    def describe_all(self) -> dict[str, ProviderStatus]:
        found = {
            node: machine_status(processes)
            for node, processes in processes_by_node(self.home).items()
            if node.startswith("n-")
        }
        return {node: status for node, status in found.items() if status is not ProviderStatus.GONE}

    def terminate_all(self) -> int:
        stopped = 0
        for _ in range(STOP_ROUNDS):
            processes = [process for group in processes_by_node(self.home).values() for process in group]
            stop_processes(processes)
            stopped += len(processes)
        return stopped

    # --- ports and places -------------------------------------------------------------------------------------------

    def _free_ports(self) -> int:
        """First port of a block that no machine of this home uses and no process listens on."""
        taken = {use.port for boot in self._node_boots() for use in node_ports(boot.id, boot.machine.port_base or 0)}
        taken |= {
            port for boot in self._ingress_boots() for port in ingress_ports(boot.machine.port_base or 0).values()
        }
        for base in node_blocks(self.first_port, taken | self.reserved, MAX_BLOCKS):
            if _all_free(base):
                return base
        raise NoCapacity(
            f"no free block of {PORTS_PER_NODE} ports from {self.first_port} upwards; set SWITCHYARD_NODE_PORTS"
        )

    def _slot_of(self, spec: LaunchSpec) -> MachineSlot | None:
        """The slot of a node; None if the node was launched before there was a layout."""
        facts = self._part_of(spec.region)
        try:
            computer_divide(
                region=spec.region,
                layout=self.layout,
                instance_type=spec.instance_type,
                facts=facts,
                now=clock.now(),
            )
        except InvalidLayout as error:
            raise ProviderError(f"SWITCHYARD_LOCAL_LAYOUT: {error}") from None
        return host_assign(spec).slot

    def _part_of(self, region: str) -> MachineFacts:
        """An equal part of this computer for each region of this provider."""
        regions = list(Region.objects.filter(provider=self.name).values_list("name", flat=True))
        at, cpus = regions.index(region), sorted(os.sched_getaffinity(0))
        first = at * len(cpus) // len(regions)
        own = cpus[first : max((at + 1) * len(cpus) // len(regions), first + 1)]
        return MachineFacts(
            address=ADDRESS,
            port_base=self.first_port,
            cores=len(own),
            memory_bytes=psutil.virtual_memory().total // len(regions),
            disk_free_bytes=shutil.disk_usage(self.home).free,
            cpus=(tuple(own),),
        )

    def _free_place(self, region: str, near: tuple[str, ...]) -> tuple[str, ...]:
        """The free place in a region nearest to `near`, as the network nodes above it."""
        taken = (boot.topology for boot in self._node_boots() if boot.option("--region") == region)
        return place(region, free_position(lambda position: place(region, position), taken, near))

    def _node_boots(self) -> Iterator[Boot]:
        return self._booted_in("nodes")

    def _ingress_boots(self) -> Iterator[Boot]:
        return self._booted_in("ingresses")

    def _booted_in(self, folder: str) -> Iterator[Boot]:
        for path in (self.home / folder).glob(f"*/{BOOT_FILE}"):
            if boot := self._boot_of(path.parent.name):
                yield boot

    @contextmanager
    def _placement_lock(self) -> Iterator[None]:
        try:
            self.home.mkdir(parents=True, exist_ok=True)
            with (self.home / LOCK_FILE).open("wb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield
        except OSError as error:
            raise ProviderError(f"cannot make a machine's folder: {error}") from error

    def _is_moving(self, name: str) -> bool:
        try:
            return 0 <= time.time() - (self._machine_folder(name) / MOVED_FILE).stat().st_mtime < MOVED_WITHIN_S
        except OSError:
            return False

    def _release_folder(self, release: str) -> Path:
        """The folder of an agent's release; the checkout if the release is not on this host."""
        folder = self.home / "releases" / release
        return folder if release else self.checkout

    # --- folders and agents -----------------------------------------------------------------------------------------

    def _boot_of(self, node_id: str) -> Boot | None:
        try:
            return msgspec.json.decode((self._machine_folder(node_id) / BOOT_FILE).read_bytes(), type=Boot)
        except (OSError, msgspec.DecodeError):
            return None

    def _write_boot(self, boot: Boot) -> None:
        folder = self._machine_folder(boot.id)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        (folder / BOOT_FILE).write_bytes(msgspec.json.encode(boot))

    def _bundle_file(self, node_id: str) -> Path:
        """Where the agent reads the authorities that it trusts (engine_agent.node.identity)."""
        return self._machine_folder(node_id) / "tls" / "ca.pem"

    def _write_bundle(self, node_id: str, bundle: str) -> None:
        path = self._bundle_file(node_id)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.write_text(bundle, encoding="ascii")

    def _keep_logs_only(self, folder: Path) -> None:
        """A terminated machine cannot restart, but its logs stay readable; the oldest are deleted."""
        for path in folder.glob("*"):
            if path.suffix != ".log":
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        ended = [other for other in folder.parent.glob("*") if not (other / BOOT_FILE).exists()]
        ended.sort(key=lambda other: other.stat().st_mtime, reverse=True)
        for old in ended[ENDED_KEPT:]:
            shutil.rmtree(old, ignore_errors=True)

    def _machine_folder(self, node_id: str) -> Path:
        return self.home / ("ingresses" if node_id.startswith("i-") else "nodes") / node_id

    def _agent_argv(self, spec: LaunchSpec, slot: MachineSlot | None) -> list[str]:
        if spec.kind is AgentKind.INGRESS:
            self._require_own_ports(spec)
            own = ["ingress", "--ingress-id", spec.id, "--port", str(spec.port)]
        else:
            ports = self._free_ports() if spec.port is None else spec.port
            own = ["node", "--node-id", spec.id, "--port-base", str(ports), "--instance-type", spec.instance_type]
            place = (slot.machine_id,) if slot else self._free_place(spec.region, spec.near)
            own += ["--topology", ",".join(place)]
            own += ["--owns", _owned(slot)] if slot else []
        folder, address = str(self._machine_folder(spec.id)), spec.address or ADDRESS
        common = ["--home", folder, "--server", self.server_url, "--region", spec.region, "--host", address]
        return [sys.executable, "-m", "engine_agent", *own, *common]

    def _require_own_ports(self, spec: LaunchSpec) -> None:
        """A node that was launched before the ingress keeps its block."""
        wanted = [PortUse(port, f"{what} of {spec.id}") for what, port in ingress_ports(spec.port or 0).items()]
        for boot in self._node_boots():
            if sentence := overlap([*wanted, *node_ports(boot.id, boot.machine.port_base or 0)]):
                raise ProviderError(sentence)

    def _with_current_server(self, argv: list[str]) -> list[str]:
        """The same command with the current server URL: its port may have changed since the launch."""
        server = argv.index("--server") + 1
        return [*argv[:server], self.server_url, *argv[server + 1 :]]

    def _spawn_agent(self, boot: Boot, secrets: dict[str, str]) -> None:
        kept = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        environment = {
            "SWITCHYARD_CACHE": str(self.checkout / ".cache"),
            **kept,
            **secrets,
            NODE_VARIABLE: boot.id,
            HOME_VARIABLE: str(self.home),
            CODE_VARIABLE: str(self._release_folder(boot.release)),
            "PYTHONUNBUFFERED": "1",
        }
        try:
            spawn_detached(boot.argv, environment, self._machine_folder(boot.id) / "agent.log")
        except (OSError, subprocess.SubprocessError) as error:
            raise ProviderError(f"the agent of {boot.id} did not start: {error}") from error


def _owned(slot: MachineSlot) -> str:
    return msgspec.json.encode(slot.resources()).decode()


def place(region: str, position: int) -> tuple[str, ...]:
    """Returns the network nodes above the place with this number in a region, widest first. Places are filled from 0:
    racks of `RACK_SIZE` alternate between the two widest network nodes, two racks a row."""
    rack, hall = divmod(position // RACK_SIZE, HALLS)
    widest = f"{region}-nn{hall}"
    return (widest, f"{widest}-{rack // RACKS_PER_ROW}", f"{widest}-{rack // RACKS_PER_ROW}-{rack % RACKS_PER_ROW}")


def _all_free(base: int) -> bool:
    for port in range(base, base + PORTS_PER_NODE):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                return False
    return True
