"""The desired state of a HAProxy: a routing table as backends, servers and maps. Pure. An impossible table is refused
with the reason (I12: fractions sum to 1); the agent then keeps the last valid one. A cell, or another region's ingress,
with an impossible address is only left out, with its reason."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from msgspec.structs import replace

from engine_agent.ingress.bad_table import BadTable, check_distinct, check_name, checked_address, checked_port
from engine_agent.ingress.certificates import Applications
from engine_agent.ingress.key_map import KEYS_MAP, key_entries
from engine_agent.ingress.routing_maps import (
    ADAPTERS_MAP,
    CELLS_MAP,
    CONTINUED_MAP,
    FALLBACKS_MAP,
    HOPS_MAP,
    LISTING_MAP,
    LONGEST_HOLD_S,
    MODELS_MAP,
    SHARES_MAP,
    SPLITS_MAP,
    adapter_entries,
    cells_entry,
    continued_entries,
    hold_entries,
    hop_entries,
    listing_entries,
    spilled_share,
    split_fallbacks,
    split_models,
    split_ranges,
)
from engine_agent.protocol.identity import BadName, IdentityKind, IdentityName
from engine_agent.protocol.ingress_messages import (
    MODEL_NAME,
    CellEndpoint,
    Pool,
    RoutingTable,
    SpillTarget,
    cell_server_name,
)
from engine_agent.protocol.ports import hop_port
from engine_agent.protocol.request_limits import limits_from_text, limits_text
from engine_agent.protocol.states import ServingClass

CELL_WEIGHT = 100
"""Weight of the pool's cells with the highest concurrency. Others weigh less in proportion, so `leastconn` gives each
cell its tested share."""
MAX_WEIGHT = 256

LOCAL_PREFIX, SPILL_PREFIX = "pool.", "spill."
"""Prefixes of backends whose servers come and go with the table."""
HOLD_PREFIX = "hold."
"""Prefix of backends that hold a pool's requests."""

REGION_END = ":"
"""In the name of another region's server, before the name of the ingress."""
STANDBY_SUFFIX = ".standby"
"""Suffix of another region's server without a share."""
MAP_NAMES = (MODELS_MAP, LISTING_MAP, KEYS_MAP, SPLITS_MAP, FALLBACKS_MAP, HOPS_MAP)


ServerKey = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Server:
    """One server line. `max_connections` 0: no limit. `cell` empty: another ingress. `tls_name`: required name in its
    certificate; empty: a plain link."""

    backend: str
    name: str
    address: str
    port: int
    weight: int
    max_connections: int = 0
    drain: bool = False
    backup: bool = False
    cell: str = ""
    tls_name: str = ""


@dataclass(frozen=True, slots=True)
class PoolBackends:
    """A pool's backends: its cells, other regions' ingresses, and requests on hold. `probe_model`: the model in health
    checks of other regions."""

    name: str
    serving_class: ServingClass
    probe_model: str

    has_affinity: bool = False
    is_by_cache: bool = False
    """Its requests go to the cell with the longest cached prefix."""
    shares_caches: bool = False
    request_limits: str = ""
    """Value of the header `headers.LIMITS`."""
    hold_s: int = 0
    """How long its requests wait for a first cell; 0: not at all."""
    continues: bool = False
    """Its streams continue at another cell."""

    @property
    def local(self) -> str:
        return f"{LOCAL_PREFIX}{self.name}"

    @property
    def spill(self) -> str:
        return f"{SPILL_PREFIX}{self.name}"

    @property
    def hold(self) -> str:
        return f"{HOLD_PREFIX}{self.name}"


@dataclass(frozen=True, slots=True)
class Features:
    """The parts of the request path that a table needs. Each costs every request some microseconds, so unused parts are
    not rendered. The first and the last use of one need a reload."""

    keys: bool = False
    token_limits: bool = False
    splits: bool = False
    sticky_splits: bool = False
    affinity: bool = False
    by_cache: bool = False
    hops: bool = False
    """There are other regions: requests can leave and arrive."""
    origins: bool = False
    """Some key lists origins of web pages."""
    adapters: bool = False
    holds: bool = False
    grpc: bool = False
    continuation: bool = False


@dataclass(frozen=True, slots=True)
class DesiredHaproxy:
    """The whole desired state. `has_table` False: before the first table. `fleet`: whose certificates are required on
    links; empty: plain links."""

    revision: int
    pools: tuple[PoolBackends, ...]
    servers: tuple[Server, ...]
    maps: dict[str, dict[str, str]]
    max_body_bytes: int
    retry_after_s: int
    has_table: bool = True
    fleet: str = ""
    features: Features = Features()
    applications: Applications = field(default_factory=Applications)
    ingresses: tuple[str, ...] = ()
    """The ingresses that share the cells of its region; empty: unknown."""
    left_out: tuple[str, ...] = ()
    """Parts of the table that are not carried out, with reasons."""


