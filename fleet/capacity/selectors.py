"""Reads rates, prices and pools of capacity for planners. Never writes."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime

from django.db import connection
from django.db.models import Q, QuerySet
from psycopg import sql

from fleet.capacity.planning.pools import RESERVATIONS, SETTINGS, Market, PoolView, extra_price
from fleet.capacity.planning.rates import MachinePrices, Offer, RateKind, Rates
from fleet.capacity.planning.view import MachinePool
from fleet.clouds.models import CapacityPool
from fleet.machines.planner import POOLED
from fleet.machines.selectors import divided_regions, free_machines
from fleet.nodes.models import Node
from fleet.reconcile.planning.states import NodeState, PoolState
from fleet.regions.models import Rate, Region
from models_registry.instance_types.selectors import instance_shapes


def rates_at(now: datetime) -> Rates:
    return Rates((row.rate() for row in Rate.objects.filter(valid_from__lte=now)), now)


def machine_prices() -> MachinePrices:
    """Current and future prices of machines. Three queries. A type's pool is the first with a known price."""
    pools = sorted(
        CapacityPool.objects.filter(enabled=True), key=lambda pool: (pool.price_per_hour is not None, -pool.position)
    )
    return MachinePrices(
        tuple(row.rate() for row in Rate.objects.filter(kind=RateKind.MACHINE_PRICE.value)),
        instance_shapes(),
        {(pool.region_id, pool.instance_type_id): Offer(pool.market, pool.price_per_hour) for pool in pools},
    )


_ALIVE = """
    SELECT node.region_id, node.instance_type_id, coalesce(machine.market, ''), machine.price_per_hour,
        {counts}
    FROM fleet_node node
    LEFT JOIN fleet_machine machine ON machine.runs = node.id AND machine.state <> 'gone' AND machine.runs <> ''
    WHERE node.state <> 'retired' OR node.state_since > %s
    GROUP BY 1, 2, 3, 4
"""
_ALIVE_AT = "count(*) FILTER (WHERE node.created_at <= %s AND (node.state <> 'retired' OR node.state_since > %s))"


def machine_costs(times: Sequence[datetime]) -> tuple[list[float], set[str]]:
    """US dollars an hour of the machines that were live at these times, oldest first, by the prices then; and instance
    types without a known price, which cost nothing here. Four queries."""
    prices, costs, unpriced = machine_prices(), [0.0] * len(times), set[str]()
    statement = sql.SQL(_ALIVE).format(counts=sql.SQL(", ").join([sql.SQL(_ALIVE_AT)] * len(times)))
    with connection.cursor() as cursor:
        cursor.execute(statement, [*(at for at in times for _ in range(2)), times[0]])
        for region, kind, market, usd, *counts in cursor.fetchall():
            for place, (at, count) in enumerate(zip(times, counts, strict=True)):
                price = prices.of(region, kind, at, Offer(market, usd)).usd if count else 0.0
                costs[place] += count * (price or 0.0)
                if price is None:
                    unpriced.add(kind)
    return costs, unpriced


def pools_in_order(region: str = "") -> QuerySet[CapacityPool]:
    pools = CapacityPool.objects.order_by("region_id", "instance_type_id", "position")
    return pools.filter(region_id=region) if region else pools


def pool_views(pools: Iterable[CapacityPool], now: datetime) -> list[PoolView]:
    """Pools of one region for planners, with prices if the region uses the cheapest first."""
    rows = list(pools)
    if not rows or not Region.objects.filter(name=rows[0].region_id, cheapest_first=True).exists():
        return [pool.view() for pool in rows]
    prices = machine_prices()
    return [replace(pool.view(), extra_price=_extra_price(pool, prices, now)) for pool in rows]


def _extra_price(pool: CapacityPool, prices: MachinePrices, now: datetime) -> float:
    price = prices.of(pool.region_id, pool.instance_type_id, now, Offer(pool.market, pool.price_per_hour))
    return extra_price(Market(pool.market), price.usd)


def is_in_state(state: PoolState, now: datetime) -> Q:
    """`fleet.capacity.planning.pools.pool_state` in SQL."""
    off, ended = Q(enabled=False), Q(ends_at__lte=now + SETTINGS.useful)
    resting, full = Q(paused_until__gt=now), Q(market__in=RESERVATIONS, free=0)
    return {
        PoolState.OFF: off,
        PoolState.ENDED: ended & ~off,
        PoolState.RESTING: resting & ~off & ~ended,
        PoolState.FULL: full & ~off & ~ended & ~resting,
        PoolState.USABLE: ~off & ~ended & ~resting & ~full,
    }[state]


BOUGHT_MOST = 1000
"""Machines of a type that a plan may buy: clouds state their capacity only when asked."""
GONE = (NodeState.RETIRED.value, NodeState.LOST.value)
Group = tuple[str, str]


def machine_pools(groups: Iterable[Group], now: datetime) -> tuple[MachinePool, ...]:
    """The pools of these regions and types. A constant number of queries."""
    there: Counter[Group] = Counter()
    in_market: Counter[tuple[Group, str]] = Counter()
    rows = Node.objects.exclude(state__in=GONE).values_list("region_id", "instance_type_id", "markets")
    for region, instance_type, markets in rows:
        there[region, instance_type] += 1
        if len(markets) == 1:
            in_market[(region, instance_type), markets[0]] += 1
    providers = dict(Region.objects.values_list("name", "provider"))
    divided, free, prices = divided_regions(), free_machines(), machine_prices()
    declared: dict[Group, list[CapacityPool]] = {}
    for pool in CapacityPool.objects.filter(enabled=True).order_by("position"):
        declared.setdefault((pool.region_id, pool.instance_type_id), []).append(pool)
    found: list[MachinePool] = []
    for group in sorted(set(groups)):
        region, instance_type = group
        if providers.get(region) == POOLED or region in divided:
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
    """Reservations are limited to their size and are paid in any case. Existing machines count for the first pool of
    their market."""
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
