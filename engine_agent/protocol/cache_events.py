"""What an engine says of its prefix cache to its cell proxy, and a cell proxy to ingresses. Forms and limits only; see
docs/design/ingress.md#exact-prefix-routing.

An engine speaks of blocks: hashes of tokens and of all before them. An ingress knows no tokens, so a cell proxy speaks
to it of prefixes: hashes of the text with which requests begin, as the ingress named them. Neither holds any text, and
applications get neither.
"""

from typing import Final

import msgspec
from msgspec import Struct

EVENTS_PATH: Final = "/switchyard/cache-events"
"""Of an engine, on loopback: `?life=L&after=N` gives `BlockChanges`, once there are some or `HOLD_S` have passed."""
PREFIXES_PATH: Final = "/switchyard/cache-prefixes"
"""Of a cell proxy, for ingresses: the same with `PrefixChanges`."""
HOLD_S: Final = 5.0
"""An answer without news: a connection that breaks is seen at once, so this only says that somebody is there."""
MAX_BLOCKS: Final = 1_000_000
"""Of one engine's cache: 16 million tokens in vLLM's blocks of 16. One that has more is not listed."""
MAX_PREFIXES: Final = 32_768
"""That a cell proxy lists: 192 KiB as a snapshot, below what an agent reads of an answer. Those used last stay."""
PREFIX_BYTES: Final = 6
"""Of a prefix's hash. Two of a cell's 32,768 are alike by chance once in 500,000 lists; one costs a cache hit."""
PREFIX_DIGITS: Final = 2 * PREFIX_BYTES
MAX_REQUEST_PREFIXES: Final = 80
"""Of one request: those of 4 MiB, as `prompt_prefixes.lua` cuts them."""


class BlocksStored(Struct, frozen=True, array_like=True, tag="stored"):
    """These blocks are in the cache from now on, the first one behind `parent` (0: nothing is before it) and each
    behind the one before. `exchange` names the request that they were computed for; empty: not known."""

    parent: int
    blocks: tuple[int, ...]
    exchange: str = ""


class BlocksRemoved(Struct, frozen=True, array_like=True, tag="removed"):
    blocks: tuple[int, ...]


class CacheCleared(Struct, frozen=True, array_like=True, tag="cleared"):
    pass


BlockEvent = BlocksStored | BlocksRemoved | CacheCleared


class BlockChanges(Struct, frozen=True, array_like=True):
    """What happened to an engine's cache after what the reader knows, up to number `upto`, in the life `life` of the
    list. `is_whole`: the reader forgets what it knew, because it is of another life, or too old."""

    life: str
    upto: int
    is_whole: bool
    block_tokens: int
    events: tuple[BlockEvent, ...]


class PrefixChanges(Struct, frozen=True, array_like=True):
    """The same of the prefixes that a cell has: hashes of `PREFIX_BYTES` each, one behind the other. `is_known` False:
    its engine does not say what it has."""

    life: str
    upto: int
    is_whole: bool
    is_known: bool
    added: bytes
    removed: bytes


def packed(prefixes: "list[int] | tuple[int, ...] | set[int]") -> bytes:
    """Prefixes as bytes."""
    return b"".join(prefix.to_bytes(PREFIX_BYTES) for prefix in prefixes)


def digits_of(prefixes: bytes) -> list[str]:
    """Packed prefixes as the hexadecimal digits by which headers and HAProxy name them."""
    text = prefixes.hex()
    return [text[at : at + PREFIX_DIGITS] for at in range(0, len(text), PREFIX_DIGITS)]


class BadChanges(ValueError):
    """An answer that is no list of changes; the text says why."""


def decode_blocks(body: bytes) -> BlockChanges:
    """Raises:
    BadChanges: it is none.
    """
    try:
        return msgspec.msgpack.decode(body, type=BlockChanges)
    except msgspec.DecodeError as error:
        raise BadChanges(f"no changes of a cache: {error}") from None


def decode_prefixes(body: bytes) -> PrefixChanges:
    """Raises:
    BadChanges: it is none, or its hashes do not end where they should.
    """
    try:
        changes = msgspec.msgpack.decode(body, type=PrefixChanges)
    except msgspec.DecodeError as error:
        raise BadChanges(f"no changes of prefixes: {error}") from None
    if len(changes.added) % PREFIX_BYTES or len(changes.removed) % PREFIX_BYTES:
        raise BadChanges(f"prefixes have {PREFIX_BYTES} bytes each")
    if len(changes.added) > MAX_PREFIXES * PREFIX_BYTES:
        raise BadChanges(f"{len(changes.added) // PREFIX_BYTES} prefixes; a cell lists {MAX_PREFIXES} at most")
    return changes
