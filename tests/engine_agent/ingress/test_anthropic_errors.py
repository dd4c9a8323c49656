"""Failures behind a running ingress, as Anthropic's client reads them: by status, and by the types that Anthropic
documents (docs.claude.com, "Errors") and that client lists. Overload has 503 here instead of Anthropic's 529, which no
load balancer knows; their client retries both."""

import asyncio
import contextlib
import importlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import msgspec
import pytest

from engine_agent.ingress.settings import QUEUES
from engine_agent.protocol.api_surface import ANTHROPIC_TYPES, anthropic_type
from engine_agent.protocol.identity import IdentityKind
from engine_agent.protocol.ingress_messages import CellEndpoint
from engine_agent.protocol.states import ServingClass
from tests.engine_agent.cell_proxy.engine import Turn, json_answer, running_engine
from tests.engine_agent.cell_proxy.http_stream import ask
from tests.engine_agent.cell_proxy.proxy_process import running_proxy
from tests.engine_agent.fake_control_plane import eventually
from tests.engine_agent.ingress.cells import FakeCell, Request
from tests.engine_agent.ingress.ingresses import RunningIngress, pool
from tests.engine_agent.ingress.test_queue import queued
from tests.engine_agent.tls import fleet_of_rigs

if TYPE_CHECKING:
    from anthropic import APIStatusError

pytestmark = [pytest.mark.processes, pytest.mark.asyncio]

NODE = "n-0a1b2c3d"
PATIENCE_S = 110
"""Shorter than the time limit of a test."""
BODY = b'{"model": "demo"}'
TEXTS = ("hi", "hi" * 50_000)
HEAD = b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
ASKED = b'{"model": "demo", "max_tokens": 4, "messages": [{"role": "user", "content": "hi'


@pytest.fixture(scope="module", autouse=True)
def anthropic_is_loaded() -> None:
    """Loads it before any cell runs in this loop: the import blocks health checks for seconds."""
    importlib.import_module("anthropic")


