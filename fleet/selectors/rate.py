"""What operators, providers and lists state of machines and power, as planners take it."""

from datetime import datetime

from fleet.models import CapacityPool, InstanceType, Rate
from fleet.planning.rate import MachinePrices, Offer, RateKind, Rates


def rates_at(now: datetime) -> Rates:
    """The rates in force, in one query."""
    return Rates((row.rate() for row in Rate.objects.filter(valid_from__lte=now)), now)


def machine_prices() -> MachinePrices:
    """What machines cost now and later, in three queries. The pool that counts for a type is the first whose price is
    known."""
    pools = sorted(
        CapacityPool.objects.filter(enabled=True), key=lambda pool: (pool.price_per_hour is not None, -pool.position)
    )
    return MachinePrices(
        tuple(row.rate() for row in Rate.objects.filter(kind=RateKind.MACHINE_PRICE.value)),
        {row.name: row.shape() for row in InstanceType.objects.all()},
        {(pool.region_id, pool.instance_type_id): Offer(pool.market, pool.price_per_hour) for pool in pools},
    )
