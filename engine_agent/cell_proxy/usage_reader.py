"""Counts the tokens of an answer as it passes, and reads the usage that its engine reports. Pure: the bytes never
change.

While a stream runs, every server-sent event is one token, and none is decoded. At its end the engine's usage corrects
the count. The place of usage depends on the path (`engine_agent.protocol.api_surface.Counting`): only the top of the
object, or of its `response` or `message`, counts. Text of clients and models is inside strings, or deeper. Only events
that can contain usage are parsed, and long answers and events are not kept (`JsonMember`)."""

import re
from typing import TypeVar

import msgspec

from engine_agent.protocol.api_surface import Counting

MAX_VALUE_BYTES = 64 * 1024
"""Longest value that is kept. Usage has some hundred bytes."""
_MAX_KEY_BYTES = 64
_OUTSIDE = re.compile(rb'[^{}\[\]":,]*+')
_INSIDE = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
_FLAT = rb'[^{}\[\]"]++|"(?:[^"\\]++|\\.)*+"'
_NESTED = rb"(?:" + _FLAT + rb"|\{(?:" + _FLAT + rb")*+\}|\[(?:" + _FLAT + rb")*+\])"
_WHOLE_VALUES = re.compile(rb"(?:" + _NESTED + rb")*+", re.DOTALL)
"""All that can be skipped in one match: scalars, strings, and objects and lists of those."""


class JsonMember:
    """Finds the value at `path` (names from the outermost object inwards) in a JSON object that arrives in pieces,
    without keeping the object, which can have many megabytes.

    Only a member at its place counts: text that looks like one is inside a string or deeper. The text is assumed to be
    valid JSON; in other text it finds something or nothing, and never keeps more than `MAX_VALUE_BYTES`. `value` is
    JSON text; None while it is incomplete, and if it is no object or list."""

    __slots__ = (
        "_depth",
        "_escaped",
        "_found",
        "_in_string",
        "_kept",
        "_key",
        "_matched",
        "_path",
        "_wants_key",
        "value",
    )

    def __init__(self, *path: bytes) -> None:
        self._path = path
        self._depth = 0
        self._matched = 0
        """How many names of the path enclose this place."""
        self._wants_key = False
        self._key: bytes | None = None
        """The name of the current member, or of the one that is being read, if it may be the next of the path."""
        self._in_string = self._escaped = False
        self._found = False
        self._kept = bytearray()
        self.value: bytes | None = None

    def add(self, piece: bytes) -> None:
        at, end = 0, len(piece)
        while at < end:
            began, found = at, self._found
            at = self._string(piece, at) if self._in_string else self._next(piece, at)
            if found:
                self._keep(piece[began:at])
            if found and not self._found:
                self.value = bytes(self._kept) if len(self._kept) <= MAX_VALUE_BYTES else None

    @property
    def _is_here(self) -> bool:
        return not self._found and self._depth == self._matched + 1

    def _string(self, piece: bytes, at: int) -> int:
        began = at
        if self._escaped:
            self._escaped = False
            at += 1
        at = _INSIDE.match(piece, at).end()  # type: ignore[union-attr] # it matches anything
        self._note_key(piece[began:at])
        if at < len(piece):
            self._in_string = piece[at : at + 1] == b"\\"
            self._escaped = self._in_string  # a lone backslash at the end of the piece
            self._note_key(b"\\" if self._escaped else b"")
            at += 1
        return at

    def _note_key(self, text: bytes) -> None:
        if self._is_here and self._wants_key and self._key is not None and len(self._key) < _MAX_KEY_BYTES:
            self._key += text

    def _next(self, piece: bytes, at: int) -> int:
        """Reads between strings, up to and including the next sign with a meaning here."""
        if self._depth and not self._is_here:
            at = _WHOLE_VALUES.match(piece, at).end()  # type: ignore[union-attr]
        else:
            at = _OUTSIDE.match(piece, at).end()  # type: ignore[union-attr]
        if at < len(piece):
            self._sign(piece[at : at + 1])
            at += 1
        return at

    def _sign(self, sign: bytes) -> None:
        if sign == b'"':
            self._in_string = True
            if self._is_here and self._wants_key:
                self._key = b""
        elif sign in b"{[":
            self._enter(sign)
        elif sign in b"}]":
            self._leave()
        elif self._is_here and sign == b":":
            self._wants_key = False
        elif self._is_here and sign == b",":
            self._wants_key, self._key = True, None

    def _enter(self, sign: bytes) -> None:
        if self._is_here and self._key == self._path[self._matched]:
            if self._matched + 1 == len(self._path):
                self._found = True
                self._kept = bytearray(sign)
            elif sign == b"{":
                self._matched += 1
        self._depth += 1
        self._wants_key, self._key = sign == b"{", None

    def _leave(self) -> None:
        self._depth -= 1
        if self._found and self._depth == self._matched + 1:
            self._found = False
        elif self._matched and self._depth == self._matched:
            self._matched -= 1
        self._wants_key, self._key = False, None

    def _keep(self, text: bytes) -> None:
        if len(self._kept) <= MAX_VALUE_BYTES:
            self._kept += text


