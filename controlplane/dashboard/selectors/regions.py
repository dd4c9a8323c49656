"""One region for its page: what its cloud says of it, and its pools of capacity."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from fleet.models import CapacityPool, CloudRegion, ImageMove, Region
from fleet.planning.images import IMAGE_TONE, ImageState
from fleet.planning.markets import Market
from fleet.planning.pools import DECLARABLE, UnitView, fits, pool_state
from fleet.planning.states import POOL_TONE, CellState, CloudRegionState, NodeState, PoolState
from fleet.selectors.capacity_pool import pool_views, pools_in_order
from fleet.selectors.cell import cell_counts_by_region
from fleet.selectors.node import node_counts_by_region
from kernel.tones import Tone

CLOUD_TONE = {
    CloudRegionState.READING: Tone.MOVING,
    CloudRegionState.READY: Tone.OK,
    CloudRegionState.REFUSED: Tone.BAD,
}


@dataclass(frozen=True, slots=True)
class RegionHead:
    """A region and its counts: state -> number. `cloud`: what it was made of in a cloud; None: it is in none."""

    region: Region
    cloud: CloudRegion | None
    cloud_tone: Tone
    nodes: tuple[tuple[str, int], ...]
    cells: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class PoolRow:
    """`why`: why no machine is launched from it now; "": one may be. `is_first`, `is_last`: of its type."""

    pool: CapacityPool
    name: str
    state: PoolState
    tone: Tone
    why: str
    is_first: bool
    is_last: bool


@dataclass(frozen=True, slots=True)
class PoolsOfType:
    instance_type: str
    rows: tuple[PoolRow, ...]
    zones: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ImagesOfType:
    """The images that the pools of a type have, and the newest move from them; None: there was none."""

    instance_type: str
    images: tuple[str, ...]
    move: ImageMove | None
    tone: Tone
    is_under_way: bool
    may_turn_back: bool


@dataclass(frozen=True, slots=True)
class RegionImages:
    region: str
    types: tuple[ImagesOfType, ...]


@dataclass(frozen=True, slots=True)
class RegionPools:
    """Pools by instance type, each in the order in which they are tried."""

    region: str
    is_in_cloud: bool
    types: tuple[PoolsOfType, ...]
    zones: tuple[str, ...]
    markets: tuple[str, ...] = tuple(market.value for market in DECLARABLE)


def region_find(name: str) -> Region | None:
    """With its cloud, if it is in one."""
    return Region.objects.select_related("cloud").filter(pk=name).first()


def region_head(region: Region) -> RegionHead:
    cloud: CloudRegion | None = getattr(region, "cloud", None)
    nodes, cells = node_counts_by_region().get(region.pk, {}), cell_counts_by_region().get(region.pk, {})
    return RegionHead(
        region=region,
        cloud=cloud,
        cloud_tone=CLOUD_TONE[CloudRegionState(cloud.state)] if cloud else Tone.IDLE,
        nodes=tuple((state.value, nodes[state]) for state in NodeState if nodes.get(state)),
        cells=tuple((state.value, cells[state]) for state in CellState if cells.get(state)),
    )


def region_pools(region: Region, now: datetime) -> RegionPools:
    by_type: dict[str, list[CapacityPool]] = {}
    for pool in pools_in_order(region.pk):
        by_type.setdefault(pool.instance_type_id, []).append(pool)
    types = tuple(_of_type(region.pk, kind, pools, now) for kind, pools in by_type.items())
    zones = sorted({zone for each in types for zone in each.zones})
    return RegionPools(region.pk, getattr(region, "cloud", None) is not None, types, tuple(zones))


def region_images(region: Region) -> RegionImages:
    moves = ImageMove.objects.filter(region_id=region.pk).order_by("instance_type_id", "-pk")
    newest = {move.instance_type_id: move for move in moves.distinct("instance_type_id")}
    by_type: dict[str, set[str]] = {}
    for kind, image in CapacityPool.objects.filter(region_id=region.pk).values_list("instance_type_id", "image"):
        by_type.setdefault(kind, set()).add(image)
    types = tuple(_images(kind, images, newest.get(kind)) for kind, images in sorted(by_type.items()))
    return RegionImages(region.pk, types)


def _images(kind: str, images: set[str], move: ImageMove | None) -> ImagesOfType:
    is_under_way = move is not None and move.ended_at is None
    return ImagesOfType(
        instance_type=kind,
        images=tuple(sorted(images)),
        move=move,
        tone=IMAGE_TONE[ImageState(move.state)] if move else Tone.IDLE,
        is_under_way=is_under_way,
        may_turn_back=is_under_way and move is not None and move.state != ImageState.BACK,
    )


def _of_type(region: str, kind: str, pools: Sequence[CapacityPool], now: datetime) -> PoolsOfType:
    views = pool_views(pools, now)
    reasons = {fit.pool.id: fit.reason for fit in fits(UnitView("", region, kind, 1, frozenset(Market)), views, now)}
    rows = tuple(
        PoolRow(
            pool=pool,
            name=view.name,
            state=(state := pool_state(view, now)),
            tone=POOL_TONE[state],
            why=reasons[pool.pk],
            is_first=pool is pools[0],
            is_last=pool is pools[-1],
        )
        for pool, view in zip(pools, views, strict=True)
    )
    return PoolsOfType(kind, rows, tuple(sorted({pool.zone for pool in pools})))
