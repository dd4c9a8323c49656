"""Which prompts of a decode cell a prefill cell reads, which cell, and the messages of the two proxies. Pure.

Only one answer to one prompt is handed over: of several, vLLM's decode engines have exited (CVE-2026-94623). Prompts
that a prefill cell would read differently, or would have to read as a whole all the same, are not handed over.

A decode proxy sends the client's request, and the prefill proxy requests one token of it. So a compromised decode cell
can have prompts read that it could read itself, and names no memory. From a compromised prefill cell, only parameters
of this form, with its own host and port, reach the decode engine."""

import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from engine_agent.protocol.messages import PrefillCell

PROMPT_MEMBERS = {b"/v1/completions": "prompt", b"/v1/chat/completions": "messages"}
"""Paths whose requests are handed over, and the members with their prompts."""
_ONE = frozenset({b"null", b"1"})
_OFF = frozenset({b"null", b"false"})
_WITHOUT = {
    "n": _ONE,
    "best_of": _ONE,
    "prompt_embeds": _OFF,
    "prompt_logprobs": _OFF,
    "echo": _OFF,
    "tool_choice": frozenset({b"null", b'"auto"', b'"none"'}),
}
"""Values of members that allow a handover. Others mean several answers, a need for the whole prompt here, or an answer
that cannot be one token long."""
_MEDIA = (b'"image_url"', b'"video_url"', b'"input_audio"', b'"audio_url"', b'"image_embeds"')
"""Media in a chat, whose length does not show its tokens."""
PROMPTS_MAX = 8
"""Prompts of a prefill cell. It reads one after the other, so with more the last waits for seconds, and is read here
sooner. Few requests reach that while the cells keep up (docs/bench/prefill_decode.md)."""
_members = msgspec.json.Decoder(dict[str, msgspec.Raw])
_REMEMBERED_BYTES = 1024
_TOKEN_IDS = re.compile(rb"\[[0-9, \t\r\n]*[0-9][ \t\r\n]*\]\Z")


class Alone(StrEnum):
    """Why a decode cell reads a prompt itself."""

    SHORT = "short"
    CACHED = "cached"
    """All but a short rest of it was read here recently."""
    UNSUPPORTED = "unsupported"
    NO_CELL = "no_cell"
    """No prefill cell of its layout, or none that answered recently."""
    BUSY = "busy"
    """All prefill cells have their maximum of prompts."""
    FULL = "transfers_full"
    """This cell has its maximum of handovers in flight."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A prefill cell. `outstanding`: its requests, by this proxy's count or its last report, whichever is more.
    `is_paused`: it failed a moment ago."""

    cell: PrefillCell
    outstanding: int = 0
    is_paused: bool = False


def prompt_for_prefill(path: bytes, body: bytes) -> bytes | None:
    """The prompt of a request as JSON text; None if it is not handed over. `body` was checked
    (`rewrite.request_of`)."""
    name = PROMPT_MEMBERS.get(path)
    if name is None or not body:
        return None
    members = _members.decode(body)
    if name not in members:
        return None
    if any(bytes(members[each]) not in passed for each, passed in _WITHOUT.items() if each in members):
        return None
    prompt = bytes(members[name])
    if name == "messages":
        return None if any(kind in prompt for kind in _MEDIA) else prompt
    return prompt if prompt.startswith(b'"') or is_token_ids(prompt) else None


def is_token_ids(prompt: bytes) -> bool:
    return _TOKEN_IDS.match(prompt) is not None


def choose_cell(candidates: Iterable[Candidate], kv_layout: str) -> PrefillCell | Alone:
    """The cell of this layout with the least outstanding for its size; the first by name among equals."""
    able = [each for each in candidates if kv_layout and each.cell.kv_layout == kv_layout and not each.is_paused]
    if not able:
        return Alone.NO_CELL
    best = min(able, key=lambda each: (each.outstanding / max(1, each.cell.max_concurrency), each.cell.cell))
    return Alone.BUSY if best.outstanding >= min(best.cell.max_concurrency, PROMPTS_MAX) else best.cell


