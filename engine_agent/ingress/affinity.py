"""Which requests belong together, and which cell is their home. Pure text.

A request's key is what its application says (`prompt_cache_key`, `user`, a session), else how its prompt begins. A key
is at home where it was last, remembered in a stick table, and goes there while `pick_cell.lua` finds that cell not
overloaded. What cannot be read costs a request its affinity and nothing else.
"""

import math
from collections.abc import Iterable

from engine_agent.ingress import headers
from engine_agent.ingress.bad_table import BadTable
from engine_agent.protocol.messages import CellEndpoint, Pool

CELLS_MAP = "cells.map"
"""Backend of a pool with affinity -> its load bound in per cent and its cells, `125 c-1-g1:16,c-2-g1:16`."""
PREFIX_BYTES = 2048
"""Of each of the first messages: about 500 tokens, what tells conversations apart."""
LEAST_BOUND = 1.0
"""Of `load_bound`: with less, some keys could go nowhere."""
BEGINNINGS = ("messages[0].content", "messages[0].content[0].text", "prompt", "input", "input[0].content")
"""Where an application's first words may stand, by the kind of request; after instructions comes `messages[1]`."""
HOMES = 200_000
"""Keys of a pool that are remembered: 20 MB when full; beyond that, those idle for longest are forgotten."""
HOME_EXPIRES_S = 1800
"""After that long without a request. What an engine had of the prompt is long gone by then."""
PEERS = "homes"
"""The section by which a worker tells its successor, in a reload, what it remembers."""
PEERS_SOCKET = "homes.sock"
_HAS_KEY = "{ var(txn.affinity) -m found }"
PICK_RULES = (
    f"stick-table type integer size {HOMES} expire {HOME_EXPIRES_S}s store gpt0 peers {PEERS}",
    f"http-request track-sc2 var(txn.affinity) if {_HAS_KEY}",
    f"http-request lua.pick_cell if {_HAS_KEY}",
    "http-request sc-set-gpt0(2) var(txn.home) if { var(txn.home) -m found }",
    "use-server %[var(txn.cell_server)] if { var(txn.cell_server) -m found }",
)
"""In the backend of a pool with affinity: the cell that is the key's home, if it has room; else another becomes it."""


def peers_section(ingress_id: str) -> list[str]:
    """Lets a reload keep the homes: the old worker tells them to the new one."""
    return [f"peers {PEERS}\n  peer {ingress_id} unix@{PEERS_SOCKET}\n"]


def cells_of(pool: Pool, servers: Iterable[tuple[str, CellEndpoint]]) -> str:
    """What `pick_cell.lua` must know of a pool; `servers` are its cells with the names of their servers.

    Raises:
        BadTable: a load bound that no cells could keep.
    """
    if pool.affinity is None:
        raise TypeError("a pool without affinity has no homes")
    bound = pool.affinity.load_bound
    if not math.isfinite(bound) or bound < LEAST_BOUND:
        raise BadTable(f"load_bound of pool {pool.name} must be {LEAST_BOUND:g} or more, not {bound:g}")
    cells = ",".join(f"{name}:{cell.max_connections}" for name, cell in servers if not cell.drain)
    return f"{round(100 * bound)} {cells}"


def key_rules() -> list[str]:
    """Hash the key of a request that `wants_key` into `txn.affinity`.

    A search for the name before each question keeps bodies without it from being parsed once more.
    """
    asked = "if wants_key !has_said"
    ask = "http-request set-var(txn.said) req.body,json_query"
    is_led = "{ var(txn.role) -m str system developer }"
    return [
        "acl has_said var(txn.said) -m len gt 0",
        "acl has_user_said var(txn.user_said) -m found",
        f"{ask}('$.prompt_cache_key') {asked} {{ req.body -m sub '\"prompt_cache_key\"' }}",
        f"{ask}('$.user') {asked} {{ req.body -m sub '\"user\":' '\"user\" :' }}",
        f"http-request set-var(txn.said) req.hdr({headers.SESSION}) {asked}",
        f"http-request set-var(txn.role) req.body,json_query('$.messages[0].role') {asked}",
        *(
            f"http-request set-var(txn.user_said) {_beginning(place)} {asked} {is_led} !has_user_said"
            for place in ("messages[1].content", "messages[1].content[0].text")
        ),
        *(f"http-request set-var(txn.said) {_beginning(place)} {asked}" for place in BEGINNINGS),
        "http-request set-var(txn.affinity) var(txn.said),concat(,txn.user_said),xxh32 if wants_key has_said",
        "http-request unset-var(txn.said) if wants_key",
        "http-request unset-var(txn.user_said) if wants_key",
    ]


def _beginning(place: str) -> str:
    return f"req.body,json_query('$.{place}'),bytes(0,{PREFIX_BYTES})"