MAX_TOKENS = 2**48
HELD_BYTES = 256 * 1024
"""Answers and events up to this length are kept until they are parsed at their end."""
_NAME = b'"usage"'
"""Text that a model writes cannot match: in a JSON string quotes are escaped."""
_FINISHED = re.compile(rb'"finish_reason": ?"')
_EVENT_END = re.compile(rb"\r?\n\r?\n")
_PATHS = {Counting.RESPONSE_USAGE: (b"response", b"usage")}
"""In streams; otherwise it is at the top."""

Tokens = int | None
Kind = TypeVar("Kind")


class _Details(msgspec.Struct):
    cached_tokens: Tokens = None


class _Usage(msgspec.Struct):
    """With the names of OpenAI's completions, its responses, and Anthropic's messages."""

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
    """The relevant members of an event. `choices` distinguish the usage of a stream from that of one choice so far."""

    usage: _Usage | None = None
    choices: msgspec.Raw = msgspec.Raw()
    response: _Holder | None = None
    message: _Holder | None = None


_whole = msgspec.json.Decoder(_Holder)
_event = msgspec.json.Decoder(_Event)
_usage = msgspec.json.Decoder(_Usage)


class TokenUsage(msgspec.Struct, frozen=True):
    """Tokens of one request. `cached` are part of `prompt`."""

    prompt: int
    completion: int
    cached: int = 0


class UsageReader:
    """The usage of one answer. `reported`: what the engine reported last; None: nothing yet."""

    __slots__ = ("_before", "_buffer", "_closing", "_counting", "_long", "_streaming", "reported")

    def __init__(self, counting: Counting, *, streaming: bool) -> None:
        self._counting = counting
        self._streaming = streaming
        self._buffer = b""
        self._long: JsonMember | None = None
        self._before: _Usage | None = None
        """The usage at the beginning of a message."""
        self._closing: _Usage | None = None
        """The usage in the event that ends the only choice, which llama.cpp's completions have instead of one without
        choices. vLLM may state that of each choice so far, so it counts only if nothing follows."""
        self.reported: TokenUsage | None = None

    @property
    def is_within_event(self) -> bool:
        """Whether the bytes so far end within an event."""
        return bool(self._buffer) or self._long is not None

    def add(self, piece: bytes, *, complete: bool) -> None:
        """Takes the next bytes of the body; `complete` with the last."""
        if self._counting is Counting.NOTHING:
            return
        if self._streaming:
            self._add_events(piece + b"\n\n" if complete else piece)
            if complete and self.reported is None:
                self._settle(self._closing)
        else:
            self._add_whole(piece, complete=complete)

    def _add_whole(self, piece: bytes, *, complete: bool) -> None:
        if self._long is None:
            self._buffer += piece
            if complete:
                self._settle_holder(_decoded(_whole, self._buffer))
            elif len(self._buffer) > HELD_BYTES:
                self._long = JsonMember(b"usage")
                self._long.add(self._buffer)
                self._buffer = b""
            return
        self._long.add(piece)
        if complete and self._long.value is not None:
            self._settle(_decoded(_usage, self._long.value))

    def _add_events(self, piece: bytes) -> None:
        if self._long is not None:
            piece = self._end_of_long(self._long, piece)
        if not self._buffer and piece.endswith(b"\n\n") and _NAME not in piece:
            return
        text = self._buffer + piece
        *events, self._buffer = _EVENT_END.split(text)
        for event in events:
            if _NAME in event:
                self._read_event(event)
        if len(self._buffer) > HELD_BYTES:
            self._long = JsonMember(*_PATHS.get(self._counting, (b"usage",)))
            self._long.add(self._buffer)
            self._buffer = b""

    def _end_of_long(self, member: JsonMember, piece: bytes) -> bytes:
        """Returns the bytes after the data of a long event, which is one line."""
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
            self._settle_holder(read.response)
        elif self._counting is Counting.MESSAGE_USAGE and read.message is not None:
            self._before = read.message.usage
        elif self._counting is Counting.MESSAGE_USAGE or bytes(read.choices).replace(b" ", b"") in (b"", b"[]"):
            self._settle(read.usage)
        elif _FINISHED.search(bytes(read.choices)):
            self._closing = read.usage

    def _settle_holder(self, holder: _Holder | None) -> None:
        self._settle(None if holder is None else holder.usage)

    def _settle(self, usage: _Usage | None) -> None:
        if usage is not None:
            self.reported = _tokens(usage, self._before or _Usage()) or self.reported


