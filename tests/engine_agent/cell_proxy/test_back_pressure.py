"""A client that does not read cannot make the real proxy hold more than a few buffers for it."""

import asyncio
from collections.abc import Callable

import pytest

from tests.engine_agent.cell_proxy.engine import ONE_TOKEN, STREAM_HEAD, Turn, chunk, running_engine
from tests.engine_agent.cell_proxy.http_stream import read_chunk, read_head, request
from tests.engine_agent.cell_proxy.proxy_process import running_proxy, until

pytestmark = [pytest.mark.processes, pytest.mark.asyncio]

MIB = 1024 * 1024
TOTAL_BYTES = 64 * MIB
PIECE = b"x" * 65536
HELD_AT_MOST_BYTES = 24 * MIB
"""The kernel's own buffers of two loopback connections take most of it."""
STILL_POLLS = 20


class Progress:
    def __init__(self) -> None:
        self.sent_bytes = 0

    def stands_still(self) -> Callable[[], bool]:
        """True once nothing was sent for some polls in a row."""
        seen: list[int] = []

        def condition() -> bool:
            seen.append(self.sent_bytes)
            return len(seen) > STILL_POLLS and len(set(seen[-STILL_POLLS:])) == 1

        return condition


async def test_a_client_that_does_not_read_holds_the_engine_back() -> None:
    progress = Progress()

    async def script(turn: Turn) -> None:
        if "/v1/embeddings" in turn.message.first_line:
            await turn.send(ONE_TOKEN)
            return
        await turn.send(STREAM_HEAD)
        while progress.sent_bytes < TOTAL_BYTES:
            await turn.send(chunk(PIECE))
            progress.sent_bytes += len(PIECE)
        await turn.send(b"0\r\n\r\n")

    async with running_engine(script) as engine, running_proxy(engine) as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(request("/v1/completions", b"{}"))
        await read_head(reader)
        await until(progress.stands_still(), "the engine is held back")
        assert progress.sent_bytes < HELD_AT_MOST_BYTES
        assert (await proxy.ask(request("/v1/embeddings", b"{}"))).status == 200
        received_bytes = 0
        while piece := await read_chunk(reader):
            received_bytes += len(piece)
        assert received_bytes == TOTAL_BYTES
        writer.close()
