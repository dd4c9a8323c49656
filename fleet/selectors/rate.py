"""What operators, providers and lists state of machines and power, as planners take it."""

from datetime import datetime

from fleet.models import CapacityPool, InstanceType, Rate
from fleet.planning.rate import MachinePrices, RateKind, Rates


def rates_at(now: datetime) -> Rates:
    """The rates in force, in one query."""
    return Rates((row.rate() for row in Rate.objects.filter(valid_from__lte=now)), now)


def machine_prices() -> MachinePrices:
    """What machines cost now and later, in three queries. Of a type in a region the provider's price is that of the
    first pool whose price is known."""
    pools = CapacityPool.objects.filter(enabled=True, price_per_hour__isnull=False).order_by("-position")
    return MachinePrices(
        tuple(row.rate() for row in Rate.objects.filter(kind=RateKind.MACHINE_PRICE.value)),
        {row.name: row.shape() for row in InstanceType.objects.all()},
        {(pool.region_id, pool.instance_type_id): float(pool.price_per_hour or 0) for pool in pools},
    )