EMPTY_DESIRED = DesiredHaproxy(
    revision=0,
    pools=(),
    servers=(),
    maps={name: {} for name in MAP_NAMES},
    max_body_bytes=RoutingTable(0, "", ()).max_body_bytes,
    retry_after_s=RoutingTable(0, "", ()).retry_after_s,
    has_table=False,
)
"""The state before the first table."""


def desired_from(table: RoutingTable, fleet: str = "") -> DesiredHaproxy:
    """The desired state of a routing table, with TLS between the parts of `fleet`, or plain without one. Raises
    BadTable if something in it cannot be carried out."""
    pools = tuple(sorted(table.pools, key=lambda pool: pool.name))
    check_distinct("pool", (pool.name for pool in pools))
    left_out: list[str] = []
    pools = tuple(_usable(pool, table.region, fleet, left_out) for pool in pools)
    check_distinct("model", (model for pool in pools for model in _names(pool)))
    check_distinct("split of model", (split.model for split in table.splits))
    if table.max_body_bytes <= 0 or table.retry_after_s <= 0:
        raise BadTable("max_body_bytes and retry_after_s must be positive")
    backends = {pool.name: _backends(pool) for pool in pools}
    return DesiredHaproxy(
        revision=table.revision,
        pools=tuple(backends.values()),
        servers=tuple(
            server for pool in pools for server in (*_cells(pool, fleet), *_other_regions(pool, table, fleet))
        ),
        maps=_maps(table, pools, {name: backend.local for name, backend in backends.items()}),
        max_body_bytes=table.max_body_bytes,
        retry_after_s=table.retry_after_s,
        fleet=fleet,
        features=_features(table),
        ingresses=table.ingresses,
        left_out=tuple(left_out),
    )


def _usable(pool: Pool, own_region: str, fleet: str, left_out: list[str]) -> Pool:
    """The pool with all valid cells and other ingresses. The reasons of the others go to `left_out`."""

    def fits(server: Callable[[], Server]) -> bool:
        try:
            server()
        except BadTable as problem:
            left_out.append(str(problem))
            return False
        return True

    cells = tuple(cell for cell in pool.cells if fits(partial(_cell, "", cell, cell.max_connections, fleet)))
    spill = tuple(
        target
        for target in pool.spill
        if target.region == own_region or fits(partial(_other_region, "", target, 1, fleet, stand_by=False))
    )
    return replace(pool, cells=cells, spill=spill)


def _features(table: RoutingTable) -> Features:
    return Features(
        keys=bool(table.keys) or table.keys_required,
        token_limits=any(key.tokens_per_min for key in table.keys),
        splits=bool(table.splits),
        sticky_splits=any(split.sticky for split in table.splits),
        affinity=any(pool.affinity for pool in table.pools),
        by_cache=any(pool.affinity and pool.by_cache for pool in table.pools),
        hops=bool(table.hop_secrets),
        origins=any(key.origins for key in table.keys),
        adapters=any(pool.adapters for pool in table.pools),
        holds=any(pool.hold for pool in table.pools),
        grpc=table.grpc,
        continuation=any(pool.continues for pool in table.pools),
    )


def _maps(table: RoutingTable, pools: tuple[Pool, ...], backends: dict[str, str]) -> dict[str, dict[str, str]]:
    of_pools = {model: backends[pool.name] for pool in pools for model in _names(pool)}
    models = of_pools | split_models(table.splits)
    for model in models:
        if not MODEL_NAME.fullmatch(model):
            raise BadTable(f"model {model!r}: only letters, digits and ._:/@+- are allowed")
    shares = {backends[pool.name]: spilled_share(pool, table.region) for pool in pools}
    cells = {backends[pool.name]: cells_entry(pool, _named_cells(pool)) for pool in pools if pool.affinity}
    return {
        MODELS_MAP: models,
        LISTING_MAP: listing_entries(table, pools) | _pools_of_models(table, of_pools, backends),
        KEYS_MAP: key_entries(table, backends),
        SPLITS_MAP: split_ranges(table.splits, backends),
        FALLBACKS_MAP: split_fallbacks(table.splits, backends),
        HOPS_MAP: hop_entries(table.hop_secrets),
        **({SHARES_MAP: shares} if table.hop_secrets else {}),
        **({CELLS_MAP: cells} if cells else {}),
        **({CONTINUED_MAP: continued} if (continued := continued_entries(pools, table.splits, backends)) else {}),
        **({ADAPTERS_MAP: adapters} if (adapters := adapter_entries(pools)) else {}),
        **hold_entries(pools),
    }


def _names(pool: Pool) -> tuple[str, ...]:
    return (*pool.models, *(adapter.name for adapter in pool.adapters))


