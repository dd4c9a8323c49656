"""Counts the tokens of one answer while it passes. Pure, and cheap: no event of a token is decoded.

While a stream runs, every server-sent event is one token. At its end the engine's own usage corrects the count, where
the answer carries one.
"""

from engine_agent.cell_proxy.usage_reader import TokenUsage, UsageReader
from engine_agent.protocol.api_surface import Counting

_ERROR_EVENT = b'data: {"error"'
_DONE_EVENT = b"data: [DONE]"
_TAIL_BYTES = 4
"""As many as the end of an event has."""


def is_error_event(piece: bytes) -> bool:
    """True for a piece of a stream that begins with an error event, as vLLM writes it."""
    return piece.startswith(_ERROR_EVENT)


class TokenCount:
    """The tokens of one answer; `streaming` says that it is a `text/event-stream`."""

    __slots__ = ("_reader", "_streaming", "_tail", "errors", "tokens")

    def __init__(self, counting: Counting = Counting.STREAM_OPTIONS, *, streaming: bool) -> None:
        self._streaming = streaming
        self._reader = UsageReader(counting, streaming=streaming)
        self._tail = b""
        self.tokens = 0
        """Events of tokens so far."""
        self.errors = 0

    @property
    def told(self) -> TokenUsage | None:
        return self._reader.told

    def add(self, piece: bytes, *, complete: bool = False) -> int:
        """Take the next bytes of the body; returns how many token events they end (0 unless streaming)."""
        self._reader.add(piece, complete=complete)
        tail = self._tail
        self._tail = (tail + piece)[-_TAIL_BYTES:] if len(piece) < _TAIL_BYTES else piece[-_TAIL_BYTES:]
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
        """At the end of the answer: by how much its events differ from what its engine says; often negative."""
        return 0 if self.told is None else self.told.completion - self.tokens

    @property
    def at_boundary(self) -> bool:
        """True between two events, where another event may be put in."""
        return not self._tail or self._tail.endswith((b"\n\n", b"\r\n\r\n"))


def _is_no_token(piece: bytes, *, first: bool) -> int:
    """Events in this piece that carry no token: the end mark, the usage, and the role that opens a chat."""
    usage = piece.count(b'"choices":[]') + piece.count(b'"choices": []')
    done = piece.startswith(_DONE_EVENT) or b"\n" + _DONE_EVENT in piece
    opening = first and b'"role":' in piece and (b'"content":""' in piece or b'"content": ""' in piece)
    return usage + done + opening
