"""How a stream continues at another cell: the header by which a relay requests marks, the marks in the stream, and the
member that repeats a request with the tokens that its client has.

A mark is a comment line of server-sent events before the event that it belongs to. `: prompt N D C` names the prompt:
its length in tokens, a digest of their ids, and how many of them the engine found in its cache (absent: none).
`: tokens 1,2` lists the ids that the engine processed since the last mark. `: broken CODE` says that the stream ends
here because its cell failed; the events that follow are for clients whose stream cannot continue. `: leaving` says that
the stream may continue elsewhere, because the cell drains or for the reason that follows. With both the cell counts the
tokens up to there; a cell that falls silent counts none."""

import hashlib
import re
from array import array
from collections.abc import Iterable, Sequence
from sys import byteorder
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

CONTINUATION_HEADER: Final = b"x-switchyard-continuation"
"""`on`: the stream has marks. Only a relay may send it."""
REPLAYED_HEADER: Final = b"x-switchyard-replayed"
"""On a repeated request: how many tokens its client has."""
COUNTED_HEADER: Final = b"x-switchyard-replay-counted"
"""On a repeated request: how many of these tokens other cells have counted, with the prompt. Without it none has
counted anything, because the proxies of the previous cells did not say that their streams ended."""
AVOIDED_HEADER: Final = b"x-switchyard-avoided"
"""On a repeated request: servers that it may not go to, separated by commas."""
VERSION_HEADER: Final = b"x-switchyard-version"
"""On an answer, for the relay: the `CellEndpoint.version` of its cell. On a repeated request: that of the cells that
may continue it."""
SERVER_HEADER: Final = b"x-switchyard-from"
"""On an answer, for the relay: the server that sent it."""
CONTINUATION_MEMBER: Final = "switchyard_continuation"
COUNTS_PATH: Final = "/switchyard/relay"
"""On the socket of a relay: its counts as JSON, for the agent of its ingress."""
REFUSED_TYPE: Final = "continuation_refused"
"""The type of the error with which an engine refuses to continue, with status 409."""
PROMPT_MARK: Final = b": prompt "
TOKENS_MARK: Final = b": tokens "
BROKEN_MARK: Final = b": broken "
LEAVING_MARK: Final = b": leaving\n"
SILENT_MARK: Final = b": leaving engine_silent\n"
MOST_TOKENS: Final = 262_144
"""Of one replay."""
DIGEST_DIGITS: Final = 16

_COUNT: Final = re.compile("[0-9]{1,9}")

TokenId = Annotated[int, Meta(ge=0, le=2**32 - 1)]


class Continuation(Struct, frozen=True, forbid_unknown_fields=True):
    """The tokens of a stream that its client has. `prompt` is `N:D:C` of the first run's last prompt mark, `groups` are
    the ids of its other marks."""

    prompt: str
    groups: tuple[tuple[TokenId, ...], ...]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.groups))

    @property
    def prompt_name(self) -> str:
        """`N:D` of the prompt."""
        return ":".join(self.prompt.split(":")[:2])

    @property
    def cached_tokens(self) -> int:
        """The tokens of the prompt that the first run did not compute, as its client may have read."""
        length, *others = self.prompt.split(":")
        is_stated = len(others) > 1 and all(_COUNT.fullmatch(text) for text in (length, others[1]))
        return min(int(length), int(others[1])) if is_stated else 0


class _Holder(Struct):
    switchyard_continuation: Continuation | None = None


_decoder = msgspec.json.Decoder(_Holder)


def continuation_of(body: bytes) -> Continuation | None:
    """Returns the continuation in a request body, None without one. Raises ValueError if it is malformed."""
    continuation = _decoder.decode(body).switchyard_continuation
    if continuation is not None and continuation.tokens > MOST_TOKENS:
        raise ValueError(f"a continuation has at most {MOST_TOKENS} tokens, not {continuation.tokens}")
    return continuation


def prompt_name(ids: Sequence[int]) -> str:
    """Returns `N:D` of a prompt."""
    packed = array("I", ids)
    if byteorder == "big":
        packed.byteswap()
    return f"{len(packed)}:{hashlib.sha256(packed.tobytes()).hexdigest()[:DIGEST_DIGITS]}"


def prompt_mark(name: str, cached_tokens: int = 0) -> bytes:
    cached = b" %d" % cached_tokens if cached_tokens else b""
    return b"%b%b%b\n" % (PROMPT_MARK, name.replace(":", " ").encode(), cached)


def tokens_mark(ids: Iterable[int]) -> bytes:
    return b"%b%b\n" % (TOKENS_MARK, ",".join(map(str, ids)).encode())


def broken_mark(code: str) -> bytes:
    return b"%b%b\n" % (BROKEN_MARK, code.encode())