def _decoded(decoder: "msgspec.json.Decoder[Kind]", text: bytes) -> Kind | None:
    try:
        return decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _tokens(usage: _Usage, before: _Usage) -> TokenUsage | None:
    """In one form. Anthropic's `input_tokens` exclude cached tokens, OpenAI's include them."""
    if usage.prompt_tokens is not None:
        return _plausible_usage(usage.prompt_tokens, usage.completion_tokens, _cached(usage.prompt_tokens_details))
    fresh = usage.input_tokens if usage.input_tokens is not None else before.input_tokens
    if fresh is None:
        return None
    if usage.input_tokens_details is not None:
        return _plausible_usage(fresh, usage.output_tokens, _cached(usage.input_tokens_details))
    read = _first(usage.cache_read_input_tokens, before.cache_read_input_tokens)
    written = _first(usage.cache_creation_input_tokens, before.cache_creation_input_tokens)
    return _plausible_usage(fresh + read + written, usage.output_tokens, read)


def _cached(details: _Details | None) -> int:
    return _first(None if details is None else details.cached_tokens)


def _first(*counts: Tokens) -> int:
    return next((count for count in counts if count is not None), 0)


def _plausible_usage(prompt: int, completion: Tokens, cached: int) -> TokenUsage | None:
    completion = completion or 0
    if not (0 <= prompt <= MAX_TOKENS and 0 <= completion <= MAX_TOKENS):
        return None
    return TokenUsage(prompt, completion, max(0, min(cached, prompt)))


_ERROR_EVENT = b'data: {"error"'
_DONE_EVENT = b"data: [DONE]"
_NO_CONTENT = re.compile(rb'"content": ?(?:""|null)')
_EVENT_STARTS = (b"d", b"e", b":")
"""Of `data`, `event`, and comments."""
_TAIL_BYTES = 4
"""The length of an event's end."""


def is_error_event(piece: bytes) -> bool:
    """Whether a piece of a stream has an error event, as vLLM writes it. No text can: its quotes are escaped."""
    return _ERROR_EVENT in piece


class TokenCount:
    """The tokens of one answer; `streaming`: it is a `text/event-stream`."""

    __slots__ = ("_reader", "_streaming", "_tail", "errors", "tokens")

    def __init__(self, counting: Counting = Counting.STREAM_OPTIONS, *, streaming: bool) -> None:
        self._streaming = streaming
        self._reader = UsageReader(counting, streaming=streaming)
        self._tail = b""
        self.tokens = 0
        self.errors = 0

    @property
    def reported(self) -> TokenUsage | None:
        return self._reader.reported

    def add(self, piece: bytes, *, complete: bool = False) -> int:
        """Takes the next bytes of the body. Returns how many token events end in them (0 unless streaming)."""
        if self._streaming and not complete and self._is_ordinary(piece):
            ended = piece.count(b"\n\n")
            self.tokens += ended
            return ended
        self._reader.add(piece, complete=complete)
        tail = self._tail
        self._tail = (tail + piece)[-_TAIL_BYTES:] if len(piece) < _TAIL_BYTES else piece[-_TAIL_BYTES:]
        if not self._streaming:
            return 0
        ended = (tail[-1:] + piece).count(b"\n\n") + (tail[-2:] + piece).count(b"\n\r\n")
        ended -= _is_no_token(piece, first=not tail)
        if is_error_event(piece):
            self.errors += 1
            ended -= 1
        ended = max(0, ended)
        self.tokens += ended
        return ended

    def _is_ordinary(self, piece: bytes) -> bool:
        """Whether it has only complete events with text, of which nothing but their number is of interest."""
        return (
            self._tail[-2:] == b"\n\n"
            and piece[-2:] == b"\n\n"
            and piece[:1] in _EVENT_STARTS
            and not self._reader.is_within_event
            and _NAME not in piece
            and b"[]" not in piece
            and _DONE_EVENT not in piece
            and b"\r" not in piece
            and not is_error_event(piece)
        )

    def settle(self) -> int:
        """At the end of the answer: the reported tokens minus the counted events; often negative."""
        return 0 if self.reported is None else self.reported.completion - self.tokens

    @property
    def at_boundary(self) -> bool:
        """Whether this is between two events, where another one can be inserted."""
        return not self._tail or self._tail.endswith((b"\n\n", b"\r\n\r\n"))


def _is_no_token(piece: bytes, *, first: bool) -> int:
    """Events in this piece without a token: the end mark, the usage, and the role that opens a chat."""
    usage = piece.count(b'"choices":[]') + piece.count(b'"choices": []')
    done = piece.startswith(_DONE_EVENT) or b"\n" + _DONE_EVENT in piece
    opening = first and b'"role":' in piece and _NO_CONTENT.search(piece) is not None
    return usage + done + opening
