"""An ingress accepts from clients only the internal headers that they may send, on every port. A page of another origin
may use a key that lists it."""

import asyncio
import ssl

import httpx
import pytest

from engine_agent.ingress import headers
from engine_agent.protocol.ports import tls_port
from engine_agent.protocol.states import ServingClass
from tests.engine_agent.ingress.cells import FakeCell
from tests.engine_agent.ingress.ingresses import RunningIngress, pool
from tests.engine_agent.ingress.keyed import keyed
from tests.engine_agent.ingress.test_applications import context_of, shows, stated
from tests.engine_agent.ingress.test_large_bodies import MIDDLE, body_of
from tests.engine_agent.ingress.traffic import BODY
from tests.server_certificates import PublicAuthority

pytestmark = [pytest.mark.processes, pytest.mark.asyncio(loop_scope="module")]
FORGED = "7654321"
OURS = {text for text in vars(headers).values() if isinstance(text, str) and text.startswith(headers.OWN_PREFIX)}
SENT = OURS - {headers.CLASS} | {f"{headers.OWN_PREFIX}Of-Tomorrow", f"{headers.OF_CACHES}Of-Tomorrow"}


@pytest.fixture
def ingress(shared_ingress: RunningIngress) -> RunningIngress:
    return shared_ingress


def forged_at(cell: FakeCell) -> set[str]:
    """The internal headers with a client's value in the cell's last request."""
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
    """All bytes until the connection ends, or a whole JSON body."""
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


APP, OTHER = "https://app.example", "http://localhost:3000"
KEY = keyed("0a0a0a0a", origins=(APP,))
SECOND = keyed("0b0b0b0b", origins=(OTHER,))
ALLOWED = "access-control-allow-origin"


async def preflight(ingress: RunningIngress, origin: str, path: str = "/v1/chat/completions") -> httpx.Response:
    headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    headers["Access-Control-Request-Headers"] = "authorization,content-type,x-stainless-lang"
    return await ingress.http.options(path, headers=headers)


async def test_a_preflight_is_answered_for_origins_of_any_key_on_paths_of_the_table(ingress: RunningIngress) -> None:
    await ingress.route(pool(), keys=(KEY.entry, SECOND.entry), keys_required=True)
    for origin in (APP, OTHER):
        for path in ("/v1/chat/completions", "/v1/models", "/v1/models/demo", "/health", "/v1/messages"):
            answer = await preflight(ingress, origin, path)
            assert (answer.status_code, answer.headers[ALLOWED]) == (204, origin), path
            assert answer.headers["access-control-allow-headers"] == "authorization,content-type,x-stainless-lang"
            assert "POST" in answer.headers["access-control-allow-methods"]
            assert answer.headers["vary"] == "Origin"
    for origin, path in (("https://evil.example", "/v1/models"), (APP, "/v1/load_lora_adapter"), ("null", "/health")):
        answer = await preflight(ingress, origin, path)
        assert answer.status_code in {401, 404, 405}
        assert ALLOWED not in answer.headers


async def test_an_answer_is_for_pages_that_its_own_key_lists(ingress: RunningIngress) -> None:
    async with FakeCell().running() as cell:
        await ingress.route(pool(cell), keys=(KEY.entry, SECOND.entry, keyed().entry))
        await ingress.sees(**{cell.name: "up"})
        for key, origin, is_allowed in ((KEY, APP, True), (KEY, OTHER, False), (keyed(), APP, False)):
            for body, status in ((BODY, 200), (b'{"model":"none"}', 404), (b"{}", 400)):
                answer = await ingress.post(body, Origin=origin, **key.headers)
                assert answer.status_code == status
                assert (answer.headers.get(ALLOWED) == origin) == is_allowed
                assert answer.headers["vary"] == "Origin"
        answer = await ingress.post(BODY, Origin=APP)
        assert (answer.status_code, ALLOWED in answer.headers) == (200, False), "there is no key that lists it"
        listing = await ingress.http.get("/v1/models", headers={"Origin": APP, **KEY.headers})
        assert listing.headers[ALLOWED] == APP
        assert "x-request-id" in listing.headers["access-control-expose-headers"].lower()


async def test_an_origin_is_taken_off_a_key_without_a_reload(ingress: RunningIngress) -> None:
    await ingress.route(pool(), keys=(KEY.entry, SECOND.entry))
    worker = ingress.worker_pid
    await ingress.route(pool(), keys=(keyed("0a0a0a0a").entry, SECOND.entry))
    assert (await preflight(ingress, APP)).status_code == 405
    assert ingress.worker_pid == worker


async def test_without_such_keys_no_answer_speaks_of_origins(ingress: RunningIngress) -> None:
    await ingress.route(pool(), keys=(keyed().entry,))
    answer = await preflight(ingress, APP)
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert ALLOWED not in answer.headers
    assert "vary" not in answer.headers
