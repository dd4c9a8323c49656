"""Maps of HAProxy that a routing table fills: they change without a reload. Pure. Each function returns the entries of
one map and raises BadTable for a value that no ingress can carry out."""

import base64
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter

from engine_agent.ingress.bad_table import BadTable
from engine_agent.protocol.ingress_messages import (
    ADAPTER_NAME,
    CellEndpoint,
    Pool,
    PoolAdapter,
    RoutingTable,
    Split,
    cell_server_name,
)

MODELS_MAP = "models.map"
"""Model -> backend of its pool, or `split.…` for a name that several pools serve."""
SHARES_MAP = "shares.map"
"""Backend of a pool -> how many of 1,000 of its requests other regions serve."""
SHARE_SCALE = 1000
SPLITS_MAP = "splits.map"
"""Range of draws, `0:9499` -> backend of a pool. One map for all splits, because a map changes in one instant."""
FALLBACKS_MAP = "fallbacks.map"
"""`<first draw of a split>/<backend>` -> backend of the pool that takes over if that one cannot serve."""
DRAWS = 10_000
"""Draws of a split: shares are exact to a hundredth of a per cent."""
STICKY, RANDOM = "split.sticky.", "split.random."
"""Prefix of a split's entry in the map of models. Its first draw follows. Sticky splits draw by the affinity key."""
CELLS_MAP = "cells.map"
"""Backend of a pool with affinity -> its load bound in per cent, `e` if it goes by caches, and its cells with their
limits, `125e c-1-g1:16,c-2-g1:16`. For `pick_cell.lua`."""
MIN_LOAD_BOUND = 1.0
"""With a lower `load_bound` some keys could go nowhere."""
ADAPTERS_MAP = "adapters.map"
"""Adapter -> `*` if every cell has it; else the servers that do, each after a `/`; or a lone `/` if none here does.
Followed by this, the name of a backend is not a backend's."""
EVERY_CELL, BEFORE_CELL = "*", "/"
CONTINUED_MAP = "continued.map"
"""Model -> `1` if its streams continue at other cells; `=SERVER` -> version of that cell; `BACKEND/VERSION` -> the
servers of that version, each after a `/`."""
HOPS_MAP = "hops.map"
"""`sign` -> the secret for marks of this ingress; `other` -> a second one, for ingresses with another table."""
SIGNING, OTHER = "sign", "other"
MAX_SECRETS = 2
MIN_SECRET_CHARS = 32
VERSION = re.compile(r"[A-Za-z0-9._:/@+-]{1,128}")
HOLDS_MAP, COLD_STARTS_MAP, READY_MAP = "holds.map", "cold-starts.map", "ready.map"
"""Pool -> for how many seconds its requests wait for a first cell; how many seconds a cell takes to start; when the
next one is expected, in seconds since 1970, 0 if none starts."""
WITHHELD_MAP = "withheld.map"
"""Pool -> why it gets no machines for its first cell. Only such pools have an entry."""
LONGEST_HOLD_S = 600
"""Clients of OpenAI and Anthropic wait that long for an answer. Each held request takes two connections."""
LISTING_MAP = "listing.map"
"""`all` -> the body of GET /v1/models; `=MODEL` -> its entry there; `/MODEL` -> the backends of its pools, separated by
blanks."""
LISTING_ALL, LISTING_ONE = "all", "="


def continued_entries(pools: Iterable[Pool], splits: Iterable[Split], backends: Mapping[str, str]) -> dict[str, str]:
    """Entries of `CONTINUED_MAP`. Streams of a cell without a valid version end with it."""
    continued = {pool.name: pool for pool in pools if pool.continues}
    entries = {name: "1" for pool in continued.values() for name in (*pool.models, *(a.name for a in pool.adapters))}
    entries |= {split.model: "1" for split in splits if split.shares.keys() & continued.keys()}
    for pool in continued.values():
        for cell in sorted(pool.cells, key=lambda cell: (cell.cell, cell.generation)):
            if not VERSION.fullmatch(cell.version):
                continue
            server, place = cell_server_name(cell.cell, cell.generation), f"{backends[pool.name]}/{cell.version}"
            entries[f"={server}"] = cell.version
            entries[place] = f"{entries.get(place, '')}{BEFORE_CELL}{server}"
    return entries


def split_models(splits: Iterable[Split]) -> dict[str, str]:
    return {split.model: f"{STICKY if split.sticky else RANDOM}{first}" for first, split in _placed(splits)}


def split_ranges(splits: Iterable[Split], backends: Mapping[str, str]) -> dict[str, str]:
    """Entries of `SPLITS_MAP`. `backends`: pool -> backend. Raises BadTable for a pool that is not there, or weights
    that share nothing out."""
    entries = {}
    for first, split in _placed(splits):
        begin = first
        for pool, end in _ends(split, backends):
            if first + end > begin:
                entries[f"{begin}:{first + end - 1}"] = backends[pool]
                begin = first + end
    return entries


def split_fallbacks(splits: Iterable[Split], backends: Mapping[str, str]) -> dict[str, str]:
    """Entries of `FALLBACKS_MAP`: the pools of a split take over in a circle."""
    entries = {}
    for first, split in _placed(splits):
        pools = [pool for pool, share in sorted(split.shares.items()) if share > 0]
        for pool, following in zip(pools, [*pools[1:], *pools[:1]], strict=True):
            if pool != following:
                entries[f"{first}/{backends[pool]}"] = backends[following]
    return entries


