"""The paths and headers that a cell proxy passes to an engine, without those that would bypass the fleet; and errors in
the format of the path."""

import asyncio
import json
from dataclasses import replace
from time import monotonic

import pytest

from engine_agent.cell_proxy.cell import Cell
from engine_agent.cell_proxy.log import LineLog
from engine_agent.cell_proxy.refusal import Refusal
from engine_agent.cell_proxy.settings import ProxySettings
from engine_agent.protocol.api_surface import CELL_PATHS
from engine_agent.protocol.proxy_messages import LOAD_VERSION, MAX_INGRESSES, CellLoad, decode_load
from tests.engine_agent.cell_proxy.engine import STREAM_HEAD, Script, Turn, answer_one_token, chunk
from tests.engine_agent.cell_proxy.http_stream import Message, read_message, request
from tests.engine_agent.cell_proxy.http_stream import ask as ask_port
from tests.engine_agent.cell_proxy.local_proxy import LocalProxy, proxy_of
from tests.engine_agent.fake_control_plane import eventually

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
asynchronous = pytest.mark.asyncio


async def ask(proxy: LocalProxy, path: str, body: bytes = b"{}", method: str = "POST", /, **headers: str) -> Message:
    reader, writer = await proxy.send(request(path, body, method, **headers))
    answer = await read_message(reader)
    writer.close()
    return answer


def says(status: bytes, body: bytes, content_type: bytes = b"application/json") -> Script:
    async def script(turn: Turn) -> None:
        head = b"HTTP/1.1 %b\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n" % (status, content_type, len(body))
        await turn.send(head + body)

    return script


@asynchronous
async def test_every_path_of_the_table_reaches_the_engine() -> None:
    async with proxy_of() as proxy:
        for path in CELL_PATHS:
            assert (await ask(proxy, path)).status == 200
            assert (await ask(proxy, f"{path}?a=b")).status == 200
        assert len(proxy.engine.requests) == 2 * len(CELL_PATHS)


@asynchronous
@pytest.mark.parametrize(
    "path",
    [
        *("/v1/load_lora_adapter", "/v1/chat/completions/render", "/v1/chat/completions/", "/v1//chat/completions"),
        *("/v1/chat%2Fcompletions", "/v1/chat/%63ompletions", "/V1/chat/completions", "/v1/chat/completions;a"),
        *("/v1/./chat/completions", "/v1/../tokenize", "//tokenize", "/collective_rpc", "/metrics", "/v1/models"),
        *("http://x/v1/chat/completions", "/inference/v1/generate", "/health", "/v1/completions%3Fa", "*"),
    ],
)
async def test_nothing_else_of_the_engine_does(path: str) -> None:
    async with proxy_of() as proxy:
        answer = await ask(proxy, path)
        assert (answer.status, answer.json()["error"]["code"]) == (404, "unknown_url")
        assert proxy.engine.requests == []


@asynchronous
async def test_another_method_is_refused_in_the_form_of_the_path() -> None:
    async with proxy_of() as proxy:
        for method in ("GET", "PUT", "OPTIONS", "DELETE"):
            answer = await ask(proxy, MESSAGES, b"{}", method)
            assert (answer.status, answer.json()["type"]) == (405, "error")
        assert proxy.engine.requests == []


@asynchronous
async def test_headers_that_steer_the_engine_end_at_the_proxy() -> None:
    async with proxy_of() as proxy:
        headers = {"x-vllm-priority": "-9", "x-data-parallel-rank": "1", "origin": "https://app.example"}
        assert (await ask(proxy, CHAT, **headers, x_session_id="s")).status == 200
        (sent,) = proxy.engine.requests
        assert sent.headers.keys().isdisjoint({"x-vllm-priority", "x-data-parallel-rank", "origin"})
        assert sent.headers["x-session-id"] == "s"


@asynchronous
async def test_a_message_has_the_priority_of_its_class_though_its_body_has_no_place_for_one() -> None:
    async with proxy_of() as proxy:
        proxy.cell.settings = replace(proxy.cell.settings, priorities=True)
        assert (await ask(proxy, MESSAGES, x_switchyard_class="batch", x_vllm_priority="-9")).status == 200
        assert proxy.engine.requests[0].headers["x-vllm-priority"] == "200"
        assert proxy.engine.requests[0].body == b"{}"


@asynchronous
async def test_a_page_reads_nothing_because_the_engine_says_so() -> None:
    async def script(turn: Turn) -> None:
        await turn.send(b"HTTP/1.1 200 OK\r\nAccess-Control-Allow-Origin: *\r\nContent-Length: 2\r\n\r\n{}")

    async with proxy_of(script) as proxy:
        assert "access-control-allow-origin" not in (await ask(proxy, CHAT)).headers


@asynchronous
async def test_a_client_is_not_told_which_program_answers() -> None:
    async def script(turn: Turn) -> None:
        await turn.send(b"HTTP/1.1 200 OK\r\nServer: uvicorn\r\nX-Powered-By: x\r\nContent-Length: 2\r\n\r\n{}")

    async with proxy_of(script) as proxy:
        assert (await ask(proxy, CHAT)).headers.keys().isdisjoint({"server", "x-powered-by"})


