"""What leader and followers of a cell send each other after the handshake: one JSON frame a line."""

import asyncio

import msgspec
from msgspec import Struct

from engine_agent.engines.cell.handshake import MAX_LINE_BYTES
from engine_agent.engines.sim.faults import Effects
from engine_agent.engines.sim.settings import HEARTBEAT_S, SILENT_BEATS
from engine_agent.protocol.messages import StepTimes


class BadFrame(ValueError):
    """A line that is no frame of this protocol."""


class Beat(Struct, frozen=True, tag="beat"):
    """I live; these are the effects of my faults, and from a leader what the cell computed. The next one says
    everything again."""

    effects: Effects = Effects()
    work: StepTimes = StepTimes()


class Farewell(Struct, frozen=True, tag="farewell"):
    """I am about to go: stopped on purpose (`failed` False) or because the cell failed."""

    reason: str
    failed: bool


Frame = Beat | Farewell

_encoder = msgspec.json.Encoder()
_decoder: "msgspec.json.Decoder[Frame]" = msgspec.json.Decoder(Frame)


def encode(frame: Frame) -> bytes:
    return _encoder.encode(frame) + b"\n"


async def read_line(reader: asyncio.StreamReader, timeout_s: float) -> bytes:
    """The next line of a connection.

    Raises:
        EOFError: the other side closed the connection, or its process is gone.
        TimeoutError: nothing came for `timeout_s` seconds.
        BadFrame: the line is too long.
    """
    async with asyncio.timeout(timeout_s):
        try:
            line = await reader.readline()
        except ValueError as error:
            raise BadFrame(f"a line longer than {MAX_LINE_BYTES} bytes") from error
        except OSError as error:
            raise EOFError(str(error)) from error
    if not line.endswith(b"\n"):
        raise EOFError("closed")
    return line


async def read_frame(reader: asyncio.StreamReader, timeout_s: float) -> Frame:
    """The next frame of a connection.

    Raises:
        EOFError, TimeoutError: see `read_line`.
        BadFrame: not a frame.
    """
    line = await read_line(reader, timeout_s)
    try:
        return _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadFrame(str(error)) from error


async def read_living(reader: asyncio.StreamReader) -> Frame:
    """The next frame of a member that beats.

    It waits for one heartbeat at a time: after a stall of this process itself, of whatever length, the frames that came
    meanwhile are still read before anyone is called silent.

    Raises:
        EOFError, BadFrame: see `read_frame`.
        TimeoutError: `SILENT_BEATS` heartbeats in turn did not come.
    """
    for _ in range(SILENT_BEATS - 1):
        try:
            return await read_frame(reader, HEARTBEAT_S)
        except TimeoutError:
            continue
    return await read_frame(reader, HEARTBEAT_S)
