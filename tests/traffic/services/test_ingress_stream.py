"""An answer arrives piece by piece; what is slow, cut off or too long is told; whoever leaves cuts the connection."""

import asyncio
from contextlib import suppress

import pytest

from tests.traffic.answering import ingress
from traffic.services.ingress_stream import Head, StreamBroken, StreamLimits, stream_ingress

pytestmark = pytest.mark.asyncio

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-Switchyard-Cell: c-1\r\n\r\n"
QUICK = StreamLimits(first_s=5, silent_s=5, whole_s=10)


async def read(address: tuple[str, int], limits: StreamLimits = QUICK) -> list[Head | bytes]:
    return [part async for part in stream_ingress(address, "/v1/x", b"{}", {"X-One": "1"}, limits)]


async def test_head_and_pieces_come_in_order() -> None:
    async def says(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"2\r\nab\r\n" + b"1\r\nc\r\n0\r\n\r\n")

    async with ingress(says) as address:
        head, *pieces = await read(address)
    assert isinstance(head, Head)
    assert (head.status, head.headers["x-switchyard-cell"]) == (200, "c-1")
    assert pieces == [b"ab", b"c"]


async def test_an_answer_that_breaks_off_is_told() -> None:
    async def says(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"2\r\nab\r\n")

    async with ingress(says) as address:
        with pytest.raises(StreamBroken, match="before the answer was whole"):
            await read(address)


@pytest.mark.parametrize(
    "limits", [StreamLimits(first_s=0.05), StreamLimits(silent_s=0.05), StreamLimits(whole_s=0.05)]
)
async def test_silence_ends_at_its_limit(limits: StreamLimits) -> None:
    async def says(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if limits.first_s > 1:
            writer.write(HEAD)
        await reader.read()

    async with ingress(says) as address:
        with pytest.raises(StreamBroken, match="nothing more came"):
            await read(address, limits)


async def test_an_answer_without_end_is_cut() -> None:
    async def says(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"64\r\n" + b"x" * 100 + b"\r\n")

    async with ingress(says) as address:
        with pytest.raises(StreamBroken, match="longer than 50 bytes"):
            await read(address, StreamLimits(max_bytes=50))


async def test_nobody_there_is_told() -> None:
    with pytest.raises(StreamBroken, match="cannot be reached"):
        await read(("127.0.0.1", 1))


async def test_who_stops_reading_cuts_the_connection() -> None:
    gone = asyncio.Event()

    async def says(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"1\r\na\r\n")
        with suppress(ConnectionError):
            await reader.read()
        gone.set()

    async with ingress(says) as address:
        parts = stream_ingress(address, "/v1/x", b"{}", {}, QUICK)
        assert isinstance(await anext(parts), Head)
        assert await anext(parts) == b"a"
        await parts.aclose()
        await asyncio.wait_for(gone.wait(), 5)
