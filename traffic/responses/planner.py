"""Decides what of OpenAI's Responses API is stored, what a request means, what an engine without storage gets instead,
and how streamed events reach the application. Pure.

A response is stored if its request says so or needs it: in the background, or after another response. Its turn is its
own input and output; the engine reads all turns of its chain. Source: OpenAI's reference of `/v1/responses`. Events
pass unchanged, except those with the response's object, which the engine cannot complete. The last of these is held
back until it is known whether the response was stored."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from traffic.tenants.planner import ApplicationRefused, json_object

JsonObject = dict[str, Any]
RESPONSE_ID = re.compile(r"resp_[0-9a-f]{32}")
"""128 random bits, so that IDs cannot be guessed."""


class ResponseState(StrEnum):
    """OpenAI's states. A background response is stored as `IN_PROGRESS`; its near-real-time request shows whether it
    has started."""

    QUEUED = "queued"
    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    INCOMPLETE = "incomplete"
    FAILED = "failed"
    CANCELLED = "cancelled"


OPEN_RESPONSES = frozenset({ResponseState.QUEUED, ResponseState.IN_PROGRESS})
USABLE = frozenset({ResponseState.COMPLETED, ResponseState.INCOMPLETE})
"""States that another response may follow."""


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """Limits of stored responses. Seconds unless the name says otherwise."""

    kept_s: float = 30 * 86_400.0
    """From creation, as at OpenAI. 0 disables storage."""
    max_body_bytes: int = 1024 * 1024
    """Of a request, also including all previous turns; same as near-real-time requests."""
    max_answer_bytes: int = 4 * 1024 * 1024
    max_turns: int = 256
    max_kept_per_tenant: int = 20_000
    max_kept_bytes_per_tenant: int = 1024**3
    background_limit_s: float = 3600.0
    """Default time limit of background responses."""
    max_streams: int = 64
    """Per web process: as many as an ingress opens connections for."""
    max_streams_per_tenant: int = 16

    @property
    def is_on(self) -> bool:
        return self.kept_s > 0


@dataclass(frozen=True, slots=True)
class ResponseRequest:
    """A parsed request. `items` is its own input; `previous` is the previous response or ""."""

    payload: JsonObject
    model: str
    items: tuple[JsonObject, ...]
    previous: str = ""
    is_background: bool = False
    is_stream: bool = False
    is_kept: bool = False


@dataclass(frozen=True, slots=True)
class Turn:
    """Input and output of a stored response."""

    items: tuple[JsonObject, ...]
    output: tuple[JsonObject, ...]


def parse_request(body: bytes, settings: StoreSettings) -> ResponseRequest:
    """Parses a request body. Raises ApplicationRefused if it is ambiguous or not supported."""
    payload = _object_of(body, settings)
    model = payload.get("model")
    if not isinstance(model, str) or not model:
        raise ApplicationRefused(400, "missing_required_parameter", "the field `model` must name a model", "model")
    if payload.get("conversation") is not None:
        message = "`conversation` is not supported: use `previous_response_id`"
        raise ApplicationRefused(400, "unsupported_parameter", message, "conversation")
    previous = payload.get("previous_response_id")
    if previous is not None and (not isinstance(previous, str) or not previous):
        message = "`previous_response_id` must be the id of a response"
        raise ApplicationRefused(400, "invalid_type", message, "previous_response_id")
    is_background, is_stream, store = (_boolean_field(payload, name) for name in ("background", "stream", "store"))
    if is_background and store is False:
        raise ApplicationRefused(400, "invalid_value", "`background` requires `store` to be true", "store")
    if is_background and is_stream:
        message = "a response in the background cannot be streamed here: retrieve it until it has ended"
        raise ApplicationRefused(400, "unsupported_value", message, "stream")
    # A request that follows a stored response, or runs in the background, is stored unless it says otherwise.
    needs_store = bool(is_background or previous)
    return ResponseRequest(
        payload=payload,
        model=model,
        items=_items_of(payload.get("input")),
        previous=previous or "",
        is_background=bool(is_background),
        is_stream=bool(is_stream),
        is_kept=needs_store if store is None else store,
    )


def engine_body(request: ResponseRequest, chain: Iterable[Turn], settings: StoreSettings) -> bytes:
    """Returns the engine's body: all turns as input, without members that it does not know. Serialised again with the
    model first and in ASCII, so that all readers parse it alike. Raises ApplicationRefused if all turns together are
    too long."""
    before = [item for turn in chain for item in (*turn.items, *turn.output)]
    left_out = {"model", "previous_response_id", "background", "conversation", "store", "stream"}
    members = {name: value for name, value in request.payload.items() if name not in left_out}
    if before:
        members["input"] = [*before, *request.items]
    if request.is_stream:
        members["stream"] = True
    whole = {"model": request.model, **members, "store": False}
    body = json.dumps(whole, separators=(",", ":"), allow_nan=False).encode()
    if len(body) > settings.max_body_bytes:
        message = f"with its previous turns, the request is longer than {settings.max_body_bytes} bytes"
        raise ApplicationRefused(400, "context_length_exceeded", message, "previous_response_id")
    return body


def check_previous(previous_id: str, state: ResponseState, turns: int, settings: StoreSettings) -> None:
    """Checks whether another response may follow this one, which has `turns`. Raises ApplicationRefused if it may
    not."""
    if state not in USABLE:
        message = (
            f"Previous response with id '{previous_id[:80]}' is {state}: only one that has ended can be continued."
        )
        raise ApplicationRefused(400, "previous_response_not_completed", message, "previous_response_id")
    if turns >= settings.max_turns:
        message = f"Previous response with id '{previous_id[:80]}' has {turns} turns, which is the maximum."
        raise ApplicationRefused(400, "context_length_exceeded", message, "previous_response_id")


def previous_not_found(previous_id: str) -> ApplicationRefused:
    message = f"Previous response with id '{previous_id[:80]}' not found."
    return ApplicationRefused(400, "previous_response_not_found", message, "previous_response_id")


def response_not_found(response_id: str) -> ApplicationRefused:
    return ApplicationRefused(404, None, f"Response with id '{response_id[:80]}' not found.")


def store_off() -> ApplicationRefused:
    message = "this installation stores no responses: omit `store`, `background` and `previous_response_id`"
    return ApplicationRefused(400, "unsupported_parameter", message, "store")


def marks_of(response_id: str, request: ResponseRequest, *, is_kept: bool) -> JsonObject:
    """Returns the members of a response's object that the engine cannot know."""
    return {
        "id": response_id,
        "previous_response_id": request.previous or None,
        "background": request.is_background,
        "store": is_kept,
    }


