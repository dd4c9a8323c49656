"""Reads a streamed chat completion: its text piece by piece, and when which came. Pure; times in seconds of one clock
are handed in."""

import json
from collections.abc import Iterator
from typing import Any

LONGEST_LINE_BYTES = 1024 * 1024


class AnswerReader:
    """One answer. `feed` it bytes as they come; `error` is what the other side said went wrong."""

    def __init__(self, asked_at: float) -> None:
        self.asked_at = asked_at
        self.first_at: float | None = None
        self.last_at = asked_at
        self.error = ""
        self.finish = ""
        self.is_done = False
        self._pieces = 0
        self._counted: int | None = None
        self._rest = b""

    def feed(self, piece: bytes, now: float) -> Iterator[str]:
        """The text that became whole with this piece."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) > LONGEST_LINE_BYTES:
            self.error, self._rest = "a line of the answer is too long", b""
        for line in lines:
            if line.startswith(b"data:"):
                yield from self._event(line[5:].strip(), now)

    def figures(self) -> dict[str, float | int | str | None]:
        """TTFT and duration in ms; `tokens_per_s` over the time after the first token, None for fewer than two."""
        tokens = self._pieces if self._counted is None else self._counted
        streaming_s = self.last_at - self.first_at if self.first_at is not None else 0.0
        return {
            "ttft_ms": None if self.first_at is None else round(1000 * (self.first_at - self.asked_at), 1),
            "took_ms": round(1000 * (self.last_at - self.asked_at), 1),
            "tokens": tokens,
            "tokens_per_s": round((tokens - 1) / streaming_s, 1) if tokens > 1 and streaming_s > 0 else None,
            "finish": self.finish,
        }

    def _event(self, text: bytes, now: float) -> Iterator[str]:
        if text == b"[DONE]":
            self.is_done = True
            return
        try:
            said = json.loads(text)
        except ValueError:
            return
        if not isinstance(said, dict):
            return
        if "error" in said:
            self.error = error_words(said)
            return
        usage = said.get("usage")
        if isinstance(usage, dict) and isinstance(usage.get("completion_tokens"), int):
            self._counted = usage["completion_tokens"]
        for choice in said.get("choices") or ():
            if delta := self._delta(choice):
                self.first_at = self.first_at if self.first_at is not None else now
                self.last_at = now
                self._pieces += 1
                yield delta

    def _delta(self, choice: Any) -> str:
        if not isinstance(choice, dict):
            return ""
        self.finish = str(choice.get("finish_reason") or self.finish)
        delta = choice.get("delta")
        text = delta.get("content") if isinstance(delta, dict) else None
        return text if isinstance(text, str) else ""


def error_words(said: Any) -> str:
    """What an error of OpenAI's form says."""
    error = said.get("error") if isinstance(said, dict) else None
    if isinstance(error, dict):
        return str(error.get("message") or error.get("code") or "the cell reported an error")[:1000]
    return str(error or "the cell reported an error")[:1000]
