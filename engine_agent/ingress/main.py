"""`python -m engine_agent ingress …`: parses the command line and runs one ingress agent until SIGTERM or SIGINT. These
signals stop HAProxy as well, after a moment for its streams. A killed agent leaves it serving."""

import argparse
import asyncio
import contextlib
import fcntl
import logging
import os
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from engine_agent.ingress.agent import IngressAgent
from engine_agent.ingress.config import CONFIG_FILE
from engine_agent.ingress.haproxy import find_binary, find_master, port_reserved
from engine_agent.ingress.settings import IngressSettings, most_connections
from engine_agent.node import procfs
from engine_agent.node.accounts import Service, open_way, service_account
from engine_agent.node.connection import AgentConnection
from engine_agent.node.enrolment import Enrolment
from engine_agent.node.identity import Identity
from engine_agent.node.telemetry.exposition import serve_metrics
from engine_agent.node.telemetry.fingerprint import agent_version
from engine_agent.protocol.identity import control_name, links_are_plain
from engine_agent.protocol.log_lines import configure_logging
from engine_agent.protocol.messages import PROTOCOL_VERSION, Hello
from engine_agent.protocol.ports import METRICS_ABOVE, metrics_port
from engine_agent.protocol.states import AgentKind

log = logging.getLogger(__name__)

STOP_GRACE_S = 5.0
JOIN_TOKEN_VARIABLE = "SWITCHYARD_JOIN_TOKEN"  # noqa: S105 - the name of a variable, not a token
MAX_CONNECTIONS = 8000
SPARE_FILES = 500
"""Files that HAProxy needs for itself, its listeners and its checks."""
MAX_THREADS = 4


def run(argv: list[str]) -> int:
    os.umask(0o077)
    arguments = _parser().parse_args(argv)
    state_dir: Path = arguments.home.resolve()
    try:
        configure_logging(os.environ, "switchyard-ingress-agent")
        enrolment = Enrolment(
            arguments.server, AgentKind.INGRESS, arguments.ingress_id, state_dir, os.environ.get(JOIN_TOKEN_VARIABLE)
        )
        with _only_agent_of(state_dir):
            settings = _settings(arguments, state_dir, tuple(sorted(enrolment.servers.all)))
            _open_folders(settings)
            config = state_dir / CONFIG_FILE
            with port_reserved(settings.host, settings.port, lambda: find_master(config) is not None):
                asyncio.run(_serve(settings, find_binary(), enrolment, _metrics_port(arguments)))
    except (ValueError, OSError) as error:
        print(f"ingress {arguments.ingress_id}: {error}", file=sys.stderr)  # noqa: T201 - for the operator
        return 1
    return 0


def default_threads() -> int:
    """One per processor of this process: more would only wait for each other."""
    return min(MAX_THREADS, len(os.sched_getaffinity(0)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m engine_agent ingress", description=__doc__)
    parser.add_argument("--ingress-id", required=True, help="i-<region>, or i- and anything else that is unique")
    parser.add_argument("--region", required=True)
    parser.add_argument("--home", required=True, type=Path, help="folder for journal, credential, logs and sockets")
    parser.add_argument(
        "--server", required=True, help="control plane, https://HOST:PORT; of several hosts separated by commas"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to serve applications on")
    parser.add_argument("--port", type=int, default=8080, help="port to serve applications on")
    parser.add_argument(
        "--metrics-port", type=int, help=f"on loopback; the port of --port and {METRICS_ABOVE} if absent"
    )
    parser.add_argument("--threads", type=int, default=default_threads(), help="of HAProxy")
    parser.add_argument(
        "--access-log",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="log every request, not only those answered 400 or above",
    )
    return parser


def _metrics_port(arguments: argparse.Namespace) -> int:
    chosen: int | None = arguments.metrics_port
    if chosen is not None:
        return chosen
    return metrics_port(arguments.port)


def _settings(arguments: argparse.Namespace, state_dir: Path, servers: tuple[str, ...]) -> IngressSettings:
    account = service_account(Service.INGRESS)
    open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return IngressSettings(
        ingress_id=arguments.ingress_id,
        region=arguments.region,
        state_dir=state_dir,
        host=arguments.host,
        port=arguments.port,
        control_plane=servers,
        control_plane_name=_control_plane_name(servers, state_dir),
        max_connections=max(100, min(MAX_CONNECTIONS, most_connections(open_files - SPARE_FILES))),
        threads=arguments.threads,
        relays=default_threads(),
        access_log=arguments.access_log,
        worker_account=(account.uid, account.gid) if account else None,
    )


def _control_plane_name(servers: tuple[str, ...], state_dir: Path) -> str:
    """Raises ValueError, OSError if the home has no authorities of a fleet."""
    return control_name(Identity(state_dir).fleet()).dns if servers[0].startswith("https://") else ""


def _open_folders(settings: IngressSettings) -> None:
    """Lets HAProxy's workers reach each other's sockets. They cannot read the other files."""
    for folder in (settings.state_dir, *(settings.state_dir / tier.name for tier in settings.body_parsers)):
        folder.mkdir(mode=0o700, exist_ok=True)
        open_way(folder, settings.worker_account is not None)


@contextlib.contextmanager
def _only_agent_of(state_dir: Path) -> Iterator[None]:
    """Locks the state directory: two agents would undo each other's steps. Raises OSError if another agent has this
    state directory, or it cannot be written."""
    state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (state_dir / "agent.lock").open("w", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OSError(f"another agent runs with the home {state_dir}") from error
        yield


async def _serve(settings: IngressSettings, binary: Path, enrolment: Enrolment, metrics_port: int) -> None:
    version = agent_version()

    def hello() -> Hello:
        ingress.accept_any_revision()
        return Hello(
            protocol=PROTOCOL_VERSION,
            kind=AgentKind.INGRESS,
            id=settings.ingress_id,
            boot_id=procfs.boot_id(),
            agent_version=version,
        )

    identity = None if links_are_plain(os.environ) else Identity(settings.state_dir)
    ingress = IngressAgent(settings, binary, identity=identity)
    connection = AgentConnection(enrolment=enrolment, hello=hello, on_message=ingress.receive)
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    metrics = serve_metrics(metrics_port, lambda: connection.exposition() + ingress.relays.exposition())
    works = (ingress.run(connection.send, connection.send_requests), connection.run(), metrics, stopping.wait())
    tasks = [asyncio.create_task(work) for work in works]
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    for task in done:
        task.result()
    log.info("stopping HAProxy; its streams have %g s", STOP_GRACE_S)
    await ingress.stop(STOP_GRACE_S)
