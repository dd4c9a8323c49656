"""Members of request bodies that do not simply pass on to the engine: what the fleet sets itself, what it refuses by
name, and what engines refuse as they are started here. All others pass on, also those that only vLLM knows
(`extra_body`). docs/api-applications.md is made of these rows. Pure.

Judged by what a member may do to others: to tenants beside this one, to the order of requests, to what is counted, and
to the host of the engine. Source: the request models of vLLM 0.32 (`vllm/entrypoints/**/protocol.py`).
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class MemberRule(StrEnum):
    SET = "set by the fleet"
    REFUSED = "refused"
    BY_ENGINE = "refused by the engine"


@dataclass(frozen=True, slots=True)
class RequestMember:
    """One member, and why. Null always passes; false does where `is_off_if_false`."""

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
        "has `include_usage` set, by which requests are counted; who did not set it gets no usage",
    ),
    RequestMember(
        "kv_transfer_params",
        MemberRule.REFUSED,
        "tells an engine whose memory to read and which to hold; only the fleet may",
    ),
    RequestMember("ec_transfer_params", MemberRule.REFUSED, "as `kv_transfer_params`, of encoded media"),
    RequestMember("vllm_xargs", MemberRule.REFUSED, "is for plugins of the engine, and there are none"),
    RequestMember(
        "request_id",
        MemberRule.REFUSED,
        "could be that of another request; send the header `X-Request-Id`, which is in every log",
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
        "are taken as `data:` alone: an address would be fetched from inside the fleet's network, a file from its host",
    ),
)
REFUSED: Final = {member.name: member for member in REQUEST_MEMBERS if member.rule is MemberRule.REFUSED}
