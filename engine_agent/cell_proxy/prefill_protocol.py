"""What the proxies of a decode cell and of a prefill cell say to each other, and what is believed of it. Pure.

A decode proxy sends the request as its client did; the prefill proxy makes a request for one token of it. So a
compromised decode cell gets prompts read that it could read itself, and names no memory; of what a compromised prefill
cell says, only parameters of this form, with its own host and port, reach the decode engine.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from engine_agent.protocol.messages import PrefillCell

HANDOVER_HEADER = b"x-switchyard-handover"
"""From a decode proxy: read the prompt of this request, and say where it lies. Its value is the layout of both."""
QUEUE_HEADER = b"x-switchyard-in-flight"
"""On the answers: how many requests the prefill cell has."""
TRACE_HEADERS = frozenset({b"traceparent", b"tracestate"})
ANSWER_BYTES_MAX = 512 * 1024
"""A million tokens in blocks of 16, by their numbers."""

_ONE_TOKEN: Mapping[str, Any] = {"stream": False, "stream_options": None, "max_tokens": 1, "min_tokens": 0}
_TO_PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
_Count = Annotated[int, Meta(ge=0, le=2**40)]
_Degree = Annotated[int, Meta(ge=1, le=4096)]
_Name = Annotated[str, Meta(min_length=1, max_length=256)]


class TransferParams(Struct, forbid_unknown_fields=True):
    """`kv_transfer_params` as `NixlConnector` of vLLM 0.32 answers them, and nothing else."""

    do_remote_prefill: Literal[True]
    do_remote_decode: Literal[False]
    remote_block_ids: list[list[_Count]]
    remote_engine_id: _Name
    remote_request_id: _Name
    remote_host: _Name
    remote_port: int
    tp_size: _Degree = 1
    dcp_size: _Degree = 1
    pp_size: _Degree = 1
    remote_num_tokens: _Count = 0
    remote_blocks_expiry_time: float | None = None
    transfer_mode: Literal["pull"] = "pull"
    remote_prefill_cached_tokens: _Count | UnsetType = UNSET
    """From 0.32 on: what the decode engine reports as cached, instead of all that it was handed."""


class PrefillAnswer(Struct, frozen=True):
    """What a prefill proxy answers. `cached_tokens` of the prompt it had already."""

    kv_transfer_params: msgspec.Raw
    prompt_tokens: _Count = 0
    cached_tokens: _Count = 0


class BadParams(ValueError):
    """What a prefill cell said that is not believed; the text says why."""


_answers = msgspec.json.Decoder(PrefillAnswer)
_params = msgspec.json.Decoder(TransferParams)


def prefill_members(path: bytes) -> bytes:
    """Members, as they stand in JSON, that make a request into one for its prompt: they come last, where they override
    the same names before them."""
    more = {"max_completion_tokens": 1} if path == b"/v1/chat/completions" else {}
    return msgspec.json.encode({**_ONE_TOKEN, **more, "kv_transfer_params": _TO_PREFILL})[1:-1]


@dataclass(frozen=True, slots=True)
class PromptElsewhere:
    """A prompt that a prefill cell has read. `members`, as they stand in JSON, are what the request to the decode
    engine gets; of its tokens the cell had `cached_tokens` already; `engine` is what its engine calls itself."""

    members: bytes
    cached_tokens: int
    engine: str


def read_answer(body: bytes, cell: PrefillCell) -> PromptElsewhere:
    """What a prefill cell answered.

    Raises:
        BadParams: it is not of this form, or speaks of another place than its own.
    """
    try:
        answer = _answers.decode(body)
        params = _params.decode(answer.kv_transfer_params)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadParams(f"{cell.cell} answered with parameters that are none: {error}") from error
    if (params.remote_host, params.remote_port) != (cell.host, cell.kv_port):
        place = f"{params.remote_host[:80]}:{params.remote_port}"
        raise BadParams(f"{cell.cell} names {place} as where its prompts lie, and is {cell.host}:{cell.kv_port}")
    # Written anew: of a member that is there twice, the engine may believe the other one.
    members = b'"kv_transfer_params":' + msgspec.json.encode(params)
    return PromptElsewhere(members, answer.cached_tokens, params.remote_engine_id)


class _Usage(Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: dict[str, int | None] | None = None


class _EngineAnswer(Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw()
    usage: _Usage | None = None


class EnginePrefill(Struct, frozen=True):
    """What a prefill engine answered, without what it said. `params` None: it does not keep the prompt."""

    params: msgspec.Raw | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


def read_engine_answer(body: bytes) -> EnginePrefill:
    """Raises:
    BadParams: it is no answer.
    """
    try:
        given = msgspec.json.decode(body, type=_EngineAnswer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadParams(f"the engine's answer is none: {error}") from error
    usage, params = given.usage or _Usage(), given.kv_transfer_params
    cached = (usage.prompt_tokens_details or {}).get("cached_tokens") or 0
    kept = params if bytes(params) not in {b"", b"null"} else None
    return EnginePrefill(kept, usage.prompt_tokens, cached, usage.completion_tokens)
