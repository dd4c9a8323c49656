"""Pools of capacity as rows: in the order in which they are tried, and those of a state."""

from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime

from django.db.models import Q, QuerySet

from fleet.models import CapacityPool, Region
from fleet.planning.markets import Market
from fleet.planning.pools import RESERVATIONS, SETTINGS, PoolView, extra_price
from fleet.planning.rate import MachinePrices, Offer
from fleet.planning.states import PoolState
from fleet.selectors.rate import machine_prices


def pools_in_order(region: str = "") -> QuerySet[CapacityPool]:
    pools = CapacityPool.objects.order_by("region_id", "instance_type_id", "position")
    return pools.filter(region_id=region) if region else pools


def pool_views(pools: Iterable[CapacityPool], now: datetime) -> list[PoolView]:
    """Pools of one region as planners take them, with what each costs where its region tries the cheapest first."""
    rows = list(pools)
    if not rows or not Region.objects.filter(name=rows[0].region_id, cheapest_first=True).exists():
        return [pool.view() for pool in rows]
    prices = machine_prices()
    return [replace(pool.view(), extra_price=_extra_price(pool, prices, now)) for pool in rows]


def _extra_price(pool: CapacityPool, prices: MachinePrices, now: datetime) -> float:
    price = prices.of(pool.region_id, pool.instance_type_id, now, Offer(pool.market, pool.price_per_hour))
    return extra_price(Market(pool.market), price.usd)


def is_in_state(state: PoolState, now: datetime) -> Q:
    """`fleet.planning.pools.pool_state` in SQL."""
    off, ended = Q(enabled=False), Q(ends_at__lte=now + SETTINGS.useful)
    resting, full = Q(paused_until__gt=now), Q(market__in=RESERVATIONS, free=0)
    return {
        PoolState.OFF: off,
        PoolState.ENDED: ended & ~off,
        PoolState.RESTING: resting & ~off & ~ended,
        PoolState.FULL: full & ~off & ~ended & ~resting,
        PoolState.USABLE: ~off & ~ended & ~resting & ~full,
    }[state]