def _placed(splits: Iterable[Split]) -> Iterable[tuple[int, Split]]:
    return ((DRAWS * number, split) for number, split in enumerate(sorted(splits, key=lambda split: split.model)))


def _ends(split: Split, backends: Mapping[str, str]) -> Iterable[tuple[str, int]]:
    """The end of each pool's range, counted from the split's first draw."""
    for pool, share in split.shares.items():
        if pool not in backends:
            raise BadTable(f"split of model {split.model}: there is no pool {pool}")
        if share < 0:
            raise BadTable(f"split of model {split.model}: the share of pool {pool} is {share}, below 0")
    total = sum(split.shares.values())
    if total == 0:
        raise BadTable(f"split of model {split.model}: no pool has a share above 0")
    so_far = 0
    for pool, share in sorted(split.shares.items()):
        so_far += share
        yield pool, round(DRAWS * so_far / total)


def spilled_share(pool: Pool, own_region: str) -> str:
    """How many of `SHARE_SCALE` requests leave. Shares of unreachable regions stay here."""
    if any(not 0.0 <= fraction <= 1.0 for fraction in pool.fractions.values()):
        raise BadTable(f"fractions of pool {pool.name} must be between 0 and 1: {pool.fractions}")
    total = math.fsum(pool.fractions.values())
    if pool.fractions and not math.isclose(total, 1.0, abs_tol=1e-6):
        raise BadTable(f"fractions of pool {pool.name} sum to {total:.6g}, not to 1")
    away = math.fsum(pool.fractions.get(region, 0.0) for region in {t.region for t in pool.spill} - {own_region})
    return str(round(SHARE_SCALE * away))


def cells_entry(pool: Pool, servers: Iterable[tuple[str, CellEndpoint]]) -> str:
    """The entry of a pool in `CELLS_MAP`. `servers`: its cells with the names of their servers. Raises BadTable for a
    load bound that no cells could keep."""
    if pool.affinity is None:
        raise TypeError("a pool without affinity has no sticky cells")
    bound = pool.affinity.load_bound
    if not math.isfinite(bound) or bound < MIN_LOAD_BOUND:
        raise BadTable(f"load_bound of pool {pool.name} must be {MIN_LOAD_BOUND:g} or more, not {bound:g}")
    cells = ",".join(f"{name}:{cell.max_connections}" for name, cell in servers if not cell.drain)
    return f"{round(100 * bound)}{'e' if pool.by_cache else ''} {cells}"


def adapter_entries(pools: tuple[Pool, ...]) -> dict[str, str]:
    """Raises BadTable for an invalid name."""
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


def hop_entries(secrets: Sequence[str]) -> dict[str, str]:
    """Raises BadTable if there are more than two, or one is too short or not plain text."""
    if len(secrets) > MAX_SECRETS:
        raise BadTable(f"hop_secrets: at most {MAX_SECRETS}, the one to sign with first, not {len(secrets)}")
    if any(len(secret) < MIN_SECRET_CHARS or not secret.isalnum() or not secret.isascii() for secret in secrets):
        raise BadTable(f"hop_secrets: each is {MIN_SECRET_CHARS} or more letters and digits")
    # HAProxy expects the key of a MAC in Base64.
    coded = [base64.b64encode(secret.encode()).decode() for secret in secrets]
    return dict(zip((SIGNING, OTHER), coded, strict=False))


def hold_entries(pools: Iterable[Pool]) -> dict[str, dict[str, str]]:
    held = {pool.name: pool.hold for pool in pools if pool.hold}
    if not held:
        return {}
    return {
        HOLDS_MAP: {name: str(hold.for_s) for name, hold in held.items()},
        COLD_STARTS_MAP: {name: str(hold.cold_start_s) for name, hold in held.items()},
        READY_MAP: {name: str(hold.ready_at) for name, hold in held.items()},
        WITHHELD_MAP: {name: hold.withheld.value for name, hold in held.items() if hold.withheld},
    }


def listing_entries(table: RoutingTable, pools: tuple[Pool, ...]) -> dict[str, str]:
    """The entries of `LISTING_MAP`. A name that several pools serve has the least of their limits."""
    served: dict[str, tuple[Pool, ...]] = {model: (pool,) for pool in pools for model in pool.models}
    named = {pool.name: pool for pool in pools}
    for split in table.splits:
        used = [pool for pool, share in sorted(split.shares.items()) if share > 0]
        served[split.model] = tuple(named[pool] for pool in used if pool in named)
    listed = [_entry(model, pools) for model, pools in served.items()]
    listed += [_entry(adapter.name, (pool,), adapter) for pool in pools for adapter in pool.adapters]
    entries = {entry["id"]: json.dumps(entry, separators=(",", ":")) for entry in sorted(listed, key=itemgetter("id"))}
    return {
        LISTING_ALL: f'{{"object":"list","data":[{",".join(entries.values())}]}}',
        **{f"{LISTING_ONE}{model}": entry for model, entry in entries.items()},
    }


def _entry(model: str, pools: tuple[Pool, ...], adapter: PoolAdapter | None = None) -> dict[str, str | int]:
    lengths = [pool.max_model_len for pool in pools]
    return {
        "id": model,
        "object": "model",
        "created": max((pool.created_at for pool in pools), default=0),
        "owned_by": "switchyard",
        **({"parent": adapter.parent} if adapter else {}),
        **({"max_model_len": min(lengths)} if lengths and all(lengths) else {}),
    }
