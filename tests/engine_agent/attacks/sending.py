"""Sends each attack on a separate connection and reads the answer."""

import asyncio
import contextlib

from tests.engine_agent.attacks.attacks import Attack

READ_LIMIT_BYTES = 1024 * 1024
STREAM_READ_S = 0.5
"""How long an attack that leaves reads before it closes."""


async def answer_to(attack: Attack, host: str, port: int, patience_s: float = 90.0) -> bytes:
    """The bytes that came back: up to the end of the first answer, the end of the connection, or `patience_s`.

    Raises:
        TimeoutError: no answer came within `patience_s`, and the connection stayed open.
        OSError: the connection could not be opened.
    """
    reader, writer = await asyncio.open_connection(host, port)
    try:
        with contextlib.suppress(ConnectionError):
            for piece in attack.pieces:
                writer.write(piece)
                await writer.drain()
                if attack.pause_s:
                    await asyncio.sleep(attack.pause_s)
        return await _read(reader, attack, patience_s)
    finally:
        writer.transport.abort()


async def _read(reader: asyncio.StreamReader, attack: Attack, patience_s: float) -> bytes:
    answer = b""
    try:
        async with asyncio.timeout(STREAM_READ_S if attack.leaves else patience_s):
            while len(answer) < READ_LIMIT_BYTES and not is_whole(answer):
                piece = await reader.read(65536)
                if not piece:
                    break
                answer += piece
    except ConnectionError:
        pass
    except TimeoutError:
        if not attack.leaves:
            raise
    return answer


def is_whole(answer: bytes) -> bool:
    """Whether the first non-interim answer is complete."""
    head, end, rest = answer.partition(b"\r\n\r\n")
    if not end:
        return False
    if head[9:12] == b"100":
        return is_whole(rest)
    lower = head.lower()
    if b"transfer-encoding: chunked" in lower:
        return rest.endswith(b"0\r\n\r\n")
    for line in lower.split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return len(rest) >= int(line.partition(b":")[2])
    return False
