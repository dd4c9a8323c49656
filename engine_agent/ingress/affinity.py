"""Session affinity: which requests belong together, and which cell their key sticks to. Pure text.

A request's key is what its application states (`prompt_cache_key`, `user`, a session), else how its prompt begins. A
key sticks to the cell that served it last, kept in a stick table, and goes there while `pick_cell.lua` finds that cell
not overloaded. What cannot be read costs a request its affinity and nothing else.
"""

import math
from collections.abc import Iterable

from engine_agent.ingress import headers
from engine_agent.ingress.bad_table import BadTable
from engine_agent.protocol.ingress_messages import CellEndpoint, Pool

CELLS_MAP = "cells.map"
"""Backend of a pool with affinity -> its load bound in per cent, `e` if it goes by caches, and its cells,
`125e c-1-g1:16,c-2-g1:16`."""
PREFIX_BYTES = 2048
"""Of each of the first messages: about 500 tokens, what tells conversations apart."""
MIN_LOAD_BOUND = 1.0
"""Of `load_bound`: with less, some keys could go nowhere."""
OPENING_FIELDS = ("messages[0].content", "messages[0].content[0].text", "prompt", "input", "input[0].content")
"""Where the text that opens a conversation may stand, by the kind of request; after instructions comes
`messages[1]`."""
STICKY_ENTRIES = 200_000
"""Keys of a pool that are remembered: 20 MB when full; beyond that, those idle for longest are forgotten."""
STICKY_EXPIRES_S = 1800
"""After that long without a request. The prompt is no longer in the engine's cache by then."""
PEERS = "sticky"
"""The section by which a worker hands its stick table to its successor in a reload."""
PEERS_SOCKET = "sticky.sock"
_HAS_KEY = "{ var(txn.affinity) -m found }"
TENANT_SCOPE = "tenant:"
"""Before the tenant's name, which is empty where no key was needed."""
BY_CACHE = "var(txn.cells),word(1,' ') -m end e"
"""The request's pool goes by what cells have in their caches."""
PICK_RULES = (
    f"stick-table type integer size {STICKY_ENTRIES} expire {STICKY_EXPIRES_S}s store gpt0 peers {PEERS}",
    f"http-request track-sc2 var(txn.affinity) if {_HAS_KEY}",
    f"http-request lua.pick_cell if {_HAS_KEY}",
    "http-request sc-set-gpt0(2) var(txn.sticky_cell) if { var(txn.sticky_cell) -m found }",
)
"""In the backend of a pool with affinity: the key's sticky cell, if it has room; else another takes its place."""
USE_PICKED_RULE = "use-server %[var(txn.cell_server)] if { var(txn.cell_server) -m found }"


def peers_section(ingress_id: str, listen: str) -> list[str]:
    """Lets a reload keep the sticky cells: the old worker hands its stick table to the new one, where `listen` says.

    A worker that got none itself hands none over for its first 10 s: so long HAProxy waits for a table.
    """
    return [f"peers {PEERS}\n  {listen}\n  server {ingress_id}\n"]


def cells_entry(pool: Pool, servers: Iterable[tuple[str, CellEndpoint]]) -> str:
    """What `pick_cell.lua` must know of a pool; `servers` are its cells with the names of their servers.

    Raises:
        BadTable: a load bound that no cells could keep.
    """
    if pool.affinity is None:
        raise TypeError("a pool without affinity has no sticky cells")
    bound = pool.affinity.load_bound
    if not math.isfinite(bound) or bound < MIN_LOAD_BOUND:
        raise BadTable(f"load_bound of pool {pool.name} must be {MIN_LOAD_BOUND:g} or more, not {bound:g}")
    cells = ",".join(f"{name}:{cell.max_connections}" for name, cell in servers if not cell.drain)
    return f"{round(100 * bound)}{'e' if pool.by_cache else ''} {cells}"


