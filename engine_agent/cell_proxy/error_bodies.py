"""Error answers of engines, made into the form that the client of the path reads, with their status kept, unless it
blames the wrong side. Pure; it judges no answer and no engine.
"""

from http import HTTPStatus
from typing import Any

import msgspec

from engine_agent.cell_proxy.api_paths import form_of
from engine_agent.cell_proxy.engine_errors import EngineError, read_error
from engine_agent.cell_proxy.wire import ResponseHead
from engine_agent.protocol.api_surface import OPENAI_TYPES, error_object

MAX_HELD_BYTES = 256 * 1024
"""Of an error answer. FastAPI's repeats the request; of a longer one only the status is told."""


class ErrorAnswer:
    """One error answer of an engine to a request for `path`, which is held until it is whole."""

    def __init__(self, path: bytes) -> None:
        self._path = path
        self._held = b""

    def add(self, piece: bytes) -> None:
        """Take the next bytes of its body."""
        if len(self._held) <= MAX_HELD_BYTES:
            self._held += piece

    def in_form(self, head: ResponseHead) -> tuple[ResponseHead, bytes]:
        """Head and body as the client gets them."""
        error = read_error(self._path, head.status, _stated(self._held))
        body = b"" if head.bodiless else error_in_form(self._path, error)
        described = {b"content-type", b"content-encoding"}
        headers = [pair for pair in head.headers if pair[0] not in described]
        headers.append((b"content-type", b"application/json"))
        reason = head.reason if error.status == head.status else HTTPStatus(error.status).phrase.encode()
        return ResponseHead(error.status, reason, headers, len(body), chunked=False, is_stream=False), body


def error_in_form(path: bytes, error: EngineError) -> bytes:
    """The JSON body of an error in the form of its path."""
    kind = error.kind if error.kind in OPENAI_TYPES else None
    stated = error_object(form_of(path), error.status, error.message, code=error.code, param=error.param, kind=kind)
    return msgspec.json.encode(stated)


def _stated(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body) if len(body) <= MAX_HELD_BYTES else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body.decode("utf-8", "replace")
