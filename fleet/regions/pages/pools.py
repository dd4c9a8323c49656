"""The pools of capacity of one region: the list, and what the form for another one offers."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from controlplane.dashboard.fragments import PageRequest, found_or_404
from controlplane.dashboard.lists import Column, List
from fleet.capacity.planning.pools import DECLARABLE, Market, UnitView, fits, pool_state
from fleet.capacity.selectors import pool_views, pools_in_order
from fleet.clouds.models import CapacityPool
from fleet.clouds.services.regions import ECS
from fleet.reconcile.planning.states import POOL_TONE, PoolState
from fleet.regions.models import Region
from kernel.tones import Tone


@dataclass(frozen=True, slots=True)
class PoolRow:
    """`why`: why it is not usable now, or "". `place`: in the order of its type, from 1."""

    pool: CapacityPool
    name: str
    state: PoolState
    tone: Tone
    why: str
    place: int


@dataclass(frozen=True, slots=True)
class RegionPools:
    """Pools by instance type, in order of use, and what the form for another one offers."""

    region: str
    is_in_cloud: bool
    is_cluster: bool
    rows: tuple[PoolRow, ...]
    types: tuple[str, ...]
    zones: tuple[str, ...]
    markets: tuple[str, ...] = tuple(market.value for market in DECLARABLE)


def region_find(name: str) -> Region | None:
    return Region.objects.select_related("cloud", "loss").filter(pk=name).first()


def region_of(request: PageRequest) -> Region:
    return region_or_404(request.key)


def region_or_404(region: str) -> Region:
    return found_or_404(region_find(region), f"region {region!r}")


def region_pools(region: Region, now: datetime) -> RegionPools:
    by_type: dict[str, list[CapacityPool]] = {}
    for pool in pools_in_order(region.pk):
        by_type.setdefault(pool.instance_type_id, []).append(pool)
    rows = tuple(row for kind, pools in by_type.items() for row in _of_type(region.pk, kind, pools, now))
    zones = sorted({row.pool.zone for row in rows})
    is_in_cloud = getattr(region, "cloud", None) is not None
    return RegionPools(region.pk, is_in_cloud, region.provider == ECS, rows, tuple(by_type), tuple(zones))


def _of_type(region: str, kind: str, pools: Sequence[CapacityPool], now: datetime) -> Iterator[PoolRow]:
    views = pool_views(pools, now)
    reasons = {fit.pool.id: fit.reason for fit in fits(UnitView("", region, kind, 1, frozenset(Market)), views, now)}
    for place, (pool, view) in enumerate(zip(pools, views, strict=True), start=1):
        state = pool_state(view, now)
        yield PoolRow(pool, view.name, state, POOL_TONE[state], reasons[pool.pk], place)


def _pools(request: PageRequest) -> RegionPools:
    return region_pools(request.once(region_of), request.now)


def _of_pool(name: str) -> Callable[[PoolRow], object]:
    return lambda row: getattr(row.pool, name)


POOL_LIST: List[PoolRow] = List(
    name="pools",
    prefix="pools-",
    columns=(
        Column("type", "Type", _of_pool("instance_type_id")),
        Column("place", "Order", lambda row: row.place, css="number", title="In which pools of a type are tried"),
        Column("pool", "Pool", lambda row: row.name),
        Column("state", "State", lambda row: row.state, choices=tuple(PoolState)),
        Column("price", "$/h", _of_pool("price_per_hour"), css="number", title="Price now"),
        Column("most", "At most", _of_pool("max_price"), css="wide number"),
        Column("free", "Room", _of_pool("free"), css="wide number", is_newest_first=True),
        Column("ends", "Ends", _of_pool("ends_at"), css="wide number"),
        Column("by", "Added by", lambda row: row.pool.declared_by or "the stack", css="wide"),
        Column("why", "Why not", lambda row: row.why, css="wide"),
    ),
    query=lambda request: request.once(_pools).rows,
    find=("type", "pool", "by", "why"),
    by_value=True,
    above=lambda request: request.once(_pools),
)
