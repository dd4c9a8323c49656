"""Counts the tokens of one answer from its bytes while they pass. Pure, and cheap: no event is decoded.

While a stream runs, every server-sent event is one token. At its end the engine's own `usage` corrects the count, where
the answer carries one. The bytes are never changed.
"""

import re

_TAIL_BYTES = 1024
"""`usage` with its details and the final `[DONE]` take some 300 bytes."""
_USAGE = re.compile(rb'"completion_tokens":\s*(\d{1,9})')
_PROMPT = re.compile(rb'"prompt_tokens":\s*(\d{1,9})')
"""Text that a model writes cannot match: inside a JSON string the quotes are escaped."""
_ERROR_EVENT = b'data: {"error"'
_DONE_EVENT = b"data: [DONE]"


def is_error_event(piece: bytes) -> bool:
    """True for a piece of a stream that begins with an error event, as vLLM writes it."""
    return piece.startswith(_ERROR_EVENT)


class TokenCount:
    """The tokens of one answer; `streaming` says that it is a `text/event-stream`."""

    __slots__ = ("_streaming", "_tail", "errors", "prompt_tokens", "tokens")

    def __init__(self, *, streaming: bool) -> None:
        self._streaming = streaming
        self._tail = b""
        self.tokens = 0
        self.prompt_tokens: int | None = None
        """Known only from `usage`."""
        self.errors = 0

    def add(self, piece: bytes) -> int:
        """Take the next bytes of the body; returns how many token events they end (0 unless streaming)."""
        tail = self._tail
        self._tail = piece[-_TAIL_BYTES:] if len(piece) >= _TAIL_BYTES else (tail + piece)[-_TAIL_BYTES:]
        if not self._streaming:
            return 0
        ended = (tail[-1:] + piece).count(b"\n\n") + (tail[-2:] + piece).count(b"\n\r\n")
        ended -= _is_no_token(piece, first=not tail)
        if is_error_event(piece):
            self.errors += 1
            ended -= 1
        ended = max(0, ended)
        self.tokens += ended
        return ended

    def settle(self) -> int:
        """At the end of the answer: correct the counts by its `usage`; returns the correction, often negative."""
        if prompts := _PROMPT.findall(self._tail):
            self.prompt_tokens = int(prompts[-1])
        matches = _USAGE.findall(self._tail)
        if not matches:
            return 0
        correction = int(matches[-1]) - self.tokens
        self.tokens += correction
        return correction

    @property
    def at_boundary(self) -> bool:
        """True between two events, where another event may be put in."""
        return not self._tail or self._tail.endswith((b"\n\n", b"\r\n\r\n"))


def usage_of(body: bytes) -> tuple[int, int] | None:
    """Prompt and completion tokens of an answer that is here as a whole and no stream, as its engine reports."""
    tail = body[-_TAIL_BYTES:]
    prompt, completion = _PROMPT.findall(tail), _USAGE.findall(tail)
    return (int(prompt[-1]), int(completion[-1])) if prompt and completion else None


def _is_no_token(piece: bytes, *, first: bool) -> int:
    """Events in this piece that carry no token: the end mark, the usage, and the role that opens a chat."""
    usage = piece.count(b'"choices":[]') + piece.count(b'"choices": []')
    done = piece.startswith(_DONE_EVENT) or b"\n" + _DONE_EVENT in piece
    opening = first and b'"role":' in piece and (b'"content":""' in piece or b'"content": ""' in piece)
    return usage + done + opening
