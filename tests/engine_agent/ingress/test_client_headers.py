"""An ingress takes from clients only those of our own headers that are theirs to send, on every port."""

import asyncio
import ssl

import httpx
import pytest

from engine_agent.ingress import headers
from engine_agent.protocol.ports import tls_port
from engine_agent.protocol.states import ServingClass
from tests.engine_agent.ingress.cells import FakeCell
from tests.engine_agent.ingress.ingresses import RunningIngress, pool
from tests.engine_agent.ingress.test_applications import context_of, shows, stated
from tests.engine_agent.ingress.test_large_bodies import MIDDLE, body_of
from tests.server_certificates import PublicAuthority

pytestmark = [pytest.mark.processes, pytest.mark.asyncio]
FORGED = "7654321"
OURS = {text for text in vars(headers).values() if isinstance(text, str) and text.startswith(headers.OWN_PREFIX)}
SENT = OURS - {headers.CLASS} | {f"{headers.OWN_PREFIX}Of-Tomorrow", f"{headers.OF_CACHES}Of-Tomorrow"}


def forged_at(cell: FakeCell) -> set[str]:
    """The names of our own headers with a client's value in what the cell received last."""
    received = cell.requests[-1].headers.items()
    return {name for name, value in received if name.startswith(headers.OWN_PREFIX.lower()) and FORGED in value}


@pytest.mark.parametrize("size", [100, MIDDLE])
async def test_no_internal_header_of_a_client_reaches_a_cell(ingress: RunningIngress, size: int) -> None:
    authority = PublicAuthority()
    server = authority.server("localhost")
    async with FakeCell().running() as cell:
        await ingress.route(pool(cell))
        await ingress.sees(**{cell.name: "up"})
        ingress.ingress.receive(stated(authority, server))
        await shows(ingress, authority, server, "localhost")
        ports: dict[str, bool | ssl.SSLContext] = {f"http://127.0.0.1:{ingress.settings.port}": False}
        ports[f"https://localhost:{tls_port(ingress.settings.port)}"] = context_of(authority)
        for url, verify in ports.items():
            async with httpx.AsyncClient(base_url=url, verify=verify, timeout=60, trust_env=False) as client:
                for name in (*SENT, *map(str.upper, SENT)):
                    answer = await client.post("/v1/chat/completions", content=body_of(size), headers=[(name, FORGED)])
                    assert answer.status_code == 200, (name, answer.text)
                    assert forged_at(cell) <= {headers.DEADLINE.lower()}, name


async def test_a_class_that_does_not_exist_is_refused_by_the_names_of_those_that_do(ingress: RunningIngress) -> None:
    async with FakeCell().running() as cell:
        await ingress.route(pool(cell))
        await ingress.sees(**{cell.name: "up"})
        for name in ("urgent", "", "REALTIME", "realtime batch"):
            answer = await ingress.post(body_of(100), **{headers.CLASS: name})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, headers.CLASS)
            assert all(each in answer.json()["error"]["message"] for each in ServingClass)
        for each in ServingClass:
            assert (await ingress.post(body_of(100), **{headers.CLASS: each})).status_code == 200


async def raw(ingress: RunningIngress, request: bytes) -> bytes:
    """Everything that comes back until the connection ends, or a whole JSON body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", ingress.settings.port)
    writer.write(request)
    answer = b""
    async with asyncio.timeout(25):
        while not answer.endswith(b"}") and (piece := await reader.read(65536)):
            answer += piece
    writer.close()
    return answer


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_a_client_that_asks_before_it_sends_a_long_body_is_told_that_it_is_too_long(
    ingress: RunningIngress, path: str
) -> None:
    await ingress.route()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 50000000\r\nExpect: 100-continue\r\n\r\n"
    answer = await raw(ingress, head.encode())
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"longer than the limit" in answer


async def test_http_2_by_prior_knowledge_gets_one_answer(ingress: RunningIngress) -> None:
    await ingress.route()
    settings_frame = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
    answer = await raw(ingress, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings_frame)
    assert answer.count(b"HTTP/1.1 ") == 1
    assert b'"code":"bad_http_request"' in answer


@pytest.mark.parametrize("letters", [201, 20_000, 60_000, 300_000])
async def test_a_name_of_a_model_that_is_too_long_is_refused_in_json(ingress: RunningIngress, letters: int) -> None:
    await ingress.route()
    answer = await ingress.post(b'{"model":"%b"}' % (b"m" * letters))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
    assert "at most 200" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/v1//chat/completions", "/v1/chat/completions"),
        ("/v1/v1/embeddings", "/v1/embeddings"),
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/V1/Rerank", "/v1/rerank"),
        ("/v1/messages/", "/v1/messages"),
        ("/v1/assistants", ""),
        ("/v1/messages/batches", ""),
        ("/", ""),
    ],
)
async def test_an_unknown_path_names_another_one_only_if_that_is_near(
    ingress: RunningIngress, path: str, meant: str
) -> None:
    await ingress.route()
    answer = await ingress.http.post(path, content=b"{}")
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert error["message"].partition("Did you mean ")[2] == (f"{meant}?" if meant else "")
    is_anthropic = path.startswith("/v1/messages")
    assert answer.json().get("type") == ("error" if is_anthropic else None)
    assert error["type"] == ("not_found_error" if is_anthropic else "invalid_request_error")
