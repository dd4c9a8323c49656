"""The agent's small HTTP client accepts complete answers and raises one clear error otherwise."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing

import pytest

from engine_agent.node.http import MAX_RESPONSE_BYTES, HttpClient, HttpResponse, NoResponse
from engine_agent.protocol.local_servers import closing_connections
from tests.engine_agent.node.answering import answering
from tests.ports import free_port

HEAD = b"HTTP/1.1 200 OK\r\n"
Serve = Callable[[int, asyncio.StreamWriter], Awaitable[None]]
OK = HEAD + b"Content-Length: 2\r\n\r\nok"


@asynccontextmanager
async def connections(serve: Serve) -> AsyncIterator[tuple[str, list[int]]]:
    """A server's URL, and the connection number of each request. `serve` answers one request."""
    asked: list[int] = []
    accepted = 0

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal accepted
        accepted += 1
        number = accepted
        with closing(writer):
            while not writer.is_closing():
                try:
                    await reader.readuntil(b"\r\n\r\n")
                except asyncio.IncompleteReadError:
                    return
                asked.append(number)
                await serve(number, writer)

    server = await asyncio.start_server(closing_connections(accept), "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()
        yield f"http://{host}:{port}/health", asked


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("content", "answer"),
    [
        pytest.param(HEAD + b"Content-Length: 2\r\n\r\nok", HttpResponse(200, b"ok"), id="with a length"),
        pytest.param(HEAD + b"\r\nok", HttpResponse(200, b"ok"), id="to the end of the connection"),
        pytest.param(
            b"HTTP/1.0 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n", HttpResponse(503, b""), id="refusal"
        ),
    ],
)
async def test_takes(http: HttpClient, content: bytes, answer: HttpResponse) -> None:
    async with answering(content) as url:
        assert await http.request("POST", url, timeout_s=60.0, body=b"{}") == answer


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (HEAD + b"Content-Length: 9\r\n\r\nok", "2 bytes read on a total of 9"),
        (HEAD + b"Content-Length: 999999999\r\n\r\n", f"longer than {MAX_RESPONSE_BYTES}"),
        (HEAD + b"\r\n" + bytes(MAX_RESPONSE_BYTES + 1), f"longer than {MAX_RESPONSE_BYTES}"),
        (HEAD + b"Content-Length: x\r\n\r\n", "invalid literal"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "chunked"),
        (b"SSH-2.0-x\r\n\r\n", "not an HTTP answer"),
        (b"HTTP/1.1 abc\r\n\r\n", "invalid literal"),
        (b"", "the connection ended without an answer"),
    ],
)
async def test_refuses(http: HttpClient, content: bytes, reason: str) -> None:
    async with answering(content) as url:
        with pytest.raises(NoResponse, match=reason):
            await http.request("GET", url, timeout_s=60.0)


@pytest.mark.asyncio
async def test_gives_up_after_its_time(http: HttpClient) -> None:
    async with answering(None) as url:
        with pytest.raises(NoResponse, match=r"did not answer within 0\.05 s") as caught:
            await http.request("GET", url, timeout_s=0.05)
    assert not caught.value.refused


@pytest.mark.asyncio
async def test_says_that_nothing_listens(http: HttpClient) -> None:
    with pytest.raises(NoResponse, match="nothing listens at") as caught:
        await http.request("GET", f"http://127.0.0.1:{free_port()}/", timeout_s=60.0)
    assert caught.value.refused


@pytest.mark.asyncio
async def test_a_connection_that_answered_is_asked_again(http: HttpClient) -> None:
    async def serve(_: int, writer: asyncio.StreamWriter) -> None:
        writer.write(OK)

    async with connections(serve) as (url, asked):
        for _ in range(3):
            assert (await http.request("GET", url, timeout_s=60.0)).body == b"ok"
        assert asked == [1, 1, 1]
        both = [http.request("GET", url, timeout_s=60.0) for _ in range(2)]
        assert [answer.body for answer in await asyncio.gather(*both)] == [b"ok", b"ok"]
        assert sorted(asked[3:]) == [1, 2], "two at once have a connection each"


@pytest.mark.asyncio
async def test_a_connection_that_ended_since_is_opened_anew(http: HttpClient) -> None:
    async def serve(number: int, writer: asyncio.StreamWriter) -> None:
        if asked.count(number) == 2:
            writer.close()  # as a process that was replaced
        else:
            writer.write(OK)

    async with connections(serve) as (url, asked):
        for _ in range(2):
            assert (await http.request("GET", url, timeout_s=60.0)).body == b"ok"
    assert asked == [1, 1, 2]


@pytest.mark.asyncio
@pytest.mark.parametrize("end", [b"Connection: close\r\n", b"Content-Type: text/plain\r\nConnection: Close\r\n"])
async def test_a_connection_that_is_to_end_is_not_kept(http: HttpClient, end: bytes) -> None:
    async def serve(_: int, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + end + b"Content-Length: 0\r\n\r\n")

    async with connections(serve) as (url, asked):
        for _ in range(2):
            await http.request("GET", url, timeout_s=60.0)
    assert asked == [1, 2]


@pytest.mark.asyncio
async def test_half_an_answer_is_no_reason_to_ask_twice(http: HttpClient) -> None:
    async def serve(number: int, writer: asyncio.StreamWriter) -> None:
        writer.write(OK if asked.count(number) == 1 else HEAD[:9])
        if asked.count(number) == 2:
            writer.close()

    async with connections(serve) as (url, asked):
        await http.request("GET", url, timeout_s=60.0)
        with pytest.raises(NoResponse, match="9 bytes read"):
            await http.request("GET", url, timeout_s=60.0)
    assert asked == [1, 1]