def _backends(pool: Pool) -> PoolBackends:
    check_name("pool", pool.name)
    if not pool.models:
        raise BadTable(f"pool {pool.name} serves no model")
    try:
        serving_class = ServingClass(pool.serving_class)
    except ValueError:
        raise BadTable(
            f"serving class {pool.serving_class!r} of pool {pool.name} is none of {', '.join(ServingClass)}"
        ) from None
    hold_s = pool.hold.for_s if pool.hold else 0
    if hold_s > LONGEST_HOLD_S:
        raise BadTable(f"pool {pool.name} holds requests for {hold_s} s; the most is {LONGEST_HOLD_S}")
    return PoolBackends(
        pool.name,
        serving_class,
        min(pool.models),
        has_affinity=pool.affinity is not None,
        is_by_cache=pool.affinity is not None and pool.by_cache,
        shares_caches=pool.shares_caches,
        request_limits=_checked_limits(pool),
        hold_s=hold_s,
        continues=pool.continues,
    )


def _checked_limits(pool: Pool) -> str:
    try:
        return limits_text(limits_from_text(pool.request_limits))
    except ValueError as error:
        raise BadTable(f"request limits of pool {pool.name}: {error}") from None


def _cells(pool: Pool, fleet: str) -> Iterable[Server]:
    check_distinct(f"cell of pool {pool.name}", (cell_server_name(c.cell, c.generation) for c in pool.cells))
    most = max((cell.max_connections for cell in pool.cells), default=0)
    for cell in sorted(pool.cells, key=lambda cell: (cell.cell, cell.generation)):
        yield _cell(f"{LOCAL_PREFIX}{pool.name}", cell, most, fleet)


def _cell(backend: str, cell: CellEndpoint, most: int, fleet: str) -> Server:
    check_name("cell", cell.cell)
    if cell.max_connections <= 0:
        raise BadTable(f"max_connections of cell {cell.cell} must be positive, not {cell.max_connections}")
    return Server(
        backend=backend,
        name=cell_server_name(cell.cell, cell.generation),
        address=checked_address(f"cell {cell.cell}", cell.address),
        port=checked_port(f"cell {cell.cell}", cell.port),
        weight=max(1, round(CELL_WEIGHT * cell.max_connections / most)),
        max_connections=cell.max_connections,
        drain=cell.drain,
        cell=cell.cell,
        tls_name=_tls_name(f"cell {cell.cell}", fleet, IdentityKind.NODE, cell.node),
    )


def _named_cells(pool: Pool) -> Iterable[tuple[str, CellEndpoint]]:
    cells = sorted(pool.cells, key=lambda cell: (cell.cell, cell.generation))
    return ((cell_server_name(cell.cell, cell.generation), cell) for cell in cells)


def _other_regions(pool: Pool, table: RoutingTable, fleet: str) -> Iterable[Server]:
    """Regions with a share get it by weight, divided among their ingresses. Regions without one are standby for the
    time when nothing else is up. Empty without a secret: an unmarked request could come back."""
    if not table.hop_secrets:
        return
    own_region = table.region
    check_distinct(f"spill region of pool {pool.name}", map(_spill_name, pool.spill))
    targets = sorted((target for target in pool.spill if target.region != own_region), key=_spill_name)
    ingresses = Counter(target.region for target in targets)
    shares = {region: pool.fractions.get(region, 0.0) / count for region, count in ingresses.items()}
    greatest = max(shares.values(), default=0.0)
    for target in targets:
        share = shares[target.region]
        weight = max(1, round(MAX_WEIGHT * share / greatest)) if share > 0 else MAX_WEIGHT
        yield _other_region(f"{SPILL_PREFIX}{pool.name}", target, weight, fleet, stand_by=share <= 0)


def _spill_name(target: SpillTarget) -> str:
    return f"{target.region}{REGION_END}{target.ingress}" if target.ingress else target.region


def _other_region(backend: str, target: SpillTarget, weight: int, fleet: str, *, stand_by: bool) -> Server:
    check_name("region", target.region)
    if target.ingress:
        check_name("ingress", target.ingress)
    what, name = f"ingress of {target.region}", _spill_name(target)
    port = checked_port(what, target.port)
    return Server(
        backend=backend,
        # HAProxy cannot turn a server into a backup, so each role has its own name.
        name=f"{name}{STANDBY_SUFFIX}" if stand_by else name,
        address=checked_address(what, target.address),
        port=hop_port(port) if fleet else port,
        weight=weight,
        backup=stand_by,
        tls_name=_tls_name(what, fleet, IdentityKind.INGRESS, target.ingress),
    )


def region_of(server: str) -> str:
    return server.removesuffix(STANDBY_SUFFIX).partition(REGION_END)[0]


def _tls_name(what: str, fleet: str, kind: IdentityKind, subject: str) -> str:
    if not fleet:
        return ""
    try:
        return IdentityName(fleet, kind, subject).dns
    except BadName as error:
        raise BadTable(f"the {what} names no {kind} whose certificate could be checked: {error}") from None


def _pools_of_models(table: RoutingTable, of_pools: dict[str, str], backends: dict[str, str]) -> dict[str, str]:
    of_splits = {
        split.model: " ".join(backends[pool] for pool, share in sorted(split.shares.items()) if share > 0)
        for split in table.splits
        if split.shares.keys() <= backends.keys()
    }
    return {f"/{model}": pools for model, pools in (of_pools | of_splits).items()}
