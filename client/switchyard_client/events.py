"""Server-sent events of an answer, from its bytes."""

import json
from collections.abc import AsyncGenerator, Iterator
from typing import Any, Final

import httpx

from switchyard_client.answers import ApiError, BrokenOff, Event

MAX_EVENT_BYTES: Final = 16 * 1024 * 1024
_LAST_EVENTS = frozenset({"response.completed", "response.incomplete", "response.failed", "message_stop"})


class SseParser:
    """Server-sent events from bytes, whose lines end with CR, LF or both. Each byte is read once, however cut."""

    def __init__(self) -> None:
        self._line: list[bytes] = []  # pieces of a line without its end
        self._fields: list[tuple[bytes, bytes]] = []
        self._size = 0
        self._after_return = False

    def feed(self, piece: bytes) -> Iterator[tuple[str, bytes]]:
        """Returns the complete events: name and data."""
        if self._after_return:
            piece = piece.removeprefix(b"\n")
            self._after_return = False
        if not piece:
            return
        self._after_return = piece.endswith(b"\r")
        *whole, rest = piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        for end in whole:
            self._grow(len(end))
            yield from self._ended(b"".join([*self._line, end]))
        self._grow(len(rest))
        self._line.append(rest)

    def _ended(self, line: bytes) -> Iterator[tuple[str, bytes]]:
        self._line = []
        if line:
            name, _, value = line.partition(b":")
            self._fields.append((name, value.removeprefix(b" ")))
            return
        data = b"\n".join(value for name, value in self._fields if name == b"data")
        names = [value.strip().decode("utf-8", "replace") for name, value in self._fields if name == b"event"]
        self._fields, self._size = [], 0
        if data:
            yield (names[-1] if names else ""), data

    def _grow(self, size: int) -> None:
        self._size += size
        if self._size > MAX_EVENT_BYTES:
            raise BrokenOff(f"an event is longer than {MAX_EVENT_BYTES} bytes")


async def events_of(response: httpx.Response) -> AsyncGenerator[Event, None]:
    parser, is_over = SseParser(), False
    try:
        async for piece in response.aiter_bytes():
            for name, data in parser.feed(piece):
                if data == b"[DONE]":
                    is_over = True
                    continue
                document = json_object(data, response)
                if document.get("error") and document.get("object") != "response":
                    raise ApiError(response.status_code, data, response.headers)
                is_over = is_over or (name or document.get("type")) in _LAST_EVENTS
                yield Event(name, document)
    except httpx.TransportError as error:
        raise BrokenOff(f"the stream of {response.url} broke off: {error!r}") from error
    if not is_over:
        raise BrokenOff(f"the stream of {response.url} ended before its last event")


def json_object(content: bytes, response: httpx.Response) -> dict[str, Any]:
    try:
        document = json.loads(content)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise BrokenOff(f"{response.url} answered no JSON object: {content[:200]!r}")
    return document
