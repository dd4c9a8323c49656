"""Rewrites request bodies on their way to the engine, and streams on their way back. Pure.

To the JSON object of a request it adds members: the priority of its class, the wish for a usage count, and the engine's
own name of the model where the request came by another. They come last, where they override the same names before them.
A body that the engine could understand in another way than the ingress or this proxy did is refused (`members_of`); one
that is too long to be parsed only gains members. From a stream whose client did not request a usage count it takes the
usage event; whole events pass at once, and none that passes is changed.
"""

import re
from dataclasses import dataclass
from typing import Any

import msgspec

from engine_agent.protocol.api_surface import Counting
from engine_agent.protocol.request_members import OFF_MEMBERS, RequestMember, refused_among
from engine_agent.protocol.states import ServingClass
from engine_agent.proxy.api_paths import CELL_PATHS

PRIORITIES = {ServingClass.REALTIME: 0, ServingClass.NEAR_REALTIME: 100, ServingClass.BATCH: 200}
"""vLLM serves the lower number first, and the earlier of equal ones."""
RESPONSES_PATH = b"/v1/responses"
_BLANKS = b" \t\r\n"
_END = b"\n\n"
_FOREIGN_END = b"\r\n\r\n"
_MAX_HELD_BYTES = 1024 * 1024
"""No event of an engine is as long; what has no end by then passes as it is."""


_members = msgspec.json.Decoder(dict[str, msgspec.Raw])
_KEY = re.compile(rb'[ \t\r\n]*("(?:[^"\\]|\\.)*+")[ \t\r\n]*:[ \t\r\n]*')
_SEPARATOR = re.compile(rb"[ \t\r\n]*[,}]")


class BadBody(ValueError):
    """A request body that does not mean one thing only; the text says why."""


class RefusedMember(ValueError):
    """A request body with a member that is refused."""

    def __init__(self, member: RequestMember) -> None:
        super().__init__(f"{member.name} {member.why}")
        self.member = member


class NeedsStore(ValueError):
    """A request for what only the control plane keeps, and that came past it; the text is the member's name."""


@dataclass(frozen=True, slots=True)
class BodyRewrite:
    """`members` as they stand in JSON, without braces. `removes_usage`: the client did not request the usage that we
    do."""

    members: bytes = b""
    removes_usage: bool = False


def rewrite_body(
    path: bytes, body: bytes | None, priority: int | None, model: str | None = None, routed_by: str | None = None
) -> BodyRewrite:
    """What to add to a request. `body` None: it is too long to be parsed. `priority` None: the engine knows none.

    `model` is the name that the engine knows; None: the one in the request. `routed_by` is the name that the ingress
    read in the body and chose this cell by; None: it did not say.

    Raises:
        BadBody: see `members_of`; or the body names another model than the ingress read in it.
        RefusedMember: it has a member that is refused (`engine_agent.protocol.request_members`).
        NeedsStore: it is a response that an engine, which keeps nothing, would answer as if it were a plain one.
    """
    row = CELL_PATHS.get(path)
    if row is None or not row.has_model or body == b"":
        return BodyRewrite()
    priority = priority if row.has_priority else None
    if body is None:
        unseen = [OFF_MEMBERS.encode()] if model is None else [OFF_MEMBERS.encode(), _model(model)]
        return BodyRewrite(b",".join(unseen if priority is None else [*unseen, _priority(priority)]))
    given_members = members_of(body)
    check_members(given_members)
    request = {name: _decoded(raw) for name, raw in given_members.items() if name in _READ}
    if path == RESPONSES_PATH:
        _check_needs_no_store(request)
    given = request.get("model")
    if routed_by is not None and given != routed_by:
        raise BadBody(f"the ingress read the model {routed_by!r:.200} in it, and here it names {given!r:.200}")
    members = [_model(model)] if model is not None and isinstance(given, str) and given != model else []
    if priority is not None and (priority or request.get("priority") is not None):
        members.append(_priority(priority))
    options = None
    if row.counting is Counting.STREAM_OPTIONS and request.get("stream") is True:
        options = _usage_options(request)
    if options is not None:
        members.append(b'"stream_options":' + msgspec.json.encode(options))
    return BodyRewrite(b",".join(members), removes_usage=options is not None)


