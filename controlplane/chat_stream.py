"""Parses a streamed chat completion: its text piece by piece, and its timing. Pure; callers pass times, in seconds of
one clock."""

import json
from collections.abc import Iterator
from typing import Any

MAX_LINE_BYTES = 1024 * 1024
KEY_VARIABLE = "SWITCHYARD_KEY"
"""The environment variable with an application's key."""


class ChatStreamParser:
    """One completion. `feed` it bytes as they arrive; `error` is the server's error message."""

    def __init__(self, sent_at: float) -> None:
        self.sent_at = sent_at
        self.first_at: float | None = None
        self.last_at = sent_at
        self.error = ""
        self.finish = ""
        self.is_done = False
        self._chunks = 0
        self._completion_tokens: int | None = None
        self._partial_line = b""

    def feed(self, piece: bytes, now: float) -> Iterator[str]:
        """The text of the events that this piece completes."""
        *lines, self._partial_line = (self._partial_line + piece).split(b"\n")
        if len(self._partial_line) > MAX_LINE_BYTES:
            self.error, self._partial_line = "a line of the response is too long", b""
        for line in lines:
            if line.startswith(b"data:"):
                yield from self._event(line[5:].strip(), now)

    def figures(self) -> dict[str, float | int | str | None]:
        """TTFT and duration in ms; `tokens_per_s` over the time after the first token, None for fewer than two."""
        tokens = self._chunks if self._completion_tokens is None else self._completion_tokens
        streaming_s = self.last_at - self.first_at if self.first_at is not None else 0.0
        return {
            "ttft_ms": None if self.first_at is None else round(1000 * (self.first_at - self.sent_at), 1),
            "took_ms": round(1000 * (self.last_at - self.sent_at), 1),
            "tokens": tokens,
            "tokens_per_s": round((tokens - 1) / streaming_s, 1) if tokens > 1 and streaming_s > 0 else None,
            "finish": self.finish,
        }

    def _event(self, text: bytes, now: float) -> Iterator[str]:
        if text == b"[DONE]":
            self.is_done = True
            return
        try:
            payload = json.loads(text)
        except ValueError:
            return
        if not isinstance(payload, dict):
            return
        if "error" in payload:
            self.error = error_message(payload)
            return
        usage = payload.get("usage")
        if isinstance(usage, dict) and isinstance(usage.get("completion_tokens"), int):
            self._completion_tokens = usage["completion_tokens"]
        for choice in payload.get("choices") or ():
            if delta := self._delta(choice):
                self.first_at = self.first_at if self.first_at is not None else now
                self.last_at = now
                self._chunks += 1
                yield delta

    def _delta(self, choice: Any) -> str:
        if not isinstance(choice, dict):
            return ""
        self.finish = str(choice.get("finish_reason") or self.finish)
        delta = choice.get("delta")
        if not isinstance(delta, dict):
            return ""
        text = delta.get("content")
        calls = delta.get("tool_calls")
        return (text if isinstance(text, str) else "") + "".join(
            map(_call_text, calls if isinstance(calls, list) else ())
        )


def _call_text(call: Any) -> str:
    """A piece of a tool call: the function's name in its first piece, then its arguments as they are generated."""
    function = call.get("function") if isinstance(call, dict) else None
    pieces = (function.get("name"), function.get("arguments")) if isinstance(function, dict) else ()
    name, arguments = (piece if isinstance(piece, str) else "" for piece in pieces or ("", ""))
    return f"\n{name} {arguments}" if name else arguments


def error_message(payload: Any) -> str:
    """The message of an error in OpenAI's format."""
    error = payload.get("error") if isinstance(payload, dict) else None
    if isinstance(error, dict):
        return str(error.get("message") or error.get("code") or "the cell reported an error")[:1000]
    return str(error or "the cell reported an error")[:1000]
