"""Streams a chat completion from an ingress to a browser. Nothing is stored or logged; when the browser disconnects,
the connection to the ingress is closed, which ends generation."""

import json
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing

from controlplane.chat_stream import ChatStreamParser, error_message
from traffic.planning.routing import IngressAddress
from traffic.services.ingress_client import ResponseHead, StreamBroken, StreamLimits, ingress_stream

MAX_PER_USER = 3
MAX_PER_PROCESS = 32
"""A chat holds a connection for minutes, and the dashboard must stay quick."""
LIMITS = StreamLimits()

_running: Counter[str] = Counter()


def chat_limit_reached(user: str) -> str:
    """Why this user may start no further chat now, "" if one may."""
    if _running[user] >= MAX_PER_USER:
        return f"you have {MAX_PER_USER} chats running; stop one or wait until it ends"
    if _running.total() >= MAX_PER_PROCESS:
        return f"this server runs {MAX_PER_PROCESS} chats, its limit; try again in a minute"
    return ""


async def stream_chat(
    user: str, ingress: IngressAddress, body: bytes, headers: dict[str, str], limits: StreamLimits = LIMITS
) -> AsyncGenerator[bytes, None]:
    """Events for the browser: `head` (the cell that serves), `text`, at last `end` with figures, or `error`."""
    _running[user] += 1
    parser = ChatStreamParser(time.monotonic())
    try:
        async with aclosing(ingress_stream(ingress, "/v1/chat/completions", body, headers, limits)) as parts:
            async for event in _events(parts, parser):
                yield event
    except StreamBroken as broken:
        yield _event("error", {"message": str(broken), **parser.figures()})
    finally:
        _running[user] -= 1
        if not _running[user]:
            del _running[user]


async def _events(parts: AsyncIterator[ResponseHead | bytes], parser: ChatStreamParser) -> AsyncIterator[bytes]:
    status, body = 200, b""
    async for part in parts:
        if isinstance(part, ResponseHead):
            status = part.status
            yield _event("head", {"status": status, **_served_by(part)})
        elif status != 200:
            body += part
        else:
            for text in parser.feed(part, time.monotonic()):
                yield _event("text", {"text": text})
    if status != 200:
        yield _event("error", {"message": f"{status}: {_error_in(body)}", **parser.figures()})
    elif parser.error or not parser.is_done:
        message = parser.error or "the response ended early"
        yield _event("error", {"message": message, **parser.figures()})
    else:
        yield _event("end", parser.figures())


def _served_by(head: ResponseHead) -> dict[str, str]:
    return {
        name: head.headers.get(f"x-switchyard-{name}", "")
        for name in ("cell", "region", "deployment")
    }  # fmt: skip


def _error_in(body: bytes) -> str:
    try:
        return error_message(json.loads(body))
    except ValueError:
        return body[:300].decode("utf-8", "replace")


def _event(kind: str, data: Mapping[str, object]) -> bytes:
    return f"event: {kind}\ndata: {json.dumps(data)}\n\n".encode()
