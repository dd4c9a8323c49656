"""Members that an engine is given in place of the client's, where it reads those otherwise than the dialect of the path
says. Pure.
"""

from collections.abc import Mapping
from typing import Any, Final

from engine_agent.cell_proxy.api_paths import CHAT_PATH

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
