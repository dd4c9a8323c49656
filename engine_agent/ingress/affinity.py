"""Which requests belong together, and which cells share them out. Pure text.

A request's key is what its application says (`prompt_cache_key`, `user`, a session), else how its prompt begins; equal
keys go to the same cell while `pick_cell.lua` finds that cell not overloaded. What cannot be read costs a request its
affinity and nothing else.
"""

import math
from collections.abc import Iterable

from engine_agent.ingress import headers
from engine_agent.ingress.bad_table import BadTable
from engine_agent.protocol.messages import CellEndpoint, Pool

RINGS_MAP = "rings.map"
"""Backend of a pool with affinity -> its load bound in per cent and its cells, `125 c-1-g1:16,c-2-g1:16`."""
PREFIX_BYTES = 2048
"""Of each of the first messages: about 500 tokens, what tells conversations apart."""
LEAST_BOUND = 1.0
"""Of `load_bound`: with less, some keys could go nowhere."""
BEGINNINGS = ("messages[0].content", "messages[0].content[0].text", "prompt", "input", "input[0].content")
"""Where an application's first words may stand, by the kind of request; after instructions comes `messages[1]`."""
PICK_RULES = (
    "http-request lua.pick_cell if { var(txn.affinity) -m found }",
    "use-server %[var(txn.cell_server)] if { var(txn.cell_server) -m found }",
)
"""In the backend of a pool with affinity: the cell of the key, if it has room; else whichever has the fewest."""


def ring_of(pool: Pool, servers: Iterable[tuple[str, CellEndpoint]]) -> str:
    """The value of a pool's ring; `servers` are its cells with the names of their servers.

    Raises:
        BadTable: a load bound that no cells could keep.
    """
    if pool.affinity is None:
        raise TypeError("a pool without affinity has no ring")
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
