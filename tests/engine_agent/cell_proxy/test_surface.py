"""What of an engine a cell proxy lets through: the table's paths, without what steers the engine past the fleet; and
errors in the form that the path's clients read, whoever gave them."""

import json
from dataclasses import replace
from time import monotonic

import pytest

from engine_agent.protocol.api_surface import CELL_PATHS
from tests.engine_agent.cell_proxy.engine import STREAM_HEAD, Script, Turn, chunk
from tests.engine_agent.cell_proxy.http_stream import Message, read_message, request
from tests.engine_agent.cell_proxy.local_proxy import LocalProxy, proxy_of

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
        proxy.cell.judge.failed(monotonic(), "it is gone")
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
