"""What is a frame between members of a cell, and what is none."""

import asyncio

import pytest

from engine_agent.engines.handshake import MAX_LINE_BYTES
from engine_agent.engines.sim.cell_link import BadFrame, Beat, encode, read_frame


def read(line: bytes) -> object:
    async def reading() -> object:
        reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
        reader.feed_data(line)
        reader.feed_eof()
        return await read_frame(reader, timeout_s=1.0)

    return asyncio.run(reading())


def test_a_frame_is_read_back() -> None:
    assert read(encode(Beat())) == Beat()


@pytest.mark.parametrize("line", [b"hello\n", b'{"type":"x"}\n', b"\xff\n", b"x" * (MAX_LINE_BYTES + 1) + b"\n"])
def test_a_line_that_is_no_frame_is_refused(line: bytes) -> None:
    with pytest.raises(BadFrame):
        read(line)


@pytest.mark.parametrize("line", [b"", b'{"type":"beat"}'])
def test_a_closed_connection_is_an_end_and_no_frame(line: bytes) -> None:
    with pytest.raises(EOFError):
        read(line)
