"""Rewrites answers of engines where they differ from the API of the path. Pure. Removes the usage event from a stream
whose client did not request usage. Gives errors inside a stream the format of the path. Ends a stream of Responses with
`response.incomplete` or `response.failed` if the response did, and gives messages an id that starts with `msg_`.
Complete events pass immediately, and unchanged if nothing is wrong."""

import re
from typing import Any, ClassVar, Final, Protocol

import msgspec

from engine_agent.cell_proxy.api_paths import CELL_PATHS
from engine_agent.cell_proxy.engine_errors import EngineError, error_in_form, read_error
from engine_agent.cell_proxy.refusal import Refusal, error_event
from engine_agent.protocol.api_surface import Counting, ErrorForm
from engine_agent.protocol.continuation import PROMPT_MARK, broken_mark

_END = b"\n\n"
_FOREIGN_END = b"\r\n\r\n"
_LONE_MARK = re.compile(rb"(?:^|\n\n): [^\n]*(?=\n\n)")
"""A mark between events. It has the end of an event and is none."""
_MAX_HELD_BYTES = 1024 * 1024
"""No event of an engine is as long. Data without an end by then passes unchanged."""
_MESSAGE_ID = re.compile(rb'("id"\s*:\s*")chatcmpl-')
_OUR_MESSAGE_ID = rb"\g<1>msg_cmpl-"
"""Engines give a message the id of a chat. The replacement has the same length, so Content-Length stays valid."""
_ID_WITHIN_BYTES = 512
_RESPONSE_ENDS: Final = {"incomplete": "response.incomplete", "failed": "response.failed"}
"""The event that ends a stream, by the status of its response. vLLM always sends `response.completed`."""
_END_TYPES: Final = frozenset({"response.completed", *_RESPONSE_ENDS.values()})


class AnswerRewrite(Protocol):
    is_broken: bool
    """The relay was told that the engine failed: it continues the stream elsewhere, or counts the failure."""

    def filter(self, piece: bytes, *, complete: bool) -> bytes:
        """Takes the next bytes of the answer. Returns those that the client gets now."""

    def failure(self, refusal: Refusal, *, at_boundary: bool) -> bytes:
        """The event that ends a broken stream. `at_boundary` False: it broke inside an event, which is ended first."""


def answer_rewrite(
    path: bytes, *, streaming: bool, hides_usage: bool = False, marks_errors: bool = False
) -> AnswerRewrite:
    """The rewrite for an answer of this path. `hides_usage`: the client did not request usage. `marks_errors`: a relay
    continues the stream elsewhere if its engine fails."""
    row = CELL_PATHS.get(path)
    if row is not None and row.errors is ErrorForm.ANTHROPIC:
        return MessageEvents(path, marks_errors) if streaming else WholeMessage()
    if not streaming:
        return Unchanged()
    if row is not None and row.counting is Counting.RESPONSE_USAGE:
        return ResponseEvents(path, marks_errors)
    return UsageHidden(path, marks_errors) if hides_usage else ChoiceEvents(path, marks_errors)


class Unchanged:
    is_broken = False

    def filter(self, piece: bytes, *, complete: bool) -> bytes:
        return piece

    def failure(self, refusal: Refusal, *, at_boundary: bool) -> bytes:
        return error_event(refusal, at_boundary=at_boundary)


class WholeMessage(Unchanged):
    """A message of Anthropic's API that is not streamed. Its id is at the beginning."""

    def __init__(self) -> None:
        self._buffer = b""
        self._is_passed = False

    def filter(self, piece: bytes, *, complete: bool) -> bytes:
        if self._is_passed:
            return piece
        self._buffer += piece
        text, found = _MESSAGE_ID.subn(_OUR_MESSAGE_ID, self._buffer, count=1)
        if not (found or complete or len(text) > _ID_WITHIN_BYTES):
            return b""
        self._is_passed, self._buffer = True, b""
        return text


