"""What is refused of a request before any engine sees it, and whatever engine there is: members that only the fleet may
set, and values that engines read otherwise than the dialect of the path says. The cell proxy checks by these, and the
control plane what it accepts for later. Pure.
"""

from collections.abc import Mapping
from typing import Any, Final

from engine_agent.protocol.request_bodies import BadRequest, check_sampling_members
from engine_agent.protocol.request_members import REFUSED

CHAT_PATH, RESPONSES_PATH = "/v1/chat/completions", "/v1/responses"
_FLAGS: Final[Mapping[str, tuple[str, ...]]] = {
    CHAT_PATH: ("stream", "store"),
    "/v1/completions": ("stream",),
    RESPONSES_PATH: ("stream", "store", "background"),
    "/v1/messages": ("stream",),
}
"""Engines read "yes" and 1 as true. The ingress, the cell proxy and the control plane read only true as true."""
_TOOL_TYPES: Final[Mapping[str, tuple[str, ...]]] = {
    CHAT_PATH: ("function",),
    RESPONSES_PATH: ("custom", "function", "namespace"),
    "/v1/messages": ("custom",),
    "/v1/messages/count_tokens": ("custom",),
}
"""That a client carries out. vLLM accepts most of those that OpenAI's and Anthropic's servers carry out, and then never
calls them."""


def check_request(path: str, request: Mapping[str, Any]) -> None:
    """Raises:
    BadRequest: a member is refused, or has a value that the dialect of this path does not have.
    """
    _check_members(request)
    check_sampling_members(request)
    for name in _FLAGS.get(path, ()):
        if not isinstance(request.get(name), bool | None):
            raise BadRequest(f"`{name}` must be true or false", name, code="invalid_type")
    if path == RESPONSES_PATH and not isinstance(request.get("previous_response_id"), str | None):
        name = "previous_response_id"
        raise BadRequest(f"`{name}` must be the id of a response", name, code="invalid_type")
    _check_tools(request.get("tools"), _TOOL_TYPES.get(path, ()))


def _check_members(request: Mapping[str, Any]) -> None:
    for name, value in request.items():
        member = REFUSED.get(name)
        if member is None or value is None or (value is False and member.is_off_if_false):
            continue
        raise BadRequest(f"the member `{name}` is not taken: it {member.why}", name, code="unsupported_parameter")


def _check_tools(tools: Any, known: tuple[str, ...]) -> None:
    """`known` empty: the dialect names no types."""
    for number, tool in enumerate(tools if known and isinstance(tools, list) else ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind not in known:
            message = f"`tools[{number}].type`: {kind[:40]!r} is not supported; use {' or '.join(known)}"
            raise BadRequest(message, "tools", code="invalid_value")