REFUSED = ['"vllm_xargs":{"a":1}', '"kv_transfer_params":{}', '"use_beam_search":true', '"guided_json":"x"']


@asynchronous
@pytest.mark.parametrize("member", [*REFUSED, '"request_id":"mine"', '"use_beam_se\\u0061rch":1'])
async def test_refused_members_are_named_on_every_path(member: str) -> None:
    async with proxy_of() as proxy:
        for path in CELL_PATHS:
            answer = await ask(proxy, path, b'{"model":"m",%b}' % member.encode())
            error = answer.json()["error"]
            assert (answer.status, error["code"]) == (400, "unsupported_parameter"), path
            assert error["param"] == next(iter(json.loads("{" + member + "}")))
            assert error["param"] in error["message"]
        assert proxy.engine.requests == []


@asynchronous
async def test_members_that_ask_for_nothing_and_those_of_vllm_pass() -> None:
    body = b'{"use_beam_search":false,"vllm_xargs":null,"top_k":3,"cache_salt":"x","chat_template_kwargs":{"a":true}}'
    async with proxy_of() as proxy:
        assert (await ask(proxy, CHAT, body)).status == 200
        assert proxy.engine.requests[0].body == body


@asynchronous
async def test_a_compressed_body_is_refused_and_a_plain_one_that_says_so_is_not() -> None:
    async with proxy_of() as proxy:
        for encoding in ("gzip", "zstd", "br", "identity, gzip"):
            answer = await ask(proxy, CHAT, content_encoding=encoding)
            assert (answer.status, answer.json()["error"]["code"]) == (415, "unsupported_encoding")
        assert (await ask(proxy, CHAT, content_encoding="Identity")).status == 200
        assert len(proxy.engine.requests) == 1


@asynchronous
@pytest.mark.parametrize("path", [CHAT, MESSAGES])
@pytest.mark.parametrize("status", [b"404 Not Found", b"405 X", b"422 X"])
async def test_what_a_framework_says_of_a_request_comes_in_the_form_with_its_status(path: str, status: bytes) -> None:
    async with proxy_of(says(status, b'{"detail":"No"}')) as proxy:
        answer = await ask(proxy, path)
        assert answer.status == int(status.split()[0])
        assert answer.headers["content-type"] == "application/json"
        assert answer.json()["error"]["message"] == "No"
        assert answer.json().get("type") == ("error" if path == MESSAGES else None)
        assert (await ask(proxy, path)).status == answer.status, "the connection is as before"


@asynchronous
async def test_an_error_that_comes_in_pieces_is_put_together() -> None:
    async def script(turn: Turn) -> None:
        await turn.send(b"HTTP/1.1 400 Bad\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n")
        for piece in (b'{"detail":[{"loc":["body","n"]', b',"msg":"Field required"}]}'):
            await turn.send(chunk(piece))
        await turn.send(b"0\r\n\r\n")

    async with proxy_of(script) as proxy:
        answer = await ask(proxy, CHAT)
        assert (answer.status, answer.json()["error"]["message"]) == (400, "n: Field required")


@asynchronous
async def test_an_engine_that_dies_within_an_error_gave_no_answer() -> None:
    async def script(turn: Turn) -> None:
        await turn.send(b"HTTP/1.1 400 Bad\r\nContent-Length: 100\r\n\r\n{")
        proxy.cell.health.failed(monotonic(), "it is gone")
        turn.die()

    async with proxy_of(script) as proxy:
        answer = await ask(proxy, CHAT)
        assert (answer.status, answer.headers["x-switchyard-retry"]) == (503, "1")


@asynchronous
async def test_a_stream_that_breaks_ends_with_an_event_of_the_form() -> None:
    async def script(turn: Turn) -> None:
        await turn.send(STREAM_HEAD + chunk(b"event: message_start\ndata: {}\n\n"))
        turn.die()

    async with proxy_of(script) as proxy:
        answer = await ask(proxy, MESSAGES)
        event, _, data = answer.body.decode().rstrip().rpartition("\n\n")[2].partition("\ndata: ")
        assert (event, json.loads(data)["type"]) == ("event: error", "error")


PATH = "/v1/completions"


def routed(model: str, **more: str) -> bytes:
    """A request from an ingress that found this model's name in the body."""
    body = json.dumps({"model": model, "prompt": "x" * int(more.pop("letters", "1"))}).encode()
    headers = {"x_switchyard_deployment": "chat", "x_switchyard_model": model.replace("/", "%2F"), **more}
    return request(PATH, body, **headers)


@pytest.mark.parametrize("letters", ["1", str(2 * 1024 * 1024)])
@pytest.mark.asyncio
async def test_the_engine_is_asked_for_the_adapter_and_for_its_own_model_by_other_names(letters: str) -> None:
    async with proxy_of() as proxy:
        for model, adapter, wanted in (("acme/tuned", "acme%2Ftuned", "acme/tuned"), ("alias", "", "tiny")):
            more = {"x_switchyard_adapter": adapter} if adapter else {}
            answer = await ask_port(proxy.port, routed(model, letters=letters, **more))
            assert answer.status == 200
            at_engine = proxy.engine.requests[-1]
            assert json.loads(at_engine.body)["model"] == wanted
            assert "x-switchyard-adapter" not in at_engine.headers


