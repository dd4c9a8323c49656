"""Error answers of engines, made into the form that the client of the path reads, with their status kept. Engines have
several: OpenAI's, FastAPI's `{"detail": …}`, plain text, and on Anthropic's paths types that Anthropic does not know.
Pure; it judges no answer and no engine.
"""

from http import HTTPStatus
from typing import Any

import msgspec

from engine_agent.protocol.api_errors import ANTHROPIC_TYPES, error_object
from engine_agent.protocol.api_surface import ErrorForm
from engine_agent.proxy.api_paths import CELL_PATHS
from engine_agent.proxy.wire import ResponseHead

MAX_HELD_BYTES = 256 * 1024
"""Of an error answer. FastAPI's repeats the request; of a longer one only the status is told."""
MAX_MESSAGE_CHARS = 2000
_KNOWN_TYPES = frozenset({*ANTHROPIC_TYPES.values(), "api_error"})
_FORMS = {path: row.errors for path, row in CELL_PATHS.items()}


def form_of(path: bytes) -> ErrorForm:
    """Whose form of an error a client of this path reads."""
    return _FORMS.get(path, ErrorForm.OPENAI)


class ErrorAnswer:
    """One error answer of an engine, which is held until it is whole."""

    def __init__(self, form: ErrorForm) -> None:
        self._form = form
        self._held = b""

    def add(self, piece: bytes) -> None:
        """Take the next bytes of its body."""
        if len(self._held) <= MAX_HELD_BYTES:
            self._held += piece

    def in_form(self, head: ResponseHead) -> tuple[ResponseHead, bytes]:
        """Head and body as the client gets them."""
        body = self._held if head.bodiless else error_in_form(self._form, head.status, self._held)
        described = {b"content-type", b"content-encoding"}
        headers = [pair for pair in head.headers if pair[0] not in described]
        headers.append((b"content-type", b"application/json"))
        return ResponseHead(head.status, head.reason, headers, len(body), chunked=False, is_stream=False), body


def error_in_form(form: ErrorForm, status: int, body: bytes) -> bytes:
    """The body itself where it has the form already, else one with the same message."""
    try:
        stated: Any = msgspec.json.decode(body) if len(body) <= MAX_HELD_BYTES else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        stated = body.decode("utf-8", "replace")
    error = stated.get("error") if isinstance(stated, dict) else None
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        if form is ErrorForm.OPENAI or (stated.get("type") == "error" and error.get("type") in _KNOWN_TYPES):
            return body
        known = {name: error.get(name) for name in ("code", "param")}
        return msgspec.json.encode(error_object(form, status, error["message"], **known))
    return msgspec.json.encode(error_object(form, status, _message(stated, status), code=_code(status)))


def _message(stated: Any, status: int) -> str:
    if isinstance(stated, dict):
        stated = stated.get("detail", stated.get("message", stated.get("error")))
    if isinstance(stated, list):
        stated = "; ".join(_problem(each) for each in stated)
    text = stated.strip() if isinstance(stated, str) else ""
    return text[:MAX_MESSAGE_CHARS] or f"the engine answered {status} {_phrase(status)}"


def _problem(stated: Any) -> str:
    """One of FastAPI's, `{"loc": ["body", "prompt"], "msg": "Field required", …}`."""
    if not isinstance(stated, dict):
        return str(stated)
    place = ".".join(str(part) for part in stated.get("loc", ()) if part != "body")
    return f"{place}: {stated.get('msg', 'is not right')}" if place else str(stated.get("msg", "is not right"))


def _code(status: int) -> str:
    return "engine_" + _phrase(status).lower().replace(" ", "_").replace("-", "_")


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "error"
