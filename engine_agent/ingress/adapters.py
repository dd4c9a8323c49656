"""LoRA adapters in HAProxy's configuration: which pool a name leads to, which of its cells have the adapter, and that
none is loaded by an application. Pure text.

An adapter is one more name of its deployment, with the same queue, limits and keys. Only while a rollout brings or
takes it do some cells lack it; then the map says which have it, and `adapter_cells.lua` picks among those. A cell that
is asked for one that it lacks refuses, so nobody gets the answer of another model, whatever a table says.
"""

from engine_agent.ingress import headers
from engine_agent.ingress.bad_table import BadTable
from engine_agent.ingress.responses import ErrorResponse, no_ready_cell, return_rule
from engine_agent.protocol.api_surface import LOADING_PATHS, LOADING_REFUSED
from engine_agent.protocol.ingress_messages import ADAPTER_NAME, Pool, cell_server_name

ADAPTERS_MAP = "adapters.map"
"""Adapter -> `*`, every cell has it; or the servers of those that do, each after a `/`; or `/` alone, none here. So the
name of a backend with this behind it is none of a backend."""
EVERY_CELL, BEFORE_CELL = "*", "/"
NOT_LOADED = ErrorResponse(
    403,
    "adapters_by_version",
    f"{LOADING_REFUSED}; ask who runs this service for a version that has yours, and name the adapter as `model`",
)
PARTIAL = "var(txn.holders) -m found"
IS_PARTIAL = f"{{ {PARTIAL} }}"
_HAS_ADAPTER = "{ var(txn.adapter) -m found }"


def adapter_entries(pools: tuple[Pool, ...]) -> dict[str, str]:
    """The entries of `ADAPTERS_MAP`; empty where there is no adapter.

    Raises:
        BadTable: a name that is none.
    """
    entries = {}
    for pool in pools:
        there = {cell_server_name(cell.cell, cell.generation) for cell in pool.cells}
        for adapter in pool.adapters:
            if not ADAPTER_NAME.fullmatch(adapter.name):
                raise BadTable(f"adapter {adapter.name!r}: only letters, digits and ._:/@+- are allowed")
            holders = sorted(there.intersection(adapter.cells or ()))
            some = BEFORE_CELL + BEFORE_CELL.join(holders)
            entries[adapter.name] = EVERY_CELL if adapter.cells is None else some
    return entries


def found_rules(model: str = "var(txn.model)", condition: str = "") -> list[str]:
    """Note in `txn.adapter` which adapter the model's name is and, while not every cell has it, in `txn.holders` which
    ones do."""
    only = f" {condition}" if condition else ""
    return [
        f"http-request set-var(txn.holders) {model},map_str({ADAPTERS_MAP})" + (f" if{only}" if only else ""),
        f"http-request set-var(txn.adapter) {model} if {IS_PARTIAL}{only}",
        f"http-request unset-var(txn.holders) if {{ var(txn.holders) -m str {EVERY_CELL} }}{only}",
    ]


def affinity_rules(unless: str) -> list[str]:
    """Keys and values of one adapter are of no use to another, so neither are its cells: the adapter is a part of a
    request's affinity key. `unless`: a condition under which it is already, or nothing."""
    mixed = "var(txn.affinity),concat(|,txn.adapter),xxh32"
    condition = f"{_HAS_ADAPTER} {{ var(txn.affinity) -m found }} {unless}".rstrip()
    return [f"http-request set-var(txn.affinity) {mixed} if {condition}"]


def cell_rules(retry_after_s: int, *, has_adapters: bool) -> list[str]:
    """In a pool's backend: name the adapter of the request, and while not every cell has it, pick one that does."""
    if not has_adapters:
        return []
    return [
        f"http-request set-header {headers.ADAPTER} %[var(txn.adapter),url_enc] if {_HAS_ADAPTER}",
        f"http-request lua.pick_holder if {IS_PARTIAL}",
        f"{return_rule(no_ready_cell(retry_after_s))} if {IS_PARTIAL} !{{ var(txn.cell_server) -m found }}",
    ]


def loading_rules() -> list[str]:
    """Refuse to load and to unload: it would reach one cell, for all that use it, until that starts anew."""
    return [
        f"acl is_loading path {' '.join(LOADING_PATHS)}",
        f"{return_rule(NOT_LOADED)} if is_loading METH_POST",
    ]