class GarbledCell(FakeCell):
    async def _generate(self, request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(b"this is not HTTP\r\n\r\n")


@contextlib.asynccontextmanager
async def running(folder: Path, *, wait_s: int = 1, **times: int) -> AsyncIterator[RunningIngress]:
    """An ingress with these times, a wait of `wait_s` for real-time requests, and a short queue."""
    ingress = RunningIngress(folder / "home")
    realtime = replace(QUEUES[ServingClass.REALTIME], wait_s=wait_s, waiting_per_cell=1)
    queues = {**QUEUES, ServingClass.REALTIME: realtime}
    ingress.use(replace(ingress.settings, times=replace(ingress.settings.times, **times), queues=queues))
    async with ingress.running():
        yield ingress


async def serve(ingress: RunningIngress, *cells: FakeCell) -> None:
    await ingress.route(pool(*cells))
    await ingress.sees(**{cell.name: "up" for cell in cells})


async def refusal(ingress: RunningIngress, text: str = "hi") -> "APIStatusError":
    """The error of Anthropic's client, without retries."""
    import anthropic  # takes long to load: not while tests are collected

    async with anthropic.AsyncAnthropic(base_url=ingress.url, api_key="none", max_retries=0) as client:
        with pytest.raises(anthropic.APIStatusError) as raised:
            await client.messages.create(model="demo", max_tokens=4, messages=[{"role": "user", "content": text}])
    return raised.value


def read(error: "APIStatusError") -> tuple[int, str, str]:
    """Status, type and code of an error that is in Anthropic's form."""
    body: Any = error.body
    assert (body["type"], bool(body["error"]["message"])) == ("error", True)
    assert error.response.headers["content-type"] == "application/json"
    assert error.request_id, "by the header that their client reads"
    return error.status_code, body["error"]["type"], body["error"]["code"]


async def test_every_type_that_we_use_is_one_of_theirs() -> None:
    from anthropic.types.shared.error_type import ErrorType

    documented = {*get_args(ErrorType), "request_too_large"}  # documented with 413, and not listed by the client
    assert {anthropic_type(status) for status in range(400, 600)} <= documented
    assert set(ANTHROPIC_TYPES.values()) <= documented


async def test_a_body_that_never_ends_is_a_408_that_timed_out(tmp_path: Path) -> None:
    async with running(tmp_path, request_body_s=1) as ingress, FakeCell().running() as cell:
        await serve(ingress, cell)
        for length in (200, 100_000, 1_000_000):
            answer = await asyncio.wait_for(ask(ingress.settings.port, HEAD % length + ASKED), 60)
            body = answer.json()
            assert (answer.status, body["type"], body["error"]["code"]) == (408, "error", "request_timeout")
            assert body["error"]["type"] == "timeout_error"
        assert cell.requests == []


async def test_a_cell_that_stays_silent_is_a_504_that_timed_out(tmp_path: Path) -> None:
    async with running(tmp_path, silence_s=1) as ingress, FakeCell().running() as cell:
        cell.release.clear()
        await serve(ingress, cell)
        for text in TEXTS:
            assert read(await refusal(ingress, text)) == (504, "timeout_error", "cell_silent")


async def test_a_cell_that_speaks_no_http_is_a_502_of_the_api(tmp_path: Path) -> None:
    async with running(tmp_path) as ingress, GarbledCell().running() as cell:
        await serve(ingress, cell)
        assert read(await refusal(ingress)) == (502, "api_error", "bad_cell_answer")


async def test_no_cell_that_could_take_it_is_a_503_of_overload(tmp_path: Path) -> None:
    async with running(tmp_path) as ingress:
        await ingress.route(pool())
        for text in TEXTS:
            error = await refusal(ingress, text)
            assert read(error) == (503, "overloaded_error", "no_ready_cell")
            assert int(error.response.headers["retry-after"]) > 0


async def test_a_wait_for_a_free_cell_that_was_too_long_is_a_503_of_overload(tmp_path: Path) -> None:
    async with running(tmp_path) as ingress, FakeCell(max_connections=1).running() as cell:
        await serve(ingress, cell)
        cell.release.clear()
        served = asyncio.create_task(ingress.post(BODY))
        await eventually(lambda: cell.in_flight == 1)
        assert read(await refusal(ingress)) == (503, "overloaded_error", "no_free_cell")
        cell.release.set()
        assert (await served).status_code == 200


async def test_a_full_queue_is_a_503_of_overload(tmp_path: Path) -> None:
    async with running(tmp_path, wait_s=PATIENCE_S) as ingress, FakeCell(max_connections=1).running() as cell:
        await serve(ingress, cell)
        cell.release.clear()
        served = [asyncio.create_task(ingress.post(BODY))]
        await eventually(lambda: cell.in_flight == 1)
        for number in (1, 2):
            served.append(asyncio.create_task(ingress.post(BODY)))
            await eventually(lambda number=number: queued(ingress) == number)  # type: ignore[misc]
        assert read(await refusal(ingress)) == (503, "overloaded_error", "queue_full")
        cell.release.set()
        assert [answer.status_code for answer in await asyncio.gather(*served)] == [200] * 3


FAILURES = (
    (b"500 Internal Server Error", b"Internal Server Error", (500, "api_error")),
    (b"500 X", b'{"error":{"message":"m","type":"InternalServerError","code":500}}', (500, "api_error")),
    (b"503 X", b'{"detail":"loading"}', (503, "overloaded_error")),
    (b"504 X", b"", (504, "timeout_error")),
    (b"408 X", b'{"detail":"slow"}', (408, "timeout_error")),
)
"""Status and body of an engine's answer, and status and type of the error."""


async def test_what_an_engine_fails_with_comes_through_cell_proxy_and_ingress_in_their_form(tmp_path: Path) -> None:
    said: tuple[bytes, bytes] = (b"", b"")

    async def say(turn: Turn) -> None:
        status, body = said
        await turn.send(json_answer(body, status))

    async with proxied_cell(tmp_path, say) as ingress:
        for status, body, expected in FAILURES:
            said = (status, body)
            # Not the code: the last of several retried 503s can be the ingress's own.
            assert read(await refusal(ingress))[:2] == expected


@contextlib.asynccontextmanager
async def proxied_cell(folder: Path, script: Callable[[Turn], Awaitable[None]]) -> AsyncIterator[RunningIngress]:
    """An ingress, one real cell proxy, and an engine with this script."""
    fleet_of_rigs().certify(folder / "node", IdentityKind.NODE, NODE)
    async with (
        running(folder) as ingress,
        running_engine(script) as engine,
        running_proxy(engine, "--identity", str(folder / "node")) as proxy,
    ):
        cell = CellEndpoint("c-test", 3, "127.0.0.1", proxy.port, 4, node=NODE)
        await ingress.route(msgspec.structs.replace(pool(), cells=(cell,)))
        await ingress.sees(c_test="up")
        yield ingress
