"""Hands a chat's answer from an ingress to a browser while it arrives. Nothing of it is stored or logged; when the
browser goes, the connection to the ingress is cut, and generation ends."""

import json
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing

from controlplane.chat_stream import AnswerReader, error_words
from traffic.services.ingress_client import ResponseHead, StreamBroken, StreamLimits, ingress_stream

MOST_PER_USER = 3
MOST_AT_ONCE = 32
"""Of one web process: a chat holds a connection for minutes, and the dashboard must stay quick."""
LIMITS = StreamLimits()

_running: Counter[str] = Counter()


def chat_refusal(user: str) -> str:
    """Why this user may begin no further chat now, "" if one may."""
    if _running[user] >= MOST_PER_USER:
        return f"you have {MOST_PER_USER} answers under way; stop one, or wait for its end"
    if _running.total() >= MOST_AT_ONCE:
        return f"{MOST_AT_ONCE} answers are under way here, which is the most; try again in a while"
    return ""


async def relay_chat(
    user: str, address: tuple[str, int], body: bytes, headers: dict[str, str], limits: StreamLimits = LIMITS
) -> AsyncGenerator[bytes, None]:
    """Events for the browser: `head` (who answers), `text`, at last `end` with figures, or `trouble`."""
    _running[user] += 1
    reader = AnswerReader(time.monotonic())
    try:
        async with aclosing(ingress_stream(address, "/v1/chat/completions", body, headers, limits)) as parts:
            async for event in _events(parts, reader):
                yield event
    except StreamBroken as broken:
        yield _event("trouble", {"message": str(broken), **reader.figures()})
    finally:
        _running[user] -= 1
        if not _running[user]:
            del _running[user]


async def _events(parts: AsyncIterator[ResponseHead | bytes], reader: AnswerReader) -> AsyncIterator[bytes]:
    status, refused = 200, b""
    async for part in parts:
        if isinstance(part, ResponseHead):
            status = part.status
            yield _event("head", {"status": status, **_who(part)})
        elif status != 200:
            refused += part
        else:
            for text in reader.feed(part, time.monotonic()):
                yield _event("text", {"text": text})
    if status != 200:
        yield _event("trouble", {"message": f"{status}: {_words(refused)}", **reader.figures()})
    elif reader.error or not reader.is_done:
        broke = reader.error or "the answer ended before it was whole"
        yield _event("trouble", {"message": broke, **reader.figures()})
    else:
        yield _event("end", reader.figures())


def _who(head: ResponseHead) -> dict[str, str]:
    return {
        name: head.headers.get(f"x-switchyard-{name}", "")
        for name in ("cell", "region", "deployment")
    }  # fmt: skip


def _words(refused: bytes) -> str:
    try:
        return error_words(json.loads(refused))
    except ValueError:
        return refused[:300].decode("utf-8", "replace")


def _event(kind: str, said: Mapping[str, object]) -> bytes:
    return f"event: {kind}\ndata: {json.dumps(said)}\n\n".encode()
