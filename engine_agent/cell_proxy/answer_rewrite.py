"""Rewrites answers of engines on their way to the client, where they differ from what its dialect says. Pure.

From a stream whose client did not request a usage count it takes the usage event. Errors inside a stream get the form
of its path. A stream of Responses ends with `response.incomplete` or `response.failed` where its response does, and a
message has an id that begins with `msg_`. Whole events pass at once, and those that need no change pass as they are.
"""

import re
from typing import Any, ClassVar, Final, Protocol

import msgspec

from engine_agent.cell_proxy.api_paths import CELL_PATHS
from engine_agent.cell_proxy.engine_errors import EngineError, read_error
from engine_agent.cell_proxy.error_bodies import error_in_form
from engine_agent.cell_proxy.refusal import Refusal, error_event
from engine_agent.protocol.api_surface import Counting, ErrorForm

_END = b"\n\n"
_FOREIGN_END = b"\r\n\r\n"
_MAX_HELD_BYTES = 1024 * 1024
"""No event of an engine is as long; what has no end by then passes as it is."""
_MESSAGE_ID = re.compile(rb'("id"\s*:\s*")chatcmpl-')
_OUR_MESSAGE_ID = rb"\g<1>msg_cmpl-"
"""Engines make a message of a chat, and give it the id of one. The replacement is as long, so no length changes."""
_ID_WITHIN_BYTES = 512
_RESPONSE_ENDS: Final = {"incomplete": "response.incomplete", "failed": "response.failed"}
"""The event that ends a stream, by the status of its response; vLLM says `response.completed` of all."""
_END_TYPES: Final = frozenset({"response.completed", *_RESPONSE_ENDS.values()})


class AnswerRewrite(Protocol):
    """What one answer passes through."""

    def filter(self, piece: bytes, *, complete: bool) -> bytes:
        """Take the next bytes of the answer; returns those that the client gets now."""

    def failure(self, refusal: Refusal, *, at_boundary: bool) -> bytes:
        """The event that ends a stream which broke. `at_boundary` False: it broke inside an event, which ends first."""


def answer_rewrite(path: bytes, *, streaming: bool, hides_usage: bool = False) -> AnswerRewrite:
    """For an answer to a request for this path; `hides_usage`: its client did not request a usage count."""
    row = CELL_PATHS.get(path)
    if row is not None and row.errors is ErrorForm.ANTHROPIC:
        return MessageEvents(path) if streaming else WholeMessage()
    if not streaming:
        return Unchanged()
    if row is not None and row.counting is Counting.RESPONSE_USAGE:
        return ResponseEvents(path)
    return UsageHidden(path) if hides_usage else ChoiceEvents(path)


class Unchanged:
    """An answer that is as it should be."""

    def filter(self, piece: bytes, *, complete: bool) -> bytes:
        return piece

    def failure(self, refusal: Refusal, *, at_boundary: bool) -> bytes:
        return error_event(refusal, at_boundary=at_boundary)


class WholeMessage(Unchanged):
    """A message of Anthropic's that is no stream. Its id stands at its beginning."""

    def __init__(self) -> None:
        self._held = b""
        self._is_passed = False

    def filter(self, piece: bytes, *, complete: bool) -> bytes:
        if self._is_passed:
            return piece
        self._held += piece
        text, found = _MESSAGE_ID.subn(_OUR_MESSAGE_ID, self._held, count=1)
        if not (found or complete or len(text) > _ID_WITHIN_BYTES):
            return b""
        self._is_passed, self._held = True, b""
        return text


class ChoiceEvents:
    """The events of a chat or a completion."""

    marks: ClassVar[tuple[bytes, ...]] = (b'data: {"error"',)
    """An event without any of these needs no change. Text that a model writes has none: its quotes are escaped."""

    def __init__(self, path: bytes) -> None:
        self._path = path
        self._held = b""

    def filter(self, piece: bytes, *, complete: bool) -> bytes:
        text = self._held + piece if self._held else piece
        cut = len(text) if complete else _end_of_whole_events(text)
        self._held = text[cut:]
        text = text[:cut]
        if not any(mark in text for mark in self.marks):
            return text
        *whole, rest = text.split(_END)
        changed = b"".join(self.change(event, _END) for event in whole)
        return changed + self.change(rest, b"") if rest else changed

    def failure(self, refusal: Refusal, *, at_boundary: bool) -> bytes:
        return error_event(refusal, at_boundary=at_boundary)

    def change(self, event: bytes, end: bytes) -> bytes:
        """An event, with its end, as the client gets it; empty: not at all."""
        error = self.error_of(event) if event.startswith(b'data: {"error"') else None
        return event + end if error is None else b"data: " + error_in_form(self._path, error) + end

    def error_of(self, event: bytes) -> EngineError | None:
        """What an error event says; None: it cannot be read."""
        data = _data_of(event)
        if data is None:
            return None
        error = data.get("error")
        code = error.get("code") if isinstance(error, dict) else None
        status = code if isinstance(code, int) and 400 <= code < 600 else 500
        return read_error(self._path, status, data)


