"""Events that a browser gets of a chat: the cell that serves it, text as it arrives, its figures, or the error."""

import asyncio
import json
from typing import Any

import pytest

from controlplane.dashboard.playground import MAX_PER_USER, chat_limit_reached, stream_chat
from tests.traffic.answering import Says, ingress

pytestmark = pytest.mark.asyncio

HEAD = (
    b"HTTP/1.1 200 OK\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n"
    b"X-Switchyard-Cell: c-1\r\nX-Switchyard-Region: east\r\nX-Request-Id: r-1\r\n"
    b"Server-Timing: queue;dur=1.5, engine;dur=20.0, evil;dur=1\r\n\r\n"
)


@pytest.fixture(autouse=True)
def _plain_links(settings: Any) -> None:
    settings.PLAIN_LINKS = True


def chunk(body: bytes) -> bytes:
    return f"{len(body):x}\r\n".encode() + body + b"\r\n"


def token(text: str) -> bytes:
    return chunk(b"data: " + json.dumps({"choices": [{"delta": {"content": text}}]}).encode() + b"\n\n")


async def events_of(handler: Says) -> list[tuple[str, dict[str, Any]]]:
    async with ingress(handler) as address:
        events = [event.decode() async for event in stream_chat("ada", address, b"{}", {})]
    pairs = [event.strip().split("\n") for event in events]
    return [(kind.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for kind, data in pairs]


async def test_a_complete_response_ends_with_its_figures() -> None:
    async def handler(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + token("One") + token(" two") + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    head, *texts, end = await events_of(handler)
    served = {"cell": "c-1", "region": "east", "deployment": "", "request_id": "r-1"}
    assert head == ("head", {"status": 200, **served, "queue_ms": "1.5", "engine_ms": "20.0"})
    assert "".join(data["text"] for _, data in texts) == "One two"
    assert (end[0], end[1]["tokens"]) == ("end", 2)


async def test_a_refusal_of_the_ingress_passes_on_its_message() -> None:
    async def handler(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        body = json.dumps({"error": {"message": "no ready cell"}}).encode()
        writer.write(f"HTTP/1.1 503 Busy\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)

    assert (await events_of(handler))[-1][1]["message"] == "503: no ready cell"


async def test_a_response_that_breaks_off_keeps_what_came() -> None:
    async def handler(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + token("One"))

    kinds = [kind for kind, _ in await events_of(handler)]
    assert kinds == ["head", "text", "error"]


async def test_a_browser_that_leaves_frees_its_slot_and_closes_the_connection() -> None:
    gone = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + token("One"))
        try:
            await reader.read()
        finally:
            gone.set()

    async with ingress(handler) as address:
        answers = [stream_chat("ada", address, b"{}", {}) for _ in range(MAX_PER_USER)]
        for answer in answers:
            await anext(answer)
        assert "chats running" in chat_limit_reached("ada")
        assert chat_limit_reached("grace") == ""
        for answer in answers:
            await answer.aclose()
        await asyncio.wait_for(gone.wait(), 60)
    assert chat_limit_reached("ada") == ""
