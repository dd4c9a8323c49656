"""The real web process among connections that send nothing, or half a request: people, health checks and agents are
served all the same, and the connections end."""

import http.client
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.controlplane.dashboard.web import web_process
from tests.ports import free_port

pytestmark = [pytest.mark.processes, pytest.mark.django_db(transaction=True)]
FILES = 512
"""That web may have open: a quarter of them for connections of people, a quarter for those of agents."""
SILENT = 300
"""More than web has room for with `FILES`, of each kind."""
SAID = (b"", b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-", b"\r\n")


@pytest.fixture
def silent() -> Iterator[list[socket.socket]]:
    made: list[socket.socket] = []
    yield made
    for each in made:
        each.close()


def connected(port: int, said: bytes = b"", address: str = "127.0.0.1") -> socket.socket:
    made = socket.create_connection(("127.0.0.1", port), timeout=60, source_address=(address, 0))
    made.sendall(said)
    return made


def has_ended(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def test_people_and_agents_are_served_among_connections_that_ask_for_nothing(
    tmp_path: Path, silent: list[socket.socket]
) -> None:
    agents = free_port()
    more = {"SWITCHYARD_PLAIN_LINKS": "0", "SWITCHYARD_AGENT_PORT": str(agents), "SWITCHYARD_HOME": str(tmp_path)}
    with web_process(tmp_path / "web.log", open_files=FILES, **more) as url:
        port = urlsplit(url).port or 0
        silent += [connected(port, said) for _ in range(SILENT) for said in SAID]
        for path, statuses in (("/login/", {200}), ("/healthz", {200, 503}), ("/api/v1/regions/", {401})):
            client = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            client.request("GET", path)
            assert client.getresponse().status in statuses
            client.close()
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        silent += [connected(agents) for _ in range(SILENT)]
        with context.wrap_socket(connected(agents, address="127.0.0.2")) as agent:
            assert agent.version() == "TLSv1.3"
        assert all(has_ended(each) for each in silent), "each was closed to make room, or at its deadline"
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        client.request("GET", "/login/")
        assert client.getresponse().status == 200
        client.close()
    assert "Traceback" not in (tmp_path / "web.log").read_text()
