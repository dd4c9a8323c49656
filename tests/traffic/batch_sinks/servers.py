"""Valkey servers for tests of sinks, and batches that have ended with results."""

import socket
import socketserver
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import redis

from controlplane.embedded.servers import binary
from tests.controlplane.embedded.processes import eventually
from tests.fleet.rows import NOW
from tests.ports import free_port
from tests.traffic.rows import begun_with, jsonl, line, stored
from traffic.batch_sinks.models import BatchDelivery
from traffic.batches.models import Batch
from traffic.files.planner import FilePurpose

SLOTS = 16_384


class Server:
    def __init__(self, port: int, folder: Path, *options: str) -> None:
        self.port, self._folder, self._options = port, folder, options
        self.bus = 0
        """Port between the nodes of a cluster."""

    def start(self) -> None:
        program = [str(binary()), "--bind", "127.0.0.1", "--save", "", "--dir", str(self._folder), *self._options]
        self._process = subprocess.Popen(program, stdout=subprocess.DEVNULL)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def client(self, **options: Any) -> "redis.Redis":
        return redis.Redis(port=self.port, **options)


@contextmanager
def valkey(folder: Path) -> Iterator[Server]:
    """A server on a free port of this host."""
    port = free_port()
    server = Server(port, folder, "--port", str(port))
    server.start()
    try:
        assert eventually(lambda: _answers(server))
        yield server
    finally:
        server.stop()


@contextmanager
def valkey_cluster(folder: Path, nodes: int = 3) -> Iterator[list[Server]]:
    """Servers in cluster mode that have all slots, in equal parts."""
    servers = []
    for number in range(nodes):
        own = folder / str(number)
        own.mkdir()
        port, bus = str(free_port()), str(free_port())
        mode = ("--cluster-enabled", "yes", "--cluster-node-timeout", "15000", "--cluster-require-full-coverage", "no")
        servers.append(Server(int(port), own, "--port", port, "--cluster-port", bus, *mode))
        servers[-1].bus = int(bus)
    try:
        for server in servers:
            server.start()
        assert eventually(lambda: all(_answers(server) for server in servers))
        for number, server in enumerate(servers):
            first, end = number * SLOTS // nodes, (number + 1) * SLOTS // nodes
            with server.client() as client:
                client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, end - 1)
                client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
                for other in servers[:number]:
                    client.execute_command("CLUSTER", "MEET", "127.0.0.1", other.port, other.bus)
        assert eventually(lambda: all(_known_nodes(server) == nodes for server in servers), within_s=60.0)
        yield servers
    finally:
        for server in servers:
            server.stop()


def _known_nodes(server: Server) -> int:
    """Nodes with slots that this one knows, once the cluster serves."""
    with server.client() as client:
        state = client.execute_command("CLUSTER INFO")["cluster_state"]
        return len(client.execute_command("CLUSTER SLOTS")) if state == "ok" else 0


def _answers(server: Server) -> bool:
    try:
        with server.client() as client:
            return bool(client.ping())
    except redis.ConnectionError:
        return False


@contextmanager
def tls_in_front(server: Server, certificate: Path) -> Iterator[int]:
    """The port of a relay with TLS in front of a server, which the package of Valkey lacks. The file has also the
    key."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)

    class Relay(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with (
                suppress(OSError),
                context.wrap_socket(self.request, server_side=True) as caller,
                socket.create_connection(("127.0.0.1", server.port)) as behind,
            ):
                answers = threading.Thread(target=_copy, args=(behind, caller))
                answers.start()
                _copy(caller, behind)
                behind.shutdown(socket.SHUT_RDWR)
                answers.join()

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Relay) as relay:
        relay.daemon_threads = True
        thread = threading.Thread(target=relay.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield relay.server_address[1]
        finally:
            relay.shutdown()
            thread.join()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while piece := source.recv(65536):
            target.sendall(piece)


def answered(number: int | str, text: str = "because") -> dict[str, Any]:
    body = {"choices": [{"message": {"content": text}}]}
    return {"id": f"batch_req_{number}", "custom_id": f"id-{number}", "error": None, "response": {"body": body}}


def failed(number: int) -> dict[str, Any]:
    return {
        "id": f"batch_req_{number}",
        "custom_id": f"id-{number}",
        "error": {"code": "batch_expired"},
        "response": None,
    }


def ended_batch(*sinks: str, output: bytes, errors: bytes = b"", tenant: str = "acme") -> Batch:
    """A completed batch with these files, and a delivery to each sink."""
    file = stored(jsonl(line(1)), tenant)
    batch = begun_with(tenant, input_file_id=file.id, switchyard={"sinks": list(sinks)})
    names = {}
    for name, content in (("output_file_id", output), ("error_file_id", errors)):
        if content:
            names[name] = stored(content, tenant, purpose=FilePurpose.BATCH_OUTPUT).id
    Batch.objects.filter(id=batch.id).update(state="completed", completed_at=NOW, **names)
    BatchDelivery.objects.filter(batch=batch).update(due_at=NOW - timedelta(seconds=1))
    batch.refresh_from_db()
    return batch
