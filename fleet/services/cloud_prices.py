"""Prices of a region's pools, and of the machines that were bought from them. A list that is forbidden, or does not
answer, costs nothing but the price: it is unknown, or for a week what it was.
"""

import logging
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta

from django.db.models import Q, QuerySet

from fleet.models import CapacityPool, CloudRegion, Machine
from fleet.planning.markets import Market
from fleet.planning.states import MachineState
from fleet.providers.aws.calls import CallFailed
from fleet.providers.aws.prices import on_demand_prices, spot_prices

RATED = (Market.ON_DEMAND, Market.OPEN, Market.RESERVED)
"""Billed as on demand. A Capacity Block was paid ahead, and what an interruptible reservation costs no list says."""
KEPT = timedelta(days=7)
"""A price that was not read for longer is unknown."""

log = logging.getLogger(__name__)

Read = Callable[[Iterable[CapacityPool]], dict[tuple[str, str], float]]


def cloud_prices(cloud: CloudRegion, now: datetime) -> None:
    """Once a day: from the price list."""

    def read(pools: Iterable[CapacityPool]) -> dict[tuple[str, str], float]:
        prices = on_demand_prices(cloud.aws_region, sorted({pool.instance_type_id for pool in pools}))
        return {
            (pool.instance_type_id, pool.zone): prices[pool.instance_type_id]
            for pool in pools
            if pool.instance_type_id in prices
        }

    _keep(cloud, CapacityPool.objects.filter(region_id=cloud.pk, market__in=RATED), read, now)


def cloud_spot_prices(cloud: CloudRegion, now: datetime) -> None:
    """Once an hour, where there is a pool of spot: from its history."""

    def read(pools: Iterable[CapacityPool]) -> dict[tuple[str, str], float]:
        return spot_prices(cloud.aws_region, {pool.instance_type_id for pool in pools}, now)

    _keep(cloud, CapacityPool.objects.filter(region_id=cloud.pk, market=Market.SPOT), read, now)


def _keep(cloud: CloudRegion, rows: "QuerySet[CapacityPool]", read: Read, now: datetime) -> None:
    pools = list(rows)
    if not pools:
        return
    prices: dict[tuple[str, str], float] = {}
    try:
        prices = read(pools)
    except CallFailed as error:
        log.warning("prices of region %s were not read: %s", cloud.pk, error)
    for pool in pools:
        price = prices.get((pool.instance_type_id, pool.zone))
        if price is not None:
            CapacityPool.objects.filter(pk=pool.pk).update(price_per_hour=price, price_at=now)
            _machines_of(pool).filter(Q(price_per_hour=None) | ~Q(price_per_hour=price)).update(price_per_hour=price)
        elif pool.price_at is not None and pool.price_at < now - KEPT:
            CapacityPool.objects.filter(pk=pool.pk).update(price_per_hour=None, price_at=None)
            _machines_of(pool).update(price_per_hour=None)


def _machines_of(pool: CapacityPool) -> "QuerySet[Machine]":
    """Those that run: what one costs that is gone does not change any more."""
    bought = Machine.objects.filter(region_id=pool.region_id, instance_type_id=pool.instance_type_id, zone=pool.zone)
    return bought.filter(market=pool.market).exclude(state=MachineState.GONE)
