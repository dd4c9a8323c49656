"""The events of a response that an engine streams, on their way to its application. Pure.

Whole events pass as they are, but those that carry the response's object, in which the engine cannot know all. The last
of these is held back, so that it can say whether the response was kept.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

ENDS = frozenset({"response.completed", "response.incomplete", "response.failed"})
_OBJECT = b'"response"'
"""In what a model writes it cannot stand: there the quotes are escaped."""


@dataclass(frozen=True, slots=True)
class LastEvent:
    """The event that ends a response, as the engine gave it."""

    event: Mapping[str, Any]

    @property
    def response(self) -> dict[str, Any]:
        return dict(self.event["response"])

    def shown(self, response: Mapping[str, Any]) -> bytes:
        """The event with this object in it."""
        return event_bytes({**self.event, "response": response})


class ResponseEvents:
    """One stream. `marks` take the place of members of the response's object."""

    def __init__(self, marks: Mapping[str, Any]) -> None:
        self._marks = marks
        self._partial = bytearray()
        self._searched = 0
        self._begun: Mapping[str, Any] | None = None
        self.has_ended = False
        self.events = 0

    def feed(self, piece: bytes) -> Iterator[bytes | LastEvent]:
        """What these bytes complete."""
        self._partial += piece
        while (end := self._end()) is not None:
            event = bytes(self._partial[:end])
            del self._partial[:end]
            self.events += 1
            yield self._passed(event)

    def rest(self) -> bytes:
        """What came after the last whole event."""
        return bytes(self._partial)

    def failure(self, message: str) -> bytes:
        """The event that ends a stream which broke: its response failed, or an error if there is none yet. Empty: the
        response had ended."""
        if self.has_ended:
            return b""
        error = {"code": "server_error", "message": message}
        if self._begun is None:
            return event_bytes({"type": "error", **error, "param": None, "sequence_number": self.events})
        response = {**self._begun, "status": "failed", "error": error}
        return event_bytes({"type": "response.failed", "sequence_number": self.events, "response": response})

    def _end(self) -> int | None:
        """Where the first event ends; every byte is looked at once."""
        ends = [
            found + len(end)
            for end in (b"\n\n", b"\r\n\r\n")
            if (found := self._partial.find(end, self._searched)) >= 0
        ]
        self._searched = 0 if ends else max(0, len(self._partial) - 3)
        return min(ends, default=None)

    def _passed(self, event: bytes) -> bytes | LastEvent:
        if _OBJECT not in event:
            return event
        data = _data_of(event)
        if data is None or not isinstance(data.get("response"), dict):
            return event
        if data.get("type") in ENDS and not self.has_ended:
            self.has_ended = True
            return LastEvent(data)
        shown = {**data["response"], **self._marks}
        if data["type"] == "response.created":
            self._begun = shown
        return event_bytes({**data, "response": shown})


def event_bytes(data: Mapping[str, Any]) -> bytes:
    """An event as OpenAI's servers write it."""
    return f"event: {data['type']}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


def _data_of(event: bytes) -> dict[str, Any] | None:
    lines = [line[5:].strip() for line in event.splitlines() if line.startswith(b"data:")]
    try:
        data = json.loads(b"\n".join(lines))
    except ValueError:
        return None
    return data if isinstance(data, dict) and isinstance(data.get("type"), str) else None
