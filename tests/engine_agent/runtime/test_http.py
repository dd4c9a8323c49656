"""The agent's small HTTP client takes whole answers and gives one clear reason for everything else."""

import pytest

from engine_agent.runtime.http import MAX_RESPONSE_BYTES, HttpResponse, NoResponse, request
from tests.engine_agent.runtime.agents import free_ports
from tests.engine_agent.runtime.answering import answering

HEAD = b"HTTP/1.1 200 OK\r\n"


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
async def test_takes(content: bytes, answer: HttpResponse) -> None:
    async with answering(content) as url:
        assert await request("POST", url, timeout_s=5.0, body=b"{}") == answer


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
        (b"", "0 bytes read"),
    ],
)
async def test_refuses(content: bytes, reason: str) -> None:
    async with answering(content) as url:
        with pytest.raises(NoResponse, match=reason):
            await request("GET", url, timeout_s=5.0)


@pytest.mark.asyncio
async def test_gives_up_after_its_time() -> None:
    async with answering(None) as url:
        with pytest.raises(NoResponse, match=r"did not answer within 0\.05 s") as caught:
            await request("GET", url, timeout_s=0.05)
    assert not caught.value.refused


@pytest.mark.asyncio
async def test_says_that_nothing_listens() -> None:
    with pytest.raises(NoResponse, match="nothing listens at") as caught:
        await request("GET", f"http://127.0.0.1:{free_ports(1)}/", timeout_s=5.0)
    assert caught.value.refused
