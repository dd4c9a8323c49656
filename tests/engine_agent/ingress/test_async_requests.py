"""Near-real-time requests go to the control plane only, with their key."""

import asyncio
import contextlib
import csv
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from engine_agent.ingress.config import CONTROL_PLANE_CONNECTIONS, FILE_CONNECTIONS
from engine_agent.protocol.local_servers import closing_connections
from tests.engine_agent.cell_proxy.http_stream import Message, read_message
from tests.engine_agent.cell_proxy.proxy_process import until
from tests.engine_agent.ingress.cells import FakeCell
from tests.engine_agent.ingress.ingresses import RunningIngress, pool, waits
from tests.engine_agent.ingress.keyed import keyed
from tests.engine_agent.ingress.traffic import BODY
from tests.listening import stop_listening

PATH = "/v1/async/chat/completions"
ACCEPTED = b'HTTP/1.1 202 Accepted\r\nContent-Type: application/json\r\nContent-Length: 11\r\n\r\n{"id":"ar"}'
pytestmark = [pytest.mark.processes, pytest.mark.asyncio]


class ControlPlane:
    """A web process that accepts everything and remembers it."""

    def __init__(self) -> None:
        self.heard: list[Message] = []
        self.port = 0
        self._server: asyncio.Server | None = None
        self._conversations: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(closing_connections(self._serve), "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Closes all connections: HAProxy keeps some, and its checks arrive at any moment."""
        if self._server is not None:
            await stop_listening(self._server)
        for conversation in self._conversations:
            conversation.cancel()
        await asyncio.gather(*self._conversations, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._conversations.add(task)
        task.add_done_callback(self._conversations.discard)
        try:
            while True:
                self.heard.append(await read_message(reader))
                writer.write(ACCEPTED)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


@asynccontextmanager
async def ingress_of(home: Path, *webs: ControlPlane) -> AsyncIterator[RunningIngress]:
    ingress = RunningIngress(home)
    ingress.use(replace(ingress.settings, control_plane=tuple(f"http://127.0.0.1:{web.port}" for web in webs)))
    async with ingress.running():
        yield ingress


async def test_a_request_is_passed_on_with_its_key_and_where_it_came_in(tmp_path: Path) -> None:
    web, key = ControlPlane(), keyed(tenant="acme")
    await web.start()
    async with ingress_of(tmp_path / "home", web) as ingress, FakeCell().running() as cell:
        await ingress.route(pool(cell), keys=(key.entry,), keys_required=True)
        headers = {**key.headers, "Idempotency-Key": "k1", "X-Switchyard-Region": "somewhere"}
        answer = await ingress.http.post(PATH, content=BODY, headers=headers)
        assert (answer.status_code, answer.json()) == (202, {"id": "ar"})
        (heard,) = web.heard
        assert (heard.first_line, heard.body) == (f"POST {PATH} HTTP/1.1", BODY)
        assert heard.headers["authorization"] == f"Bearer {key.text}"
        assert heard.headers["x-switchyard-region"] == "us-east-1"
        assert heard.headers["idempotency-key"] == "k1"
        assert heard.headers["host"] == f"127.0.0.1:{web.port}"
        assert (await ingress.http.get("/v1/async/ar_1", headers=key.headers)).status_code == 202
        assert cell.requests == []
    await web.stop()


async def test_what_no_key_opens_never_gets_there(tmp_path: Path) -> None:
    web, key = ControlPlane(), keyed()
    await web.start()
    async with ingress_of(tmp_path / "home", web) as ingress, FakeCell().running() as cell:
        await ingress.route(pool(cell), keys=(key.entry,), keys_required=True)
        assert (await ingress.http.post(PATH, content=BODY)).status_code == 401
        long = await ingress.http.post(PATH, content=b"x" * (1024 * 1024 + 1), headers=key.headers)
        assert (long.status_code, long.json()["error"]["code"]) == (413, "request_too_large")
        assert web.heard == []
    await web.stop()


async def test_without_the_control_plane_that_is_said_and_everything_else_is_served(tmp_path: Path) -> None:
    web = ControlPlane()
    await web.start()
    await web.stop()
    async with ingress_of(tmp_path / "home", web) as ingress, FakeCell().running() as cell:
        await ingress.route(pool(cell))
        await ingress.sees(**{cell.name: "up"})

        async def is_away() -> bool:
            answer = await ingress.http.post(PATH, content=BODY)
            return bool(answer.status_code == 503 and answer.json()["error"]["code"] == "control_plane_away")

        async def is_accepted() -> bool:
            return bool((await ingress.http.post(PATH, content=BODY)).status_code == 202)

        await until(is_away, "its check has failed")
        assert waits((await ingress.http.post(PATH, content=BODY)).headers)
        assert (await ingress.post(BODY)).status_code == 200
        await web.start()
        await until(is_accepted, "its check has succeeded")
    await web.stop()


async def test_of_several_hosts_of_the_control_plane_one_is_enough(tmp_path: Path) -> None:
    webs = ControlPlane(), ControlPlane()
    for web in webs:
        await web.start()
    async with ingress_of(tmp_path / "home", *webs) as ingress:
        await ingress.route()
        for web in webs:
            await web.stop()
            # Before any check of the stopped one has failed.
            answers = [(await ingress.http.post(PATH, content=BODY)).status_code for _ in range(4)]
            assert answers == [202] * 4
            heard = len(web.heard)
            await web.start()

            async def is_used_again(web: ControlPlane = web, heard: int = heard) -> bool:
                await ingress.http.post(PATH, content=BODY)
                return len(web.heard) > heard

            await until(is_used_again, "on a busy machine a check had failed: another one has succeeded")
    for web in webs:
        await web.stop()


async def test_a_question_about_usage_is_passed_on_with_its_key(tmp_path: Path) -> None:
    web, key = ControlPlane(), keyed(tenant="acme")
    await web.start()
    async with ingress_of(tmp_path / "home", web) as ingress:
        await ingress.route(keys=(key.entry,))
        assert (await ingress.http.get("/v1/usage?hours=2", headers=key.headers)).status_code == 202
        (heard,) = web.heard
        assert heard.first_line == "GET /v1/usage?hours=2 HTTP/1.1"
        assert heard.headers["authorization"] == f"Bearer {key.text}"
    await web.stop()


async def opened(ingress: RunningIngress, path: str, key: str, sent: bytes = b"{") -> asyncio.StreamWriter:
    """A request with an unfinished body of a megabyte."""
    _, writer = await asyncio.open_connection("127.0.0.1", ingress.settings.port)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Length: 1000000\r\n\r\n"
    writer.write(head.encode() + sent)
    return writer


@pytest.mark.parametrize(
    ("path", "places", "sent"),
    [
        ("/v1/files", FILE_CONNECTIONS, b"{"),
        (PATH, CONTROL_PLANE_CONNECTIONS, b"{" * 100_000),
        (PATH, 4 * CONTROL_PLANE_CONNECTIONS, b"{"),
    ],
)
async def test_slow_bodies_of_one_tenant_leave_places_to_others(
    tmp_path: Path, path: str, places: int, sent: bytes
) -> None:
    web, slow, other = ControlPlane(), keyed("0a0a0a0a", tenant="slow"), keyed("0b0b0b0b", tenant="other")
    await web.start()
    async with ingress_of(tmp_path / "home", web) as ingress:
        await ingress.route(keys=(slow.entry, other.entry), keys_required=True)
        writers = [await opened(ingress, path, slow.text, sent) for _ in range(places)]
        backend = "files" if path == "/v1/files" else "control_plane"

        async def under_way() -> int:
            said = await ingress.haproxy.admin.send(f"show stat {backend} 2 -1")
            rows = csv.DictReader(said.lstrip("# ").splitlines())
            return next(int(row["scur"]) for row in rows)

        async with asyncio.timeout(60):
            while await under_way() < places // 4:
                pass
        answer = await ingress.http.post(path, content=BODY, headers=other.headers)
        assert answer.status_code == 202
        if len(sent) > 1 or path == "/v1/files":
            refused = await ingress.http.post(path, content=BODY, headers=slow.headers)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        for each in writers:
            each.close()
    await web.stop()
