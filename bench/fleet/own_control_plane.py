"""A control plane for benches: PostgreSQL, Valkey, web, controller and worker, with a seeded fleet at rest."""

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import httpx
import msgspec
from cryptography.hazmat.primitives.asymmetric import ec

from bench import ROOT
from bench.fleet.simulated_agents import AgentGroup, Member
from controlplane.embedded import control_plane
from controlplane.embedded.configuration import read_configuration
from controlplane.embedded.supervisor import Service
from controlplane.processes import BY_NAME
from engine_agent.node.identity import key_pem, request_make
from kernel.process_role import ProcessRole
from lab.embedded_servers import EmbeddedServers

UP_WITHIN_S = 120.0
CERTIFICATES_TOGETHER = 1000
LOG_SHOWN = 2000
NO_PROVIDER = "bench"
"""A name that no provider has: none reports a machine as gone, and none launches one."""


@dataclass(frozen=True, slots=True)
class Authorities:
    """What all seeded nodes share, as PEM: their key, the fleet's authorities and its revocation lists."""

    key: str
    bundle: str
    revoked: str


@contextmanager
def database(folder: Path, port: int) -> Iterator[EmbeddedServers]:
    """Start PostgreSQL and Valkey, and set up Django in this process to use them."""
    servers = EmbeddedServers(folder / "servers")
    addresses = servers.start()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # web would compile all of itself at each start; `make` unsets it
    os.environ.update(
        DATABASE_URL=addresses["database_url"],
        REDIS_URL=addresses["redis_url"],
        DJANGO_SETTINGS_MODULE="controlplane.settings",
        SWITCHYARD_HOME=str(folder / "home"),
        SWITCHYARD_PORT=str(port),
        SWITCHYARD_SECRET_KEY=secrets.token_hex(),
    )
    try:
        import django

        django.setup()
        yield servers
    finally:
        from django.db import connections

        connections.close_all()
        servers.stop()


def seed_calm(nodes: int, cells: int, *, with_past: bool = True) -> None:
    """Seed a fleet in which no planner has anything to do."""
    from django.core.management import call_command

    from fleet.cells.models import Cell
    from fleet.faults.models import Incident
    from fleet.nodes.models import Node, NodeReport
    from fleet.regions.models import Region
    from fleet.rollouts.models import Rollout
    from kernel import clock

    call_command("migrate", verbosity=0)
    call_command("seed_scale", cells=cells, nodes=nodes, no_past=not with_past, verbosity=0)
    Region.objects.update(provider=NO_PROVIDER)
    Node.objects.update(state="ready", cordoned=False)
    Cell.objects.update(state="ready", reason="")
    Incident.objects.all().delete()
    Rollout.objects.all().delete()
    NodeReport.objects.update(last_seen_at=clock.now())


def seed(nodes: int, cells: int, *, with_past: bool = True) -> tuple[list[Member], Authorities]:
    """Seed a calm fleet of nodes that have enrolled: each has a credential and a certificate, so its first connection
    is one of many."""
    from django.db import connection

    from fleet.agents.services.authority import authority_ensure
    from fleet.cells.models import CellMember
    from fleet.nodes.models import AgentCredential, Node
    from kernel import clock
    from kernel.secrets import secret_issue

    seed_calm(nodes, cells, with_past=with_past)
    places = {member.node_id: member for member in CellMember.objects.select_related("cell")}
    nodes_known = list(Node.objects.order_by("id"))
    issued = [secret_issue() for _ in nodes_known]
    AgentCredential.objects.bulk_create(
        AgentCredential(
            prefix=own.prefix,
            digest=own.digest,
            kind="node",
            subject=node.id,
            region=node.region_id,
            created_at=clock.now(),
        )
        for node, own in zip(nodes_known, issued, strict=True)
    )
    key = ec.generate_private_key(ec.SECP256R1())
    chains = _certificates([node.id for node in nodes_known], request_make(key))
    trust = authority_ensure(clock.now())
    with connection.cursor() as cursor:
        cursor.execute("VACUUM ANALYZE")  # as the autovacuum of a fleet would have; these servers run none
    authorities = Authorities(key_pem(key).decode(), trust.bundle, trust.revoked)
    members = [
        _member(node, own.text, chain, places.get(node.id))
        for node, own, chain in zip(nodes_known, issued, chains, strict=True)
    ]
    return members, authorities