def begun_response(response_id: str, request: ResponseRequest, created_at: int) -> JsonObject:
    """Returns the object of a response before an engine has it."""
    payload = request.payload
    stated = {
        name: payload.get(name)
        for name in ("instructions", "max_output_tokens", "max_tool_calls", "reasoning", "temperature", "top_p", "user")
    }
    return {
        "object": "response",
        "created_at": created_at,
        "status": ResponseState.QUEUED.value,
        "error": None,
        "incomplete_details": None,
        "model": request.model,
        "output": [],
        "usage": None,
        **stated,
        "metadata": payload.get("metadata") or {},
        "parallel_tool_calls": payload.get("parallel_tool_calls", True),
        "text": payload.get("text") or {"format": {"type": "text"}},
        "tool_choice": payload.get("tool_choice", "auto"),
        "tools": payload.get("tools") or [],
        "truncation": payload.get("truncation") or "disabled",
        **marks_of(response_id, request, is_kept=True),
    }


def ended_response(begun: JsonObject, state: ResponseState, reason: str, answer: Any = None) -> JsonObject:
    """Returns the object of a finished background response: the engine's, if complete."""
    if state in USABLE and isinstance(answer, dict):
        marks = {name: begun[name] for name in ("id", "previous_response_id", "background", "store", "created_at")}
        return {**answer, **marks}
    error = {"code": "server_error", "message": reason} if state is ResponseState.FAILED else None
    return {**begun, "status": state.value, "error": error}


def state_of(answer: Any) -> ResponseState:
    """Returns the state that an engine reports, by default completed."""
    status = answer.get("status") if isinstance(answer, dict) else None
    ends = {state.value: state for state in ResponseState if state not in OPEN_RESPONSES}
    return ends.get(status, ResponseState.COMPLETED) if isinstance(status, str) else ResponseState.COMPLETED