class ChoiceEvents:
    marks: ClassVar[tuple[bytes, ...]] = (b'data: {"error"',)
    """An event without any of these is not changed. Text that a model writes has none: its quotes are escaped."""

    def __init__(self, path: bytes, marks_errors: bool = False) -> None:
        self._path = path
        self._marks_errors = marks_errors
        self._buffer = b""
        self.is_broken = False

    def filter(self, piece: bytes, *, complete: bool) -> bytes:
        text = self._buffer + piece if self._buffer else piece
        if not (complete or text.endswith(_END)):
            cut = _end_of_whole_events(text)
            self._buffer, text = text[cut:], text[:cut]
        elif self._buffer:
            self._buffer = b""
        for mark in self.marks:
            if mark in text:
                break
        else:
            return text
        *whole, rest = text.split(_END)
        changed = b"".join(self.change(event, _END) for event in whole)
        return changed + self.change(rest, b"") if rest else changed

    def failure(self, refusal: Refusal, *, at_boundary: bool) -> bytes:
        return error_event(refusal, at_boundary=at_boundary)

    def change(self, event: bytes, end: bytes) -> bytes:
        """The event for the client, with its end; empty to drop it."""
        error = self.error_of(event) if event.startswith(b'data: {"error"') else None
        if error is None:
            return event + end
        return self.mark_of(error) + b"data: " + error_in_form(self._path, error) + end

    def mark_of(self, error: EngineError) -> bytes:
        """The mark before an error by which the engine, and not the request, failed."""
        if not (self._marks_errors and error.status >= 500):
            return b""
        self.is_broken = True
        return broken_mark("engine_error")

    def error_of(self, event: bytes) -> EngineError | None:
        data = _data_of(event)
        if data is None:
            return None
        error = data.get("error")
        code = error.get("code") if isinstance(error, dict) else None
        status = code if isinstance(code, int) and 400 <= code < 600 else 500
        return read_error(self._path, status, data)


class UsageHidden(ChoiceEvents):
    marks = (*ChoiceEvents.marks, b'"usage"')

    def change(self, event: bytes, end: bytes) -> bytes:
        return b"" if is_usage_event(event) else super().change(event, end)


class MessageEvents(ChoiceEvents):
    marks = (b'"message_start"', b"event: error", b'data: {"error"')

    def failure(self, refusal: Refusal, *, at_boundary: bool) -> bytes:
        return error_event(refusal, at_boundary=at_boundary, form=ErrorForm.ANTHROPIC)

    def change(self, event: bytes, end: bytes) -> bytes:
        if b'"message_start"' in event:
            return _MESSAGE_ID.sub(_OUR_MESSAGE_ID, event, count=1) + end
        is_error = event.startswith((b"event: error", b'data: {"error"'))
        error = self.error_of(event) if is_error else None
        if error is None:
            return event + end
        return self.mark_of(error) + b"event: error\ndata: " + error_in_form(self._path, error) + end


class ResponseEvents(ChoiceEvents):
    """The events of a response. The last one states how the response ended."""

    marks = (b'"response"', b'"error"')

    def __init__(self, path: bytes, marks_errors: bool = False) -> None:
        super().__init__(path, marks_errors)
        self._begun: dict[str, Any] | None = None
        self.events = 0
        """Events that the client has. The next one has this number."""
        self._has_ended = False

    def filter(self, piece: bytes, *, complete: bool) -> bytes:
        shown = super().filter(piece, complete=complete)
        self.events += shown.count(_END)
        if PROMPT_MARK in shown:
            self.events -= len(_LONE_MARK.findall(shown))
        return shown

    def failure(self, refusal: Refusal, *, at_boundary: bool) -> bytes:
        if self._has_ended:
            return b""
        event = self._failed(EngineError(refusal.status, refusal.message, refusal.code), self.events) + _END
        return event if at_boundary else _END + event

    def change(self, event: bytes, end: bytes) -> bytes:
        data = _data_of(event) if any(mark in event for mark in self.marks) else None
        if data is None:
            return event + end
        response = data.get("response")
        if isinstance(data.get("error"), dict) or data.get("type") == "error":
            self._has_ended = True
            error = self.error_of(event) or EngineError(500, "the engine failed")
            return self.mark_of(error) + self._failed(error, data.get("sequence_number", self.events)) + end
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
    """Whether the event has token counts and no choice. Text that a model writes cannot match: its quotes are
    escaped."""
    return b'"choices":[]' in event.replace(b" ", b"") and b'"usage"' in event


def _end_of_whole_events(text: bytes) -> int:
    """The end of the last complete event. Streams with other line ends pass unchanged."""
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
