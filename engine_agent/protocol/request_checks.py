"""Members and values that are rejected before an engine sees the request, whatever the engine: members that only the
fleet may set, and values that engines read differently from the API of the path. The cell proxy and the control plane's
near-real-time API check requests with it, and docs/api-applications.md is generated from its rows. Pure.

All other members pass to the engine, also those that only vLLM knows (`extra_body`). A member is judged by its effect
on others: on other tenants, on the order of requests, on token counts, and on the host of the engine. Source: the
request models of vLLM 0.32 (`vllm/entrypoints/**/protocol.py`)."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from engine_agent.protocol.request_bodies import BadRequest, check_sampling_members


class MemberRule(StrEnum):
    SET = "set by the fleet"
    REFUSED = "refused"
    BY_ENGINE = "refused by the engine"


@dataclass(frozen=True, slots=True)
class RequestMember:
    """One member and the reason for its rule. Null always passes; false passes if `is_off_if_false`."""

    name: str
    rule: MemberRule
    why: str
    is_off_if_false: bool = False


_GUIDED = ("choice", "decoding_backend", "grammar", "json", "regex", "whitespace_pattern")
REQUEST_MEMBERS: Final = (
    RequestMember("model", MemberRule.SET, "names the model; the engine gets its own name for it"),
    RequestMember("priority", MemberRule.SET, "is that of the request's class, where the engine knows priorities"),
    RequestMember(
        "stream_options",
        MemberRule.SET,
        "has `include_usage` set for counting; clients that did not set it get no usage",
    ),
    RequestMember(
        "kv_transfer_params",
        MemberRule.REFUSED,
        "tells an engine whose memory to read and which to hold; only the fleet may",
    ),
    RequestMember("ec_transfer_params", MemberRule.REFUSED, "the same as `kv_transfer_params`, for encoded media"),
    RequestMember(
        "switchyard_continuation", MemberRule.REFUSED, "repeats the tokens of another cell; only the fleet may"
    ),
    RequestMember("vllm_xargs", MemberRule.REFUSED, "is for engine plugins, and there are none"),
    RequestMember(
        "request_id",
        MemberRule.REFUSED,
        "could be the id of another request; send the header `X-Request-Id`, which is in every log",
    ),
    RequestMember(
        "use_beam_search",
        MemberRule.REFUSED,
        "makes requests inside the engine that have no class and are not counted",
        is_off_if_false=True,
    ),
    *(
        RequestMember(
            f"guided_{each}",
            MemberRule.REFUSED,
            "is no longer known to vLLM, which would answer without it; use `response_format` or `structured_outputs`",
        )
        for each in _GUIDED
    ),
    RequestMember("chat_template", MemberRule.BY_ENGINE, "is a program, which runs in the engine"),
    RequestMember("mm_processor_kwargs", MemberRule.BY_ENGINE, "changes how much memory media take"),
    RequestMember("media_io_kwargs", MemberRule.BY_ENGINE, "the same"),
    RequestMember("prompt_embeds", MemberRule.BY_ENGINE, "is a file of tensors, which a decoder of code reads"),
    RequestMember(
        "image_url, video_url, audio_url, file_url",
        MemberRule.BY_ENGINE,
        "are accepted only as `data:`: a URL would be fetched from inside the fleet's network, a file from its host",
    ),
)
REFUSED: Final = {member.name: member for member in REQUEST_MEMBERS if member.rule is MemberRule.REFUSED}


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
"""Tools that clients execute. vLLM accepts most tools that OpenAI's and Anthropic's servers execute, and then never
calls them."""


def check_request(path: str, request: Mapping[str, Any]) -> None:
    """Raises BadRequest if a member is rejected, or has a value that the API of this path does not have."""
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
    if REFUSED.keys().isdisjoint(request):
        return
    for name, value in request.items():
        member = REFUSED.get(name)
        if member is None or value is None or (value is False and member.is_off_if_false):
            continue
        raise BadRequest(f"the member `{name}` is not taken: it {member.why}", name, code="unsupported_parameter")


def _check_tools(tools: Any, known: tuple[str, ...]) -> None:
    """`known` empty: the API of this path names no types."""
    for number, tool in enumerate(tools if known and isinstance(tools, list) else ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind not in known:
            message = f"`tools[{number}].type`: {kind[:40]!r} is not supported; use {' or '.join(known)}"
            raise BadRequest(message, "tools", code="invalid_value")