def prefix_rules_of_parser() -> list[str]:
    """At a body parser, which has the whole body: the beginnings of its text, where they are of use."""
    return [
        f"acl wants_prefixes req.hdr({headers.PREFIXES}) -m found",
        "http-request lua.name_prefixes if wants_prefixes",
        f"http-request del-header {headers.PREFIXES}",
        f"http-request set-header {headers.PREFIXES} %[var(txn.prefixes)] if {{ var(txn.prefixes) -m found }}",
    ]


def prefix_rules(*, has_body: bool) -> list[str]:
    """Name the beginnings of the text of a request that `wants_prefixes`; `has_body`: else a body parser has."""
    if has_body:
        return [f"acl wants_prefixes {BY_CACHE}", "http-request lua.name_prefixes if wants_prefixes"]
    named = f"{{ req.fhdr({headers.PREFIXES}) -m found }}"  # with its commas
    return [
        f"http-request set-var(txn.prefixes) req.fhdr({headers.PREFIXES}) if {named}",
        f"http-request del-header {headers.PREFIXES}",
    ]


def scope_rules(*, has_adapters: bool, is_by_cache: bool, shares_caches: bool) -> list[str]:
    """In the backend of a pool, before its cell is picked: whose prompts in the engine's cache a request may find, and,
    where its beginnings are named, that an adapter's are its own."""
    scope = "" if shares_caches else f"%[req.hdr({headers.TENANT})]"
    return [
        f"http-request del-header {headers.OF_CACHES} -m beg",
        *([] if shares_caches else [f"http-request set-header {headers.CACHE_SCOPE} {TENANT_SCOPE}{scope}"]),
        *([f"http-request set-var-fmt(txn.cache_scope) {_scope_format(scope, has_adapters)}"] if is_by_cache else ()),
    ]


def _scope_format(scope: str, has_adapters: bool) -> str:
    return f"{TENANT_SCOPE}{scope}{'|%[var(txn.adapter)]' if has_adapters else ''}"


def cell_rules() -> list[str]:
    """In the backend of a pool that goes by caches, once the cell is picked: what the cell has to know."""
    return [
        f"http-request set-header {headers.PREFIXES} %[var(txn.scoped_prefixes)]"
        " if { var(txn.scoped_prefixes) -m found }",
        f"http-request set-header {headers.MATCHED} %[var(txn.matched)] if {{ var(txn.matched) -m found }}",
    ]


def key_rules() -> list[str]:
    """Hash the key of a request that `wants_key` into `txn.affinity`.

    A search for the field's name before each query keeps bodies without it from being parsed once more.
    """
    unless_found = "if wants_key !has_affinity_text"
    set_text = "http-request set-var(txn.affinity_text) req.body,json_query"
    has_instructions = "{ var(txn.role) -m str system developer }"
    return [
        "acl has_affinity_text var(txn.affinity_text) -m len gt 0",
        "acl has_user_text var(txn.user_text) -m found",
        f"{set_text}('$.prompt_cache_key') {unless_found} {{ req.body -m sub '\"prompt_cache_key\"' }}",
        f"{set_text}('$.user') {unless_found} {{ req.body -m sub '\"user\":' '\"user\" :' }}",
        f"http-request set-var(txn.affinity_text) req.hdr({headers.SESSION}) {unless_found}",
        f"http-request set-var(txn.role) req.body,json_query('$.messages[0].role') {unless_found}",
        *(
            f"http-request set-var(txn.user_text) {_opening(field)} {unless_found} {has_instructions} !has_user_text"
            for field in ("messages[1].content", "messages[1].content[0].text")
        ),
        *(f"http-request set-var(txn.affinity_text) {_opening(field)} {unless_found}" for field in OPENING_FIELDS),
        "http-request set-var(txn.affinity) var(txn.affinity_text),concat(,txn.user_text),xxh32"
        " if wants_key has_affinity_text",
        "http-request unset-var(txn.affinity_text) if wants_key",
        "http-request unset-var(txn.user_text) if wants_key",
    ]


def _opening(field: str) -> str:
    return f"req.body,json_query('$.{field}'),bytes(0,{PREFIX_BYTES})"
