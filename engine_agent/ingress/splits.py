"""Traffic splits: model names that several pools serve, by weight; and the share of a pool that leaves. Pure.

A draw of 0 to 9,999 falls into the range of one pool: the ranges of all splits stand one after another in one map, so
that shares change in one instant and without a reload. A sticky split draws by the request's affinity key. A pool that
cannot serve at the moment hands its requests to the next: any of them serves the name, and an error would not.
"""

import math
from collections.abc import Iterable, Mapping

from engine_agent.ingress import headers
from engine_agent.ingress.bad_table import BadTable
from engine_agent.protocol.ingress_messages import Pool, Split

SHARES_MAP = "shares.map"
"""Backend of a pool -> how many of `SHARE_SCALE` of its requests other regions serve."""
SHARE_SCALE = 1000
"""Shares of requests are kept in tenths of a per cent."""

SPLITS_MAP = "splits.map"
"""Range of draws, `0:9499` -> backend of a pool."""
FALLBACKS_MAP = "fallbacks.map"
"""`<first draw of a split>/<backend>` -> backend of the pool that takes over."""
SCALE = 10_000
"""Draws of a split: shares are exact to a hundredth of a per cent."""
MAX_FALLBACKS = 3
"""Pools that a request is offered to after its first."""
PREFIX, STICKY, RANDOM = "split.", "split.sticky.", "split.random."
"""How the entry of a split's model in the map of models begins, before its first draw."""


def split_models(splits: Iterable[Split]) -> dict[str, str]:
    """Entries for the map of models."""
    return {split.model: f"{STICKY if split.sticky else RANDOM}{first}" for first, split in _placed(splits)}


def split_ranges(splits: Iterable[Split], backends: Mapping[str, str]) -> dict[str, str]:
    """Entries of `SPLITS_MAP`; `backends` maps each pool to its backend.

    Raises:
        BadTable: a pool that is not there, or weights that share nothing out.
    """
    entries = {}
    for first, split in _placed(splits):
        begin = first
        for pool, end in _ends(split, backends):
            if first + end > begin:
                entries[f"{begin}:{first + end - 1}"] = backends[pool]
                begin = first + end
    return entries


def split_fallbacks(splits: Iterable[Split], backends: Mapping[str, str]) -> dict[str, str]:
    """Entries of `FALLBACKS_MAP`: the pools of a split take over from each other in a circle."""
    entries = {}
    for first, split in _placed(splits):
        pools = [pool for pool, share in sorted(split.shares.items()) if share > 0]
        for pool, following in zip(pools, [*pools[1:], *pools[:1]], strict=True):
            if pool != following:
                entries[f"{first}/{backends[pool]}"] = backends[following]
    return entries


def _placed(splits: Iterable[Split]) -> Iterable[tuple[int, Split]]:
    """Each split with its first draw."""
    return ((SCALE * number, split) for number, split in enumerate(sorted(splits, key=lambda split: split.model)))


def _ends(split: Split, backends: Mapping[str, str]) -> Iterable[tuple[str, int]]:
    """Where the range of each pool ends, counted from the split's first draw."""
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
        yield pool, round(SCALE * so_far / total)


def draw_rules(has_regions: bool) -> list[str]:
    """Put a pool in the place of a split, as far as no key is needed; note in `txn.split` which one it is.

    A request of another region's ingress is for the pool that was drawn there; `has_regions`: there may be such.
    """
    there = f"req.hdr({headers.POOL})"
    drawn_there = f"http-request set-var(txn.pool) {there} if is_split is_marked"
    here = "http-request set-var(txn.pool) var(txn.split),add(txn.draw)"
    return [
        f"acl is_split var(txn.pool) -m beg {PREFIX}",
        f"acl is_sticky var(txn.pool) -m beg {STICKY}",
        "http-request set-var(txn.split) var(txn.pool),field(3,.) if is_split",
        *([f"{drawn_there} {{ {there},map_str({SHARES_MAP}) -m found }}"] if has_regions else ()),
        "acl is_drawn var(txn.split) -m found",
        f"http-request set-var(txn.draw) rand({SCALE}) if is_split",
        f"{here},map_int({SPLITS_MAP}) if is_split !is_sticky",
    ]


def sticky_rules() -> list[str]:
    """The same where the key decides; a request without one is drawn like any other."""
    return [
        f"http-request set-var(txn.draw) var(txn.affinity),mod({SCALE}) if is_sticky {{ var(txn.affinity) -m found }}",
        f"http-request set-var(txn.pool) var(txn.split),add(txn.draw),map_int({SPLITS_MAP}) if is_sticky",
    ]


def fallback_rules(unavailable: str) -> list[str]:
    """Fall back to the next pool of a split while `unavailable` (a condition) holds of this one."""
    fallback = f"var(txn.split),concat(/,txn.pool),map_str({FALLBACKS_MAP})"
    return [f"http-request set-var(txn.pool) {fallback} if {unavailable} {{ {fallback} -m found }}"] * MAX_FALLBACKS


def spilled_share(pool: Pool, own_region: str) -> str:
    """How many of `SHARE_SCALE` requests leave; shares of regions that cannot be reached from here stay here."""
    if any(not 0.0 <= fraction <= 1.0 for fraction in pool.fractions.values()):
        raise BadTable(f"fractions of pool {pool.name} must be between 0 and 1: {pool.fractions}")
    total = math.fsum(pool.fractions.values())
    if pool.fractions and not math.isclose(total, 1.0, abs_tol=1e-6):
        raise BadTable(f"fractions of pool {pool.name} sum to {total:.6g}, not to 1")
    away = math.fsum(pool.fractions.get(region, 0.0) for region in {t.region for t in pool.spill} - {own_region})
    return str(round(SHARE_SCALE * away))
