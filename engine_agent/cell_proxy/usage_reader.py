"""Reads from an answer that passes what its engine says it used. Pure; the bytes are never changed.

Where usage stands depends on the path (`engine_agent.protocol.api_surface.Counting`). It counts at its own place only,
at the top of the object or of its `response` or `message`: what a client or a model wrote is inside strings, or deeper.
Of an event that cannot have usage in it nothing is parsed; of an answer or event that is long nothing is kept.
"""

import re
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from engine_agent.cell_proxy.json_member import JsonMember
from engine_agent.protocol.api_surface import Counting

MAX_TOKENS = 2**48
HELD_BYTES = 256 * 1024
"""Of an answer, and of an event, up to here the whole is kept until it is parsed at its end."""
_NAME = b'"usage"'
"""A text that a model writes cannot match: inside a JSON string quotes are escaped."""
_EVENT_END = re.compile(rb"\r?\n\r?\n")
_PATHS = {Counting.RESPONSE_USAGE: (b"response", b"usage")}
"""Of streams; else it is at the top."""

Tokens = int | None
Kind = TypeVar("Kind")


class _Details(msgspec.Struct):
    cached_tokens: Tokens = None


class _Usage(msgspec.Struct):
    """By the names of OpenAI's completions, of its responses, and of Anthropic's messages."""

    prompt_tokens: Tokens = None
    completion_tokens: Tokens = None
    prompt_tokens_details: _Details | None = None
    input_tokens: Tokens = None
    output_tokens: Tokens = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: Tokens = None
    cache_creation_input_tokens: Tokens = None


class _Holder(msgspec.Struct):
    usage: _Usage | None = None


class _Event(msgspec.Struct):
    """What matters of an event: `choices` tell the usage of a whole stream from that of one choice so far."""

    usage: _Usage | None = None
    choices: msgspec.Raw = msgspec.Raw()
    response: _Holder | None = None
    message: _Holder | None = None


_whole = msgspec.json.Decoder(_Holder)
_event = msgspec.json.Decoder(_Event)
_usage = msgspec.json.Decoder(_Usage)


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Tokens of one request; `cached` are part of `prompt`."""

    prompt: int
    completion: int
    cached: int = 0


class UsageReader:
    """The usage of one answer. `told`: what its engine said in the end; None: nothing yet."""

    __slots__ = ("_before", "_counting", "_held", "_long", "_streaming", "told")

    def __init__(self, counting: Counting, *, streaming: bool) -> None:
        self._counting = counting
        self._streaming = streaming
        self._held = b""
        self._long: JsonMember | None = None
        self._before: _Usage | None = None
        """Of a message: what was said when it began."""
        self.told: TokenUsage | None = None

    def add(self, piece: bytes, *, complete: bool) -> None:
        """Take the next bytes of the body; `complete` with the last."""
        if self._counting is Counting.NOTHING:
            return
        if self._streaming:
            self._add_events(piece + b"\n\n" if complete else piece)
        else:
            self._add_whole(piece, complete=complete)

    def _add_whole(self, piece: bytes, *, complete: bool) -> None:
        if self._long is None:
            self._held += piece
            if complete:
                self._tell(_decoded(_whole, self._held))
            elif len(self._held) > HELD_BYTES:
                self._long = JsonMember(b"usage")
                self._long.add(self._held)
                self._held = b""
            return
        self._long.add(piece)
        if complete and self._long.value is not None:
            self._settle(_decoded(_usage, self._long.value))

    def _add_events(self, piece: bytes) -> None:
        if self._long is not None:
            piece = self._end_of_long(self._long, piece)
        if not self._held and piece.endswith(b"\n\n") and _NAME not in piece:
            return
        text = self._held + piece
        *events, self._held = _EVENT_END.split(text)
        for event in events:
            if _NAME in event:
                self._read_event(event)
        if len(self._held) > HELD_BYTES:
            self._long = JsonMember(*_PATHS.get(self._counting, (b"usage",)))
            self._long.add(self._held)
            self._held = b""

    def _end_of_long(self, member: JsonMember, piece: bytes) -> bytes:
        """What follows the data of a long event, which is one line."""
        data, end, rest = piece.partition(b"\n")
        member.add(data)
        if end:
            self._long = None
            if member.value is not None:
                self._settle(_decoded(_usage, member.value))
        return end + rest

    def _read_event(self, event: bytes) -> None:
        data = b"".join(line[5:] for line in event.splitlines() if line.startswith(b"data:"))
        read = _decoded(_event, data)
        if read is None:
            return
        if self._counting is Counting.RESPONSE_USAGE:
            self._tell(read.response)
        elif self._counting is Counting.MESSAGE_USAGE and read.message is not None:
            self._before = read.message.usage
        elif self._counting is Counting.MESSAGE_USAGE or bytes(read.choices).replace(b" ", b"") in (b"", b"[]"):
            self._settle(read.usage)

    def _tell(self, holder: _Holder | None) -> None:
        self._settle(None if holder is None else holder.usage)

    def _settle(self, usage: _Usage | None) -> None:
        if usage is not None:
            self.told = _tokens(usage, self._before or _Usage()) or self.told


def _decoded(decoder: "msgspec.json.Decoder[Kind]", text: bytes) -> Kind | None:
    try:
        return decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _tokens(usage: _Usage, before: _Usage) -> TokenUsage | None:
    """In one form. Anthropic's `input_tokens` are those that no cache had; OpenAI's are all."""
    if usage.prompt_tokens is not None:
        return _checked(usage.prompt_tokens, usage.completion_tokens, _cached(usage.prompt_tokens_details))
    fresh = usage.input_tokens if usage.input_tokens is not None else before.input_tokens
    if fresh is None:
        return None
    if usage.input_tokens_details is not None:
        return _checked(fresh, usage.output_tokens, _cached(usage.input_tokens_details))
    read = _first(usage.cache_read_input_tokens, before.cache_read_input_tokens)
    written = _first(usage.cache_creation_input_tokens, before.cache_creation_input_tokens)
    return _checked(fresh + read + written, usage.output_tokens, read)


def _cached(details: _Details | None) -> int:
    return _first(None if details is None else details.cached_tokens)


def _first(*counts: Tokens) -> int:
    return next((count for count in counts if count is not None), 0)


def _checked(prompt: int, completion: Tokens, cached: int) -> TokenUsage | None:
    """None for what cannot be meant."""
    completion = completion or 0
    if not (0 <= prompt <= MAX_TOKENS and 0 <= completion <= MAX_TOKENS):
        return None
    return TokenUsage(prompt, completion, max(0, min(cached, prompt)))
