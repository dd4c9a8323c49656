"""Members of a request that an engine reads otherwise than the dialect of its path says: what is refused before an
engine sees it, and what it is given instead. Pure.
"""

from collections.abc import Mapping
from typing import Any, Final

from engine_agent.proxy.api_paths import CHAT_PATH, RESPONSES_PATH

MESSAGES_PATHS: Final = (b"/v1/messages", b"/v1/messages/count_tokens")
_FLAGS: Final[Mapping[bytes, tuple[str, ...]]] = {
    CHAT_PATH: ("stream", "store"),
    b"/v1/completions": ("stream",),
    RESPONSES_PATH: ("stream", "store", "background"),
    b"/v1/messages": ("stream",),
}
"""Engines read "yes" and 1 as true. The ingress, this proxy and the control plane read only true as true."""
_TOOL_TYPES: Final[Mapping[bytes, frozenset[str]]] = {
    CHAT_PATH: frozenset({"function"}),
    RESPONSES_PATH: frozenset({"function", "custom", "namespace"}),
}
"""That a client carries out. vLLM accepts those that OpenAI's servers carry out, and then never calls them."""
_NO_CHOICES: Final = (None, "auto", "none", {"type": "auto"}, {"type": "none"})


class BadMember(ValueError):
    """A member that means nothing here; the text says why."""

    def __init__(self, param: str, code: str, message: str) -> None:
        super().__init__(message)
        self.param, self.code = param, code


def check_dialect(path: bytes, request: Mapping[str, Any]) -> None:
    """Raises:
    BadMember: one is not what the dialect of this path has there.
    """
    for name in _FLAGS.get(path, ()):
        if not isinstance(request.get(name), bool | None):
            raise BadMember(name, "invalid_type", f"`{name}` must be true or false")
    if path == RESPONSES_PATH and not isinstance(request.get("previous_response_id"), str | None):
        raise BadMember("previous_response_id", "invalid_type", "`previous_response_id` must be the id of a response")
    tools, known = request.get("tools"), _TOOL_TYPES.get(path)
    for number, tool in enumerate(tools if known is not None and isinstance(tools, list) else ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if known is not None and isinstance(kind, str) and kind not in known:
            names = " and ".join(sorted(known))
            message = f"`tools[{number}].type`: {kind[:40]!r} is not available here; {names} are"
            raise BadMember("tools", "invalid_value", message)


def dialect_members(path: bytes, request: Mapping[str, Any]) -> list[bytes]:
    """What overrides members, as it stands in JSON: no tools at all where the list of them is empty, which clients
    send and vLLM refuses."""
    if path not in {CHAT_PATH, *MESSAGES_PATHS} or request.get("tools") != []:
        return []
    if "tool_choice" not in request:
        return [b'"tools":null']
    return [b'"tools":null', b'"tool_choice":null'] if request["tool_choice"] in _NO_CHOICES else []