def check_members(members: dict[str, msgspec.Raw]) -> None:
    """Raises:
    RefusedMember: one of them is refused, and says more than nothing.
    """
    for member in refused_among(members):
        if bytes(members[member.name]) not in {b"null", member.off.encode()}:
            raise RefusedMember(member)


def members_of(body: bytes) -> dict[str, msgspec.Raw]:
    """The members of the JSON object that a body is, as they stand there.

    Raises:
        BadBody: it is no JSON object, or names a member twice: readers differ in which one counts.
    """
    try:
        members = _members.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadBody(str(error)) from None
    # The decoder keeps the last of two. So walk along the text: each member must be the one that it kept, and there
    # once.
    at, seen, is_last = body.index(b"{") + 1, set[str](), not members
    while not is_last:
        key = _KEY.match(body, at)
        name = _decoded(key[1]) if key else ""
        value = bytes(members.get(name, b""))
        separator = _SEPARATOR.match(body, key.end() + len(value)) if key else None
        if key is None or separator is None or name in seen or not body.startswith(value, key.end()):
            raise BadBody(f"the member {name[:80]!r} is there twice: name each member once")
        seen.add(name)
        at, is_last = separator.end(), separator[0].endswith(b"}")
    return members


_READ = frozenset(
    {
        "model", "stream", "stream_options", "priority", "background", "conversation", "previous_response_id", "store"
    }
)  # fmt: skip


def _check_needs_no_store(request: dict[str, Any]) -> None:
    """What the control plane sends on for a request that needs its store has none of these."""
    for name in ("previous_response_id", "conversation"):
        if request.get(name) is not None:
            raise NeedsStore(name)
    for name in ("background", "store"):
        if request.get(name):  # engines read "true" and 1 as true
            raise NeedsStore(name)


def _decoded(text: bytes | msgspec.Raw) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadBody(str(error)) from None


def _usage_options(request: dict[str, Any]) -> dict[str, Any] | None:
    """The client's stream options with usage, or None where it has that already, or for what no engine knows."""
    options = request.get("stream_options")
    if options is None:
        return {"include_usage": True}
    if not isinstance(options, dict) or options.get("include_usage") not in {None, False}:
        return None
    return {**options, "include_usage": True}


def _model(name: str) -> bytes:
    return b'"model":' + msgspec.json.encode(name)


def _priority(priority: int) -> bytes:
    return b'"priority":%d' % priority


class MemberAppender:
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


class UsageEventFilter:
    """The events of one stream."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held = b""

    def filter(self, piece: bytes, *, complete: bool) -> bytes:
        """Take the next bytes of the stream; returns those that the client gets now."""
        text = self._held + piece if self._held else piece
        cut = len(text) if complete else self._end_of_whole_events(text)
        self._held = text[cut:]
        text = text[:cut]
        if b'"usage"' not in text:
            return text
        *whole, rest = text.split(_END)
        kept = b"".join(event + _END for event in whole if not is_usage_event(event))
        return kept if is_usage_event(rest) else kept + rest

    def _end_of_whole_events(self, text: bytes) -> int:
        """Up to where events are complete. An engine that ends its events otherwise is passed on as it is."""
        if text.endswith(_END) or _FOREIGN_END in text:
            return len(text)
        cut = text.rfind(_END) + len(_END) if _END in text else 0
        return len(text) if len(text) - cut > _MAX_HELD_BYTES else cut


def is_usage_event(event: bytes) -> bool:
    """The event that carries the token counts and no choice. Text that a model writes cannot match: their quotes are
    escaped."""
    return b'"choices":[]' in event.replace(b" ", b"") and b'"usage"' in event