class PromptMemory:
    """Beginnings of prompts that this cell read recently, as hashes of pieces of text: an estimate of its engine's
    cache. Tenants are separate."""

    def __init__(self, most_bytes: int) -> None:
        self._most = max(1, most_bytes // _REMEMBERED_BYTES)
        self._pieces: OrderedDict[int, None] = OrderedDict()

    def known_bytes(self, tenant: str, prompt: bytes) -> int:
        known = 0
        for piece in _chain(tenant, prompt):
            if piece not in self._pieces:
                break
            known += _REMEMBERED_BYTES
        return known

    def add(self, tenant: str, prompt: bytes) -> None:
        """Adds a prompt. Its end is dropped before its beginning."""
        for piece in reversed(_chain(tenant, prompt)):
            self._pieces[piece] = None
            self._pieces.move_to_end(piece)
        while len(self._pieces) > self._most:
            self._pieces.popitem(last=False)


def _chain(tenant: str, prompt: bytes) -> Sequence[int]:
    parent, chain = hash(tenant), []
    for at in range(0, len(prompt) - _REMEMBERED_BYTES + 1, _REMEMBERED_BYTES):
        parent = hash((parent, prompt[at : at + _REMEMBERED_BYTES]))
        chain.append(parent)
    return chain


HANDOVER_HEADER = b"x-switchyard-handover"
"""From a decode proxy: read the prompt of this request, and return its place. The value is the layout of both."""
QUEUE_HEADER = b"x-switchyard-in-flight"
"""On answers: requests in flight in the prefill cell."""
TRACE_HEADERS = frozenset({b"traceparent", b"tracestate"})
ANSWER_BYTES_MAX = 512 * 1024
"""A million tokens in blocks of 16, with their numbers."""

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
    """`kv_transfer_params` in answers of vLLM 0.32's `NixlConnector`, and nothing else."""

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
    """From 0.32 on: what the decode engine reports as cached, instead of all tokens that it fetched."""


class PrefillAnswer(Struct, frozen=True):
    """The answer of a prefill proxy. `cached_tokens` of the prompt were in its cache."""

    kv_transfer_params: msgspec.Raw
    prompt_tokens: _Count = 0
    cached_tokens: _Count = 0


class BadParams(ValueError):
    """An answer of a prefill cell that is not trusted; the text says why."""


_answers = msgspec.json.Decoder(PrefillAnswer)
_params = msgspec.json.Decoder(TransferParams)


def prefill_members(path: bytes) -> bytes:
    """Members, as JSON text, that limit a request to its prompt. They come last, where they override the same names."""
    more = {"max_completion_tokens": 1} if path == b"/v1/chat/completions" else {}
    return msgspec.json.encode({**_ONE_TOKEN, **more, "kv_transfer_params": _TO_PREFILL})[1:-1]


@dataclass(frozen=True, slots=True)
class PromptElsewhere:
    """A prompt that a prefill cell has read. `members`: JSON text for the request to the decode engine. `cached_tokens`
    of the prompt were in the cell's cache. `engine`: the id of its engine."""

    members: bytes
    cached_tokens: int
    engine: str


def read_answer(body: bytes, cell: PrefillCell) -> PromptElsewhere:
    """Parses the answer of a prefill cell. Raises BadParams if it is not of this form, or speaks of another place than
    its own."""
    try:
        answer = _answers.decode(body)
        params = _params.decode(answer.kv_transfer_params)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadParams(f"{cell.cell} answered with parameters that are none: {error}") from error
    if (params.remote_host, params.remote_port) != (cell.host, cell.kv_port):
        place = f"{params.remote_host[:80]}:{params.remote_port}"
        raise BadParams(f"{cell.cell} names {place} as where its prompts lie, and is {cell.host}:{cell.kv_port}")
    # Encoded again: of a repeated member, the engine could read the other one.
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
    """The answer of a prefill engine, without its text. `params` None: it does not keep the prompt."""

    params: msgspec.Raw | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


def read_engine_answer(body: bytes) -> EnginePrefill:
    try:
        given = msgspec.json.decode(body, type=_EngineAnswer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadParams(f"the engine's answer is none: {error}") from error
    usage, params = given.usage or _Usage(), given.kv_transfer_params
    cached = (usage.prompt_tokens_details or {}).get("cached_tokens") or 0
    kept = params if bytes(params) not in {b"", b"null"} else None
    return EnginePrefill(kept, usage.prompt_tokens, cached, usage.completion_tokens)
