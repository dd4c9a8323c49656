"""Messages of a cell proxy: from its agent (which cells it pairs with), from its engine (tokens of a request, changes
of the prefix cache) and to ingresses (its load, prefixes in the cache). Forms and limits only:
docs/design/applications.md (token counts) and docs/design/ingress.md (shared load, exact prefix routing).

Engines list blocks: hashes of tokens and of all tokens before them. Ingresses do not tokenize, so proxies list prefixes
for them: hashes of the text at the start of requests, as the ingress computed them. Neither list contains text, and
applications cannot read either."""

import zlib
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct, json

from engine_agent.protocol.messages import PREFILL_FROM_TOKENS, Assignment, PrefillCell
from engine_agent.protocol.states import CellRole


class Pairs(Struct, frozen=True):
    """Body of `POST /pairs` on a proxy's administration port: the cells that its cell pairs with, as in `Assignment`.
    `name` is a short digest of the pairs, by which a proxy reports which pairs it has. Empty: it has received none."""

    name: str = ""
    prefill_cells: tuple[PrefillCell, ...] = ()
    decode_nodes: tuple[str, ...] = ()
    prefill_from_tokens: int = PREFILL_FROM_TOKENS


NO_PAIRS: Final = Pairs()


def pairs_of(assignment: Assignment) -> Pairs:
    """The pairs of a cell; a `mixed` cell has none."""
    if assignment.cell_role is CellRole.MIXED:
        return NO_PAIRS
    cells, nodes, least = assignment.prefill_cells, assignment.decode_nodes, assignment.prefill_from_tokens
    return Pairs(f"{zlib.crc32(json.encode((cells, nodes, least))):08x}", cells, nodes, least)


EXCHANGE_HEADER: Final = b"x-switchyard-exchange"
"""On a request to the engine: the name under which the engine counts the work for it."""
CACHE_SCOPE_HEADER: Final = b"x-switchyard-cache-scope"
"""On a request to the engine, set by the ingress: prompts find each other in the cache only within one scope."""
PROMPT_TOKENS_HEADER: Final = b"x-switchyard-prompt-tokens"
"""On an answer: the number of prompt tokens, known before the first token is sent."""
USAGE_PATH: Final = "/switchyard/usage"
"""`?exchange=NAME`: `ExchangeUsage`, once the answer to that request is complete."""
READ_PATH: Final = "/switchyard/read"
"""`?exchange=NAME`: 200 once its prompts are read, 202 if they are not within `READ_LIMIT_S`."""
READ_LIMIT_S: Final = 2.0
"""How long the request waits. An exchange that is unknown by then does not exist."""
COUNTED_APART_PATH: Final = "/switchyard/counted-apart"
"""`CountedApart` since the engine started."""
END_LIMIT_S: Final = 5.0
"""How long an answer may take to notice that its connection was closed, before its work is stopped."""


class ExchangeUsage(msgspec.Struct, frozen=True):
    """Tokens of one request. `cached_tokens` are part of `prompt_tokens`; a prompt counts once it is read."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class CountedApart(msgspec.Struct, frozen=True):
    """Tokens in the engine's counters that belong to no request's usage: prompts that were read again for each of `n`
    answers, and tokens generated after the end of an answer."""

    prompt_tokens: int
    completion_tokens: int


EVENTS_PATH: Final = "/switchyard/cache-events"
"""Of an engine, on loopback: `?life=L&after=N` returns `BlockChanges` once there are some, or after `CACHE_POLL_S`."""
PREFIXES_PATH: Final = "/switchyard/cache-prefixes"
"""Of a cell proxy, for ingresses: the same with `PrefixChanges`."""
CACHE_POLL_S: Final = 5.0
"""Longest wait of a poll without changes. A broken connection is noticed immediately, so the interval only proves that
the server is alive."""
MAX_BLOCKS: Final = 1_000_000
"""Blocks in one engine's cache: 16 million tokens in vLLM's blocks of 16. A larger cache is not listed."""
MAX_PREFIXES: Final = 32_768
"""Prefixes that a cell proxy lists: a snapshot has 192 KiB, less than the limit of answers that agents read. The most
recently used ones stay."""
PREFIX_BYTES: Final = 6
"""Bytes of a prefix's hash. Two of a cell's 32,768 collide once in 500,000 lists; a collision costs one cache hit."""
PREFIX_DIGITS: Final = 2 * PREFIX_BYTES
MAX_REQUEST_PREFIXES: Final = 80
"""Prefixes of one request: those of 4 MiB, as `prompt_prefixes.lua` cuts them."""


class BlocksStored(Struct, frozen=True, array_like=True, tag="stored"):
    """These blocks are now in the cache: the first one after `parent` (0: at the start), and each after the previous
    one. `exchange` names the request that they were computed for; empty: unknown."""

    parent: int
    blocks: tuple[int, ...]
    exchange: str = ""


class BlocksRemoved(Struct, frozen=True, array_like=True, tag="removed"):
    blocks: tuple[int, ...]


class CacheCleared(Struct, frozen=True, array_like=True, tag="cleared"):
    pass


BlockEvent = BlocksStored | BlocksRemoved | CacheCleared


class BlockChanges(Struct, frozen=True, array_like=True):
    """Changes of an engine's cache after those that the reader knows, up to number `upto`, in the life `life` of the
    list. `is_whole`: the reader must forget what it knew, because that is of another life or too old."""

    life: str
    upto: int
    is_whole: bool
    block_tokens: int
    events: tuple[BlockEvent, ...]


LOAD_VERSION: Final = 1
"""Of `CellLoad`. It rises when a member changes its meaning; an ingress ignores the load of another version."""
MAX_HEALTH_BYTES: Final = 1024
"""Of the answer to an ingress's health query."""
INGRESS_HEADER: Final = b"x-switchyard-ingress"
"""On requests to a cell: the ingress that sends them. Over TLS the certificate names it."""
MAX_INGRESSES: Final = 64
"""Ingresses whose requests a cell counts separately. Requests of further ones count in its total only."""
_Number = Annotated[int, Meta(ge=0, le=1_000_000)]