def output_of(response: Mapping[str, Any]) -> tuple[JsonObject, ...]:
    output = response.get("output")
    return tuple(item for item in output if isinstance(item, dict)) if isinstance(output, list) else ()


def shown_items(response_id: str, items: Iterable[JsonObject]) -> list[JsonObject]:
    """Returns input items as listed: each with an ID and its content in parts."""
    return [_shown_item(response_id, number, item) for number, item in enumerate(items)]


def _shown_item(response_id: str, number: int, item: JsonObject) -> JsonObject:
    shown: JsonObject = {"id": f"item_{response_id.removeprefix('resp_')}{number:04d}", "type": "message", **item}
    if shown["type"] == "message" and isinstance(shown.get("content"), str):
        kind = "output_text" if shown.get("role") == "assistant" else "input_text"
        shown["content"] = [{"type": kind, "text": shown["content"]}]
    if shown["type"] == "message":
        shown.setdefault("status", "completed")
    return shown


def _object_of(body: bytes, settings: StoreSettings) -> JsonObject:
    if len(body) > settings.max_body_bytes:
        message = f"the body is longer than {settings.max_body_bytes} bytes"
        raise ApplicationRefused(413, "request_too_large", message)
    return json_object(body)


def _boolean_field(payload: JsonObject, name: str) -> bool | None:
    value = payload.get(name)
    if value is not None and not isinstance(value, bool):
        raise ApplicationRefused(400, "invalid_type", f"`{name}` must be true or false", name)
    return value


def _items_of(given: Any) -> tuple[JsonObject, ...]:
    if isinstance(given, str):
        return ({"type": "message", "role": "user", "content": given},)
    if isinstance(given, list) and all(isinstance(item, dict) for item in given):
        return tuple(given)
    raise ApplicationRefused(400, "invalid_type", "`input` must be a string or a list of items", "input")


ENDS = frozenset({"response.completed", "response.incomplete", "response.failed"})
_OBJECT = b'"response"'
"""Cannot occur in generated text, where quotes are escaped."""


@dataclass(frozen=True, slots=True)
class LastEvent:
    """The event that ends a response, as the engine sent it."""

    event: Mapping[str, Any]

    @property
    def response(self) -> dict[str, Any]:
        return dict(self.event["response"])

    def shown(self, response: Mapping[str, Any]) -> bytes:
        return event_bytes({**self.event, "response": response})


class ResponseEvents:
    """One stream. `marks` replace members of the response's object."""

    def __init__(self, marks: Mapping[str, Any]) -> None:
        self._marks = marks
        self._partial = bytearray()
        self._searched = 0
        self._begun: Mapping[str, Any] | None = None
        self.has_ended = False
        self.events = 0

    def feed(self, piece: bytes) -> Iterator[bytes | LastEvent]:
        """Yields the events that these bytes complete."""
        self._partial += piece
        while (end := self._event_end()) is not None:
            event = bytes(self._partial[:end])
            del self._partial[:end]
            self.events += 1
            yield self._pass_event(event)

    def rest(self) -> bytes:
        return bytes(self._partial)

    def failure(self, message: str) -> bytes:
        """Returns the event that ends a broken stream: a failed response, or an error before the first event. Empty if
        the response had ended."""
        if self.has_ended:
            return b""
        error = {"code": "server_error", "message": message}
        if self._begun is None:
            return event_bytes({"type": "error", **error, "param": None, "sequence_number": self.events})
        response = {**self._begun, "status": "failed", "error": error}
        return event_bytes({"type": "response.failed", "sequence_number": self.events, "response": response})

    def _event_end(self) -> int | None:
        """End of the first event; each byte is scanned once."""
        ends = [
            found + len(end)
            for end in (b"\n\n", b"\r\n\r\n")
            if (found := self._partial.find(end, self._searched)) >= 0
        ]
        self._searched = 0 if ends else max(0, len(self._partial) - 3)
        return min(ends, default=None)

    def _pass_event(self, event: bytes) -> bytes | LastEvent:
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
    """Formats an event like OpenAI's servers."""
    return f"event: {data['type']}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


def _data_of(event: bytes) -> dict[str, Any] | None:
    lines = [line[5:].strip() for line in event.splitlines() if line.startswith(b"data:")]
    try:
        data = json.loads(b"\n".join(lines))
    except ValueError:
        return None
    return data if isinstance(data, dict) and isinstance(data.get("type"), str) else None
