"""Messages of a cell proxy: from its agent (which cells it pairs with), from its engine (tokens of a request, changes
of the prefix cache) and to ingresses (prefixes in the cache). Forms and limits only: docs/design/applications.md
(token counts) and docs/design/ingress.md (exact prefix routing).

Engines list blocks: hashes of tokens and of all tokens before them. Ingresses do not tokenize, so proxies list prefixes
for them: hashes of the text at the start of requests, as the ingress computed them. Neither list contains text, and
applications cannot read either.
"""

import zlib
from typing import Final

import msgspec
from msgspec import Struct, json

from engine_agent.protocol.messages import PREFILL_FROM_TOKENS, Assignment, PrefillCell
from engine_agent.protocol.states import CellRole


class Pairs(Struct, frozen=True):
    """Body of `POST /pairs` on a proxy's administration port. See `Assignment`, whose members these are. `name` is
    short, and another one for other pairs: what a proxy says that it has. Empty: it was told of none."""

    name: str = ""
    prefill_cells: tuple[PrefillCell, ...] = ()
    decode_nodes: tuple[str, ...] = ()
    prefill_from_tokens: int = PREFILL_FROM_TOKENS


NO_PAIRS: Final = Pairs()


def pairs_of(assignment: Assignment) -> Pairs:
    """Which a cell is to have; one that does all of its requests has none."""
    if assignment.cell_role is CellRole.MIXED:
        return NO_PAIRS
    cells, nodes, least = assignment.prefill_cells, assignment.decode_nodes, assignment.prefill_from_tokens
    return Pairs(f"{zlib.crc32(json.encode((cells, nodes, least))):08x}", cells, nodes, least)


EXCHANGE_HEADER: Final = b"x-switchyard-exchange"
"""On a request to the engine: the name under which it notes what it computes for it."""
CACHE_SCOPE_HEADER: Final = b"x-switchyard-cache-scope"
"""On a request to the engine, from the ingress: whose prompts in the cache it may find, and be found by."""
PROMPT_TOKENS_HEADER: Final = b"x-switchyard-prompt-tokens"
"""On an answer: how many tokens its prompts have, known before the first of them is sent."""
USAGE_PATH: Final = "/switchyard/usage"
"""`?exchange=NAME`: `ExchangeUsage`, once the answer to that request is over."""
READ_PATH: Final = "/switchyard/read"
"""`?exchange=NAME`: 200 once its prompts are read, 202 if they are not within `READ_LIMIT_S`."""
READ_LIMIT_S: Final = 2.0
"""How long a question waits; an exchange that is not known by then is none."""
COUNTED_APART_PATH: Final = "/switchyard/counted-apart"
"""`CountedApart`, since the engine started."""
END_LIMIT_S: Final = 5.0
"""How long an answer may take to notice that its connection was cut; then what it runs is stopped."""


class ExchangeUsage(msgspec.Struct, frozen=True):
    """Tokens of one request. `cached_tokens` are part of `prompt_tokens`; a prompt that was not read yet is none."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class CountedApart(msgspec.Struct, frozen=True):
    """What is in the engine's counters and in nobody's usage: prompts that were read again for each of `n` answers, and
    tokens that were generated behind the end of an answer."""

    prompt_tokens: int
    completion_tokens: int


EVENTS_PATH: Final = "/switchyard/cache-events"
"""Of an engine, on loopback: `?life=L&after=N` gives `BlockChanges` once there are some, or after `CACHE_POLL_S`."""
PREFIXES_PATH: Final = "/switchyard/cache-prefixes"
"""Of a cell proxy, for ingresses: the same with `PrefixChanges`."""
CACHE_POLL_S: Final = 5.0
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