class CellLoad(Struct, frozen=True, forbid_unknown_fields=True):
    """The load of one start of a cell in the answer to a health query. `server`: its name on the request path. `own` of
    the `in_flight` requests are of the ingress that asks. `waiting`: sequences above its concurrency, which wait in its
    engine. `kv_percent`: use of its KV cache by `running` sequences, at most 10 s ago; None if unknown."""

    version: _Number
    server: Annotated[str, Meta(max_length=200)]
    own: _Number
    in_flight: _Number
    waiting: _Number = 0
    running: _Number = 0
    kv_percent: Annotated[float, Meta(ge=0, le=100)] | None = None


class HealthAnswer(Struct, frozen=True):
    """The body of a healthy cell's answer to `GET /healthz`."""

    ok: bool
    load: CellLoad | None = None


class BadLoad(ValueError):
    """An answer without a usable load."""


def decode_load(body: bytes) -> CellLoad | None:
    """The load in the answer to a health query; None if it has none, or one of another version. Raises BadLoad for
    anything else."""
    if len(body) > MAX_HEALTH_BYTES:
        raise BadLoad(f"{len(body)} bytes; a health answer has {MAX_HEALTH_BYTES} at most")
    try:
        load = msgspec.json.decode(body, type=_Versioned).load
        if load is None or load.version != LOAD_VERSION:
            return None
        return msgspec.json.decode(body, type=HealthAnswer).load
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadLoad(f"not the load of a cell: {error}") from None


class _Version(Struct, frozen=True):
    version: int


class _Versioned(Struct, frozen=True):
    load: _Version | None = None


class PrefixChanges(Struct, frozen=True, array_like=True):
    """Changes of a cell's prefixes: concatenated hashes of `PREFIX_BYTES` each. `is_known` False: the engine does not
    report its cache."""

    life: str
    upto: int
    is_whole: bool
    is_known: bool
    added: bytes
    removed: bytes


def packed(prefixes: "list[int] | tuple[int, ...] | set[int]") -> bytes:
    return b"".join(prefix.to_bytes(PREFIX_BYTES) for prefix in prefixes)


def digits_of(prefixes: bytes) -> list[str]:
    """Packed prefixes as the hexadecimal digits that headers and HAProxy use."""
    text = prefixes.hex()
    return [text[at : at + PREFIX_DIGITS] for at in range(0, len(text), PREFIX_DIGITS)]


class BadChanges(ValueError):
    """An answer that is no list of changes."""


def decode_blocks(body: bytes) -> BlockChanges:
    """Raises BadChanges if the body is no list of changes."""
    try:
        return msgspec.msgpack.decode(body, type=BlockChanges)
    except msgspec.DecodeError as error:
        raise BadChanges(f"not a list of cache changes: {error}") from None


def decode_prefixes(body: bytes) -> PrefixChanges:
    """Raises BadChanges if the body is no list of changes, or its hashes do not end where they should."""
    try:
        changes = msgspec.msgpack.decode(body, type=PrefixChanges)
    except msgspec.DecodeError as error:
        raise BadChanges(f"not a list of prefix changes: {error}") from None
    if len(changes.added) % PREFIX_BYTES or len(changes.removed) % PREFIX_BYTES:
        raise BadChanges(f"prefixes have {PREFIX_BYTES} bytes each")
    if len(changes.added) > MAX_PREFIXES * PREFIX_BYTES:
        raise BadChanges(f"{len(changes.added) // PREFIX_BYTES} prefixes; a cell lists at most {MAX_PREFIXES}")
    return changes