def _certificates(nodes: list[str], request: str) -> list[str]:
    """Certificates of these nodes, as web issues them, all for the key of one request."""
    from engine_agent.protocol.identity import IdentityKind
    from fleet.agents.services.authority import CertificateOrder, certificates_issue
    from kernel import clock

    orders = [CertificateOrder(IdentityKind.NODE, node, request) for node in nodes]
    chains: list[str] = []
    for first in range(0, len(orders), CERTIFICATES_TOGETHER):
        for outcome in certificates_issue(orders[first : first + CERTIFICATES_TOGETHER], now=clock.now()):
            if isinstance(outcome, Exception):
                raise outcome
            chains.append(outcome.chain)
    return chains


def _member(node: Any, credential: str, chain: str, place: Any) -> Member:
    if place is None:
        return Member(node.id, credential, chain, node.address)
    return Member(node.id, credential, chain, node.address, place.cell_id, place.cell.generation, place.rank)


class ControlPlane:
    """The processes of the control plane. Web number n listens at `port` + n."""

    def __init__(self, port: int, webs: int, log: Path) -> None:
        self.ports = [port + number for number in range(webs)]
        self._log = log
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def servers(self) -> tuple[str, ...]:
        environments = ({"SWITCHYARD_PORT": str(port)} for port in self.ports)
        return tuple(f"https://127.0.0.1:{read_configuration(own).agent_port}" for own in environments)

    def start(self, *, only_web: bool = False) -> None:
        environment = dict(os.environ)
        configuration = read_configuration(environment)
        others = () if only_web else ("controller", "worker")
        for service in (control_plane.service(name, configuration, environment) for name in others):
            self._run(service.name, service)
        for port in self.ports:
            self.start_web(port)
        for port in self.ports:
            self.wait_for_web(port)

    def start_web(self, port: int) -> None:
        # Each web process is a separate host of the control plane, with its own key.
        home = f"{os.environ['SWITCHYARD_HOME']}-{port}"
        environment = {**os.environ, "SWITCHYARD_PORT": str(port), "SWITCHYARD_HOME": home}
        self._run(f"web-{port}", control_plane.service("web", read_configuration(environment), environment))

    def wait_for_web(self, port: int) -> None:
        deadline = time.monotonic() + UP_WITHIN_S
        while time.monotonic() < deadline:
            try:
                httpx.get(f"http://127.0.0.1:{port}/healthz", timeout=10)
            except httpx.TransportError:
                time.sleep(0.2)
            else:
                return
        raise SystemExit(f"web does not answer: {self._log.read_text(errors='replace')[-LOG_SHOWN:]}")

    def kill_webs(self) -> None:
        for port in self.ports:
            self.processes[f"web-{port}"].kill()
        for port in self.ports:
            self.processes[f"web-{port}"].wait()

    def stop(self) -> None:
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _run(self, name: str, service: Service) -> None:
        program = service.program
        with self._log.open("ab") as log:
            process = self.processes[name] = subprocess.Popen(
                program.arguments,
                env=dict(program.environment),
                cwd=program.folder,
                stdout=log,
                stderr=log,
            )
        # As a fleet runs them, but relative to web, whose own priority only root may raise.
        os.setpriority(os.PRIO_PROCESS, process.pid, program.nice - BY_NAME[ProcessRole.WEB].nice)


def start_agents(group: AgentGroup) -> subprocess.Popen[bytes]:
    """Start a process of agents, which writes its status to its output."""
    with TemporaryFile() as stated:
        stated.write(msgspec.json.encode(group))
        stated.seek(0)
        command = [sys.executable, "-m", "bench.fleet.simulated_agents"]
        return subprocess.Popen(command, cwd=ROOT, stdin=stated, stdout=subprocess.PIPE)
