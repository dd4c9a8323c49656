"""Adds members to the JSON object of a request on its way to the engine: the priority of its class, the wish for a
usage count, and the engine's own name of the model where the request came by another. Pure. What it adds comes last,
where it overrides the same names before it. A body that is no JSON object keeps its meaning, and no body has to be
there as a whole for something to be added to it.
"""

from dataclasses import dataclass
from typing import Any

import msgspec

from engine_agent.protocol.states import ServingClass

PRIORITIES = {ServingClass.REALTIME: 0, ServingClass.NEAR_REALTIME: 100, ServingClass.BATCH: 200}
"""vLLM serves the lower number first, and the earlier of equal ones."""
PRIORITY_PATHS = frozenset({b"/v1/chat/completions", b"/v1/completions", b"/v1/embeddings", b"/v1/responses"})
USAGE_PATHS = frozenset({b"/v1/chat/completions", b"/v1/completions"})
"""Where `stream_options.include_usage` exists."""
_BLANKS = b" \t\r\n"


class _Body(msgspec.Struct):
    model: Any = None
    stream: Any = None
    stream_options: Any = None
    priority: Any = None


_decoder = msgspec.json.Decoder(_Body)


@dataclass(frozen=True, slots=True)
class Amendment:
    """`members` as they stand in JSON, without braces. `hides_usage`: the client did not ask for what we ask for."""

    members: bytes = b""
    hides_usage: bool = False


def amend(path: bytes, body: bytes | None, priority: int | None, model: str | None = None) -> Amendment:
    """What to add to a request. `body` None: it is too long to be looked at. `priority` None: the engine knows none.

    `model` is what the engine must be asked for; None: what the request says.
    """
    if path not in PRIORITY_PATHS:
        return Amendment()
    if body is None:
        unseen = [] if model is None else [_model(model)]
        return Amendment(b",".join(unseen if priority is None else [*unseen, _priority(priority)]))
    try:
        asked = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return Amendment()
    members = [_model(model)] if model is not None and isinstance(asked.model, str) and asked.model != model else []
    if priority is not None and (priority or asked.priority is not None):
        members.append(_priority(priority))
    options = _usage_options(asked) if path in USAGE_PATHS and asked.stream is True else None
    if options is not None:
        members.append(b'"stream_options":' + msgspec.json.encode(options))
    return Amendment(b",".join(members), hides_usage=options is not None)


def _usage_options(asked: _Body) -> dict[str, Any] | None:
    """The client's stream options with usage, or None where it has asked for that, or for what no engine knows."""
    options = asked.stream_options
    if options is None:
        return {"include_usage": True}
    if not isinstance(options, dict) or options.get("include_usage") not in {None, False}:
        return None
    return {**options, "include_usage": True}


def _model(name: str) -> bytes:
    return b'"model":' + msgspec.json.encode(name)


def _priority(priority: int) -> bytes:
    return b'"priority":%d' % priority


class Appender:
    """Puts members at the end of a JSON object that passes in pieces. `added_bytes`: by how much it grows, always."""

    __slots__ = ("_held", "_members", "added_bytes")

    def __init__(self, members: bytes) -> None:
        self._members = members
        self._held = b""
        self.added_bytes = len(members) + 1 if members else 0

    def add(self, piece: bytes, *, complete: bool) -> bytes:
        """Take the next piece; returns what may go on: all but an end that may be the object's own."""
        if not self._members:
            return piece
        text = self._held + piece
        if complete:
            self._held = b""
            return self._closed(text)
        cut = len(text.rstrip(_BLANKS + b"{}"))
        self._held = text[cut:]
        return text[:cut]

    def _closed(self, text: bytes) -> bytes:
        end = len(text.rstrip(_BLANKS))
        if text[end - 1 : end] != b"}":
            return text + b" " * self.added_bytes
        inside = text[: end - 1]
        separator = b" " if inside.rstrip(_BLANKS).endswith(b"{") else b","
        return inside + separator + self._members + text[end - 1 :]
