"""Rewrites request bodies on their way to the engine. Pure.

To the JSON object of a request it adds members: the priority of its class, the wish for a usage count, and the engine's
own name of the model where the request came by another. They come last, where they override the same names before them.
A body that the engine could understand in another way than the ingress or this proxy did is rejected (`request_of`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from engine_agent.cell_proxy.api_paths import CELL_PATHS, CHAT_PATH, RESPONSES_PATH
from engine_agent.cell_proxy.request_work import check_work
from engine_agent.protocol.api_surface import Counting
from engine_agent.protocol.request_checks import check_request
from engine_agent.protocol.request_limits import RequestLimits
from engine_agent.protocol.states import ServingClass
from engine_agent.protocol.strict_json import strict_loads

PRIORITIES = {ServingClass.REALTIME: 0, ServingClass.NEAR_REALTIME: 100, ServingClass.BATCH: 200}
"""vLLM serves the lower number first, and the earlier of equal ones."""
_BLANKS = b" \t\r\n"


class BadBody(ValueError):
    """A request body that does not mean one thing only; the text says why."""


class NeedsStore(ValueError):
    """A request for what only the control plane keeps, and that came past it; the text is the member's name."""


@dataclass(frozen=True, slots=True)
class BodyRewrite:
    """`members` as they stand in JSON, without braces. `removes_usage`: the client did not request the usage that we
    do. `sequences`: what the engine makes of the request."""

    members: bytes = b""
    removes_usage: bool = False
    sequences: int = 1


def rewrite_body(
    path: bytes,
    body: bytes,
    priority: int | None,
    model: str | None = None,
    routed_by: str | None = None,
    limits: RequestLimits | None = None,
) -> BodyRewrite:
    """What to add to a request. `priority` None: the engine knows none; `limits` None: another cell checked them.

    `model` is the name that the engine knows; None: the one in the request. `routed_by` is the name that the ingress
    read in the body and chose this cell by; None: it did not say.

    Raises:
        BadBody: see `request_of`; or the body names another model than the ingress read in it.
        BadRequest: see `check_request` and `check_work`.
        NeedsStore: it is a response that an engine, which keeps nothing, would answer as if it were a plain one.
    """
    row = CELL_PATHS.get(path)
    if row is None or not row.has_model or body == b"":
        return BodyRewrite()
    priority = priority if row.has_priority else None
    request = request_of(body)
    check_request(path.decode(), request)
    sequences = 1 if limits is None else check_work(row, request, limits)
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
    members += dialect_members(path, request)
    if options is not None:
        members.append(b'"stream_options":' + msgspec.json.encode(options))
    return BodyRewrite(b",".join(members), removes_usage=options is not None, sequences=sequences)


def request_of(body: bytes) -> dict[str, Any]:
    """The JSON object that a body states.

    Raises:
        BadBody: it is none, or readers could differ in what it states (`strict_loads`).
    """
    try:
        request = strict_loads(body)
    except ValueError as error:
        raise BadBody(str(error)) from None
    if not isinstance(request, dict):
        raise BadBody("it must be an object")
    return request


def _check_needs_no_store(request: dict[str, Any]) -> None:
    """What the control plane sends on for a request that needs its store has none of these."""
    for name in ("previous_response_id", "conversation"):
        if request.get(name) is not None:
            raise NeedsStore(name)
    for name in ("background", "store"):
        if request.get(name):
            raise NeedsStore(name)


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


def with_members(body: bytes, members: bytes) -> bytes:
    """The JSON object with these members at its end; what is no object stays as it is."""
    end = len(body.rstrip(_BLANKS))
    if not members or body[end - 1 : end] != b"}":
        return body
    inside = body[: end - 1]
    separator = b"" if inside.rstrip(_BLANKS).endswith(b"{") else b","
    return inside + separator + members + body[end - 1 :]


# Members that an engine is given in place of the client's, where it reads those otherwise than the dialect of the
# path says.

_WITH_TOOLS: Final = (CHAT_PATH, b"/v1/messages", b"/v1/messages/count_tokens")
_NO_CHOICES: Final = (None, "auto", "none", {"type": "auto"}, {"type": "none"})


def dialect_members(path: bytes, request: Mapping[str, Any]) -> list[bytes]:
    """What overrides members, as it stands in JSON: no tools at all where the list of them is empty, which clients
    send and vLLM refuses."""
    if path not in _WITH_TOOLS or request.get("tools") != []:
        return []
    if "tool_choice" not in request:
        return [b'"tools":null']
    return [b'"tools":null', b'"tool_choice":null'] if request["tool_choice"] in _NO_CHOICES else []
