"""Connections are closed however their conversations end, also those that never begin."""

import asyncio
from typing import Any

import pytest

from engine_agent.protocol.conversations import Converse, conversing

pytestmark = pytest.mark.asyncio


async def heard(converse: Converse, *, cancelled: bool = False) -> bytes:
    """What a client reads until its connection is closed; `cancelled`: before its conversation's first step."""
    begin = conversing(converse)

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        before = asyncio.all_tasks()
        begin(reader, writer)
        for task in asyncio.all_tasks() - before:
            if cancelled:
                task.cancel()

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        said = await reader.read()
        writer.close()
        await writer.wait_closed()
        return said


async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"hello")
    await writer.drain()


async def test_a_conversation_that_ends_closes_its_connection() -> None:
    assert await heard(greet) == b"hello"


async def test_one_that_never_began_does_too() -> None:
    assert await heard(greet, cancelled=True) == b""


async def test_one_that_fails_does_too_and_the_loop_hears_of_it() -> None:
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))

    async def fail(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hel")
        raise ValueError("lost")

    assert await heard(fail) == b"hel"
    assert [str(context["exception"]) for context in told] == ["lost"]