class UsageHidden(ChoiceEvents):
    """The same without the event that says what was used."""

    marks = (*ChoiceEvents.marks, b'"usage"')

    def change(self, event: bytes, end: bytes) -> bytes:
        return b"" if is_usage_event(event) else super().change(event, end)


class MessageEvents(ChoiceEvents):
    """The events of a message of Anthropic's."""

    marks = (b'"message_start"', b"event: error", b'data: {"error"')

    def failure(self, refusal: Refusal, *, at_boundary: bool) -> bytes:
        return error_event(refusal, at_boundary=at_boundary, form=ErrorForm.ANTHROPIC)

    def change(self, event: bytes, end: bytes) -> bytes:
        if b'"message_start"' in event:
            return _MESSAGE_ID.sub(_OUR_MESSAGE_ID, event, count=1) + end
        is_error = event.startswith((b"event: error", b'data: {"error"'))
        error = self.error_of(event) if is_error else None
        return event + end if error is None else b"event: error\ndata: " + error_in_form(self._path, error) + end


class ResponseEvents(ChoiceEvents):
    """The events of a response. The client gets one last event, which says how the response ended."""

    marks = (b'"response"', b'"error"')

    def __init__(self, path: bytes) -> None:
        super().__init__(path)
        self._begun: dict[str, Any] | None = None
        self._events = 0
        self._has_ended = False

    def filter(self, piece: bytes, *, complete: bool) -> bytes:
        shown = super().filter(piece, complete=complete)
        self._events += shown.count(_END)
        return shown

    def failure(self, refusal: Refusal, *, at_boundary: bool) -> bytes:
        if self._has_ended:
            return b""
        event = self._failed(EngineError(refusal.status, refusal.message, refusal.code), self._events) + _END
        return event if at_boundary else _END + event

    def change(self, event: bytes, end: bytes) -> bytes:
        data = _data_of(event) if any(mark in event for mark in self.marks) else None
        if data is None:
            return event + end
        response = data.get("response")
        if isinstance(data.get("error"), dict) or data.get("type") == "error":
            self._has_ended = True
            error = self.error_of(event) or EngineError(500, "the engine failed")
            return self._failed(error, data.get("sequence_number", self._events)) + end
        if not isinstance(response, dict):
            return event + end
        if data.get("type") == "response.created":
            self._begun = response
        self._has_ended = self._has_ended or data.get("type") in _END_TYPES
        kind = _RESPONSE_ENDS.get(str(response.get("status")))
        if kind is None or data.get("type") != "response.completed":
            return event + end
        return _event(kind, {**data, "type": kind}) + end

    def _failed(self, error: EngineError, number: int) -> bytes:
        if self._begun is None:
            stated = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
            return _event("error", {**stated, "sequence_number": number})
        stated = {"code": "server_error", "message": error.message}
        response = {**self._begun, "status": "failed", "error": stated}
        return _event("response.failed", {"type": "response.failed", "sequence_number": number, "response": response})


def is_usage_event(event: bytes) -> bool:
    """The event that carries the token counts and no choice. Text that a model writes cannot match: their quotes are
    escaped."""
    return b'"choices":[]' in event.replace(b" ", b"") and b'"usage"' in event


def _end_of_whole_events(text: bytes) -> int:
    """Up to where events are complete. An engine that ends its events otherwise is passed on as it is."""
    if text.endswith(_END) or _FOREIGN_END in text:
        return len(text)
    cut = text.rfind(_END) + len(_END) if _END in text else 0
    return len(text) if len(text) - cut > _MAX_HELD_BYTES else cut


def _data_of(event: bytes) -> dict[str, Any] | None:
    data = b"".join(line[5:] for line in event.splitlines() if line.startswith(b"data:"))
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _event(name: str, data: dict[str, Any]) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(data)
