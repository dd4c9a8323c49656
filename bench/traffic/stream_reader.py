"""A cheap client for many streams: it keeps the bytes of each while it runs, and compares them afterwards."""

import asyncio
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any, cast

from bench.traffic.contenders import MODEL

_PROMPT = "Tell me about number"
_MADE_UP = re.compile(rb'"(?:created|created_at|completed_at)": ?[0-9.]+|"(?:id|item_id|call_id)": ?"[^"]*"')
"""What each engine makes up: ids and times."""
_END = b"\r\n"


@dataclass(frozen=True)
class Dialect:
    path: str
    limit: str
    """The member of the body that limits the tokens."""
    prompt: str
    more: dict[str, Any] = field(default_factory=dict)

    def request(self, number: int, tokens: int, model: str = MODEL) -> dict[str, Any]:
        text = f"{_PROMPT} {number}"
        prompt: Any = [{"role": "user", "content": text}] if self.prompt == "messages" else text
        limited = {self.limit: tokens, "temperature": 0, **self.more}
        return {"model": model, "stream": True, self.prompt: prompt, **limited}


_COUNTED = {"stream_options": {"include_usage": True}, "ignore_eos": True}
DIALECTS = {
    "chat": Dialect("/v1/chat/completions", "max_tokens", "messages", _COUNTED),
    "completions": Dialect("/v1/completions", "max_tokens", "prompt", _COUNTED),
    "responses": Dialect("/v1/responses", "max_output_tokens", "input", {"ignore_eos": True}),
    "messages": Dialect("/v1/messages", "max_tokens", "messages", {"ignore_eos": True}),
}


@dataclass(frozen=True)
class Seen:
    """One stream as its client saw it. `events`: without what engines make up."""

    text: str = ""
    usage: tuple[int, int] = (0, 0)
    ended: bool = False
    error: str = ""
    events: tuple[bytes, ...] = ()
    longest_pause_s: float = 0.0
    began_at: float = 0.0
    ended_at: float = 0.0

    @property
    def is_cut(self) -> bool:
        return bool(self.error) or not self.ended


class _Answer(asyncio.Protocol):
    def __init__(self, request: bytes) -> None:
        self.request = request
        self.pieces: list[bytes] = []
        self.longest_pause_s = 0.0
        self.began_at = self.last_at = monotonic()
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).write(self.request)

    def data_received(self, data: bytes) -> None:
        now = monotonic()
        if self.pieces:
            self.longest_pause_s = max(self.longest_pause_s, now - self.last_at)
        self.last_at = now
        self.pieces.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(exc)


class StreamReader:
    """Reads streams of one dialect. Equal answers are parsed once."""

    def __init__(self, name: str, tokens: int, model: str = MODEL) -> None:
        self._name = name
        self._tokens = tokens
        self._model = model
        self._parsed: dict[bytes, Seen] = {}

    async def read(self, port: int, number: int, limit_s: float = 600.0) -> Callable[[], Seen]:
        """Reads one stream to its end; what is returned says later what was in it."""
        dialect = DIALECTS[self._name]
        body = json.dumps(dialect.request(number, self._tokens, self._model)).encode()
        head = f"POST {dialect.path} HTTP/1.1\r\nhost: bench\r\nconnection: close\r\ncontent-type: application/json\r\n"
        request = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
        loop = asyncio.get_running_loop()
        try:
            transport, answer = await loop.create_connection(lambda: _Answer(request), "127.0.0.1", port)
        except OSError as error:
            failed = Seen(error=type(error).__name__)
            return lambda: failed
        try:
            async with asyncio.timeout(limit_s):
                await answer.ended
        except TimeoutError:
            transport.abort()
        whole = b"".join(answer.pieces)
        return lambda: replace(
            self._seen(whole),
            longest_pause_s=answer.longest_pause_s,
            began_at=answer.began_at,
            ended_at=answer.last_at,
        )

    def _seen(self, whole: bytes) -> Seen:
        head, _, rest = whole.partition(b"\r\n\r\n")
        body, is_whole = dechunked(rest) if b"chunked" in head.lower() else (rest, True)
        if not head.startswith(b"HTTP/1.1 200"):
            return Seen(error=f"status {head[9:12].decode('latin-1') or 'none'}: {body[:200]!r}")
        text = _MADE_UP.sub(b'"":0', body)
        if (seen := self._parsed.get(text)) is None:
            seen = self._parsed[text] = parsed(self._name, text)
        return seen if is_whole else replace(seen, ended=False)


def dechunked(rest: bytes) -> tuple[bytes, bool]:
    """Returns the body without the framing of its chunks, and whether the last chunk is there."""
    pieces: list[bytes] = []
    at = 0
    while (line := rest.find(_END, at)) >= 0:
        length = int(rest[at:line], 16)
        if not length:
            return b"".join(pieces), True
        pieces.append(rest[line + 2 : line + 2 + length])
        at = line + 4 + length
    return b"".join(pieces), False


def parsed(name: str, text: bytes) -> Seen:
    """Reads the whole events of a stream in one of the dialects."""
    seen: dict[str, Any] = {"text": "", "events": []}
    for line in text[: text.rfind(b"\n\n") + 1].split(b"\n"):
        if line.startswith(b": "):
            seen["error"] = "a mark reached the client"
        elif line == b"data: [DONE]":
            seen["ended"] = True
        elif line.startswith(b"data: "):
            seen["events"].append(line[6:])
            _note(name, json.loads(line[6:]), seen)
    seen["events"] = tuple(seen["events"])
    return Seen(**seen)


def _note(name: str, event: dict[str, Any], seen: dict[str, Any]) -> None:
    if event.get("error"):
        seen["error"] = str(event["error"].get("code") or event["error"].get("type"))
    kind = event.get("type", "")
    if name in ("chat", "completions"):
        for choice in event.get("choices", ()):
            seen["text"] += choice.get("text") or choice.get("delta", {}).get("content") or ""
        if usage := event.get("usage"):
            seen["usage"] = usage["prompt_tokens"], usage["completion_tokens"]
    elif name == "responses":
        seen["text"] += event["delta"] if kind == "response.output_text.delta" else ""
        if kind in ("response.completed", "response.incomplete"):
            usage = event["response"]["usage"]
            seen |= {"ended": True, "usage": (usage["input_tokens"], usage["output_tokens"])}
    else:
        seen["text"] += event["delta"].get("text", "") if kind == "content_block_delta" else ""
        seen["ended"] = seen.get("ended", False) or kind == "message_stop"
        if kind == "message_delta":
            seen["usage"] = event["usage"]["input_tokens"], event["usage"]["output_tokens"]
