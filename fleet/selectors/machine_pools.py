"""Which machines a plan may count on: by region, type and price; owned, bought, or paid for anyhow."""

from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import datetime

from fleet.models import CapacityPool, Node, Region
from fleet.planning.capacity.view import MachinePool
from fleet.planning.machines import POOLED
from fleet.planning.markets import Market
from fleet.planning.pools import RESERVATIONS, SETTINGS
from fleet.planning.rate import MachinePrices, Offer
from fleet.planning.states import NodeState
from fleet.selectors.machine import free_machines
from fleet.selectors.rate import machine_prices

BOUGHT_MOST = 1000
"""Machines of a type that a plan may count on buying: a cloud says what it has none of when it is asked."""
GONE = (NodeState.RETIRED.value, NodeState.LOST.value)
Group = tuple[str, str]
"""Region, instance type."""


def machine_pools(groups: Iterable[Group], now: datetime) -> tuple[MachinePool, ...]:
    """The pools of these regions and types. In a constant number of queries."""
    there: Counter[Group] = Counter()
    in_market: Counter[tuple[Group, str]] = Counter()
    rows = Node.objects.exclude(state__in=GONE).values_list("region_id", "instance_type_id", "markets")
    for region, instance_type, markets in rows:
        there[region, instance_type] += 1
        if len(markets) == 1:
            in_market[(region, instance_type), markets[0]] += 1
    providers = dict(Region.objects.values_list("name", "provider"))
    free, prices = free_machines(), machine_prices()
    declared: dict[Group, list[CapacityPool]] = {}
    for pool in CapacityPool.objects.filter(enabled=True).order_by("position"):
        declared.setdefault((pool.region_id, pool.instance_type_id), []).append(pool)
    found: list[MachinePool] = []
    for group in sorted(set(groups)):
        region, instance_type = group
        if providers.get(region) == POOLED:
            count = there[group] + free.get(region, {}).get(instance_type, 0)
            found.append(MachinePool(region, instance_type, "joined", count, 0.0, there[group]))
        elif group in declared:
            found += _bought(declared[group], prices, in_market, now)
        else:
            price = prices.of(region, instance_type, now).usd or 0.0
            found.append(MachinePool(region, instance_type, "launched", BOUGHT_MOST, price, there[group]))
    return tuple(found)


def _bought(
    pools: list[CapacityPool], prices: MachinePrices, in_market: Counter[tuple[Group, str]], now: datetime
) -> Iterator[MachinePool]:
    """Of a reservation no more than it has; its machines are paid for anyhow. Machines that are there count for the
    first pool of their market."""
    counted: set[str] = set()
    for pool in pools:
        group, view = (pool.region_id, pool.instance_type_id), pool.view()
        there = 0 if pool.market in counted else in_market[group, pool.market]
        counted.add(pool.market)
        is_reserved = Market(pool.market) in RESERVATIONS
        price = prices.of(*group, now, Offer(pool.market, pool.price_per_hour)).usd or 0.0
        yield MachinePool(
            *group,
            name=view.name,
            count=there + (pool.free or 0) if is_reserved else BOUGHT_MOST,
            price=0.0 if is_reserved else price,
            now=there,
            from_s=0.0 if pool.paused_until is None else max(0.0, (pool.paused_until - now).total_seconds()),
            until_s=float("inf")
            if pool.ends_at is None
            else max(0.0, (pool.ends_at - now).total_seconds() - SETTINGS.block_margin_s),
        )