@pytest.mark.asyncio
async def test_a_cell_without_the_adapter_refuses_and_another_may_be_tried() -> None:
    async with proxy_of() as proxy:
        refused = await ask_port(proxy.port, routed("acme/other", x_switchyard_adapter="acme%2Fother"))
        assert (refused.status, refused.headers["x-switchyard-retry"]) == (503, "1")
        assert refused.json()["error"]["code"] == "adapter_not_here"
        assert not proxy.engine.requests


@pytest.mark.asyncio
async def test_what_an_adapter_used_is_counted_apart() -> None:
    async with proxy_of() as proxy:
        for adapter in ({"x_switchyard_adapter": "acme%2Ftuned"}, {}):
            model = "acme/tuned" if adapter else "alias"
            await ask_port(proxy.port, routed(model, x_switchyard_key="0a1b2c3d", **adapter))
        rows = proxy.cell.meter.usage.rows()
        assert [(row.key, row.adapter, row.requests_total) for row in rows] == [
            ("0a1b2c3d", "acme/tuned", 1),
            ("0a1b2c3d", "", 1),
        ]


@pytest.mark.parametrize("server", ["c-1-g2", "c-1-g10", "c-2-g1", "c-1", "x" * 5000])
@pytest.mark.asyncio
async def test_a_request_for_another_start_is_refused_and_may_be_tried_elsewhere(server: str) -> None:
    async with proxy_of() as proxy:
        refused = await ask_port(proxy.port, request("/v1/completions", b"{}", x_switchyard_server=server))
        assert (refused.status, refused.headers["x-switchyard-retry"]) == (503, "1")
        error = refused.json()["error"]
        assert error["code"] == "other_generation"
        assert error["message"] == f"the request is for {server[:80]}, this is c-1-g1"
        health = await ask_port(proxy.port, request("/healthz", x_switchyard_server=server))
        assert (health.status, health.json()["error"]["code"]) == (503, "other_generation")
        assert not proxy.engine.requests


@pytest.mark.asyncio
async def test_a_request_for_this_start_is_served_and_the_engine_is_not_told() -> None:
    async with proxy_of() as proxy:
        served = await ask_port(proxy.port, request("/v1/completions", b"{}", x_switchyard_server="c-1-g1"))
        assert served.status == 200
        (at_engine,) = proxy.engine.requests
        assert "x-switchyard-server" not in at_engine.headers
        assert (await ask_port(proxy.port, request("/healthz", x_switchyard_server="c-1-g1"))).status == 200


@pytest.mark.asyncio
async def test_the_health_answer_has_the_load_and_the_requests_of_the_ingress_that_asks() -> None:
    held = asyncio.Event()

    async def hold(turn: Turn) -> None:
        await held.wait()
        await answer_one_token(turn)

    async with proxy_of(hold) as proxy:
        writers = []
        for ingress in ("i-a", "i-a", "i-b", ""):
            _, writer = await proxy.send(request("/v1/completions", b"{}", x_switchyard_ingress=ingress))
            writers.append(writer)
        await eventually(lambda: len(proxy.engine.requests) == 4)
        assert all("x-switchyard-ingress" not in each.headers for each in proxy.engine.requests)
        loads = {}
        for ingress in ("i-a", "i-b", "i-c"):
            health = await ask_port(proxy.port, request("/healthz", x_switchyard_ingress=ingress))
            loads[ingress] = decode_load(health.body)
        assert loads["i-a"] == CellLoad(LOAD_VERSION, "c-1-g1", own=2, in_flight=4)
        assert [load.own for load in loads.values() if load] == [2, 1, 0]
        held.set()
        await eventually(lambda: not proxy.cell.in_flight)
        for writer in writers:
            writer.close()
        assert proxy.cell.load_for("i-a") == CellLoad(LOAD_VERSION, "c-1-g1", own=0, in_flight=0)


def test_ingresses_beyond_the_limit_are_counted_in_the_total_only() -> None:
    cell = Cell(
        ProxySettings("n-1", "c-1", 1, "127.0.0.1", 0, 0, "127.0.0.1", 1, "tiny", 4), LineLog(1, requests=False)
    )
    requests = [_Request() for _ in range(2 * MAX_INGRESSES)]
    for number, each in enumerate(requests):
        cell.enter(each, f"i-{number}")
    last = f"i-{len(requests) - 1}"
    assert (cell.load_for("i-0").own, cell.load_for(last).own) == (1, 0)
    assert (cell.load_for(last).in_flight, cell.load_for(last).waiting) == (len(requests), len(requests) - 4)
    for each in requests:
        cell.leave(each)
    assert cell.load_for("i-0").own == 0
    cell.enter(requests[0], last)
    assert cell.load_for(last).own == 1


class _Request:
    def check(self, now: float) -> None: ...

    def cut(self, refusal: Refusal) -> None: ...

    @property
    def is_leaving(self) -> bool:
        return False

    def leave(self) -> None: ...
