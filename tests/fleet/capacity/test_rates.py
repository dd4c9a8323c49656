"""Current and future prices: the operator's rate, else the provider's price of a pool, else the list."""

from datetime import timedelta
from decimal import Decimal

import pytest

from fleet.capacity.planning.rates import Offer, Source
from fleet.capacity.selectors import machine_costs, machine_prices
from fleet.clouds.models import CapacityPool
from fleet.regions.models import Rate
from models_registry.instance_types.models import InstanceType
from tests.fleet import rows
from tests.fleet.rows import NOW

pytestmark = pytest.mark.django_db
HOUR = timedelta(hours=1)


def a_pool(position: int, price: float | None, market: str = "on_demand", enabled: bool = True) -> None:
    CapacityPool.objects.create(
        region=rows.region(), instance_type_id=rows.KIND, position=position, market=market, zone="az1", subnet="s",
        image="ami", price_per_hour=price, enabled=enabled,
    )  # fmt: skip


def test_an_operators_rate_comes_before_the_providers_and_that_before_the_list() -> None:
    rows.node("n-a")
    InstanceType.objects.update(price_per_hour=3.0)
    region = rows.region().name

    def price(ahead: timedelta = timedelta(), stated: float | None = None) -> tuple[float | None, Source]:
        found = machine_prices().of(region, rows.KIND, NOW + ahead, None if stated is None else Offer("spot", stated))
        return found.usd, found.source

    assert price() == (3.0, Source.RATED)
    a_pool(0, None)
    a_pool(1, 2.5, enabled=False)
    a_pool(2, 2.0)
    a_pool(3, 0.7, market="spot")
    assert price() == (2.0, Source.MEASURED)
    assert price(stated=0.7) == (0.7, Source.MEASURED)
    later = {"kind": "machine_price", "subject": rows.KIND, "actor": "a", "created_at": NOW}
    Rate.objects.create(**later, value=Decimal("1.5"), valid_from=NOW + HOUR)
    Rate.objects.create(**later, value=Decimal("1.4"), valid_from=NOW + 2 * HOUR, region=region)
    Rate.objects.create(**later, value=Decimal("0.6"), valid_from=NOW + 3 * HOUR, market="spot")
    assert [price(ahead * HOUR, stated=0.7)[0] for ahead in range(4)] == [0.7, 1.5, 1.4, 0.6]
    assert price(3 * HOUR)[0] == 1.4, "the first pool is on demand"
    assert machine_prices().changes(NOW, NOW + 2 * HOUR) == (NOW + HOUR,)
    nowhere = machine_prices().of("nowhere", "no.such", NOW)
    assert (nowhere.usd, nowhere.text()) == (None, "unknown price")


def test_the_cost_of_all_machines_follows_those_that_were_live() -> None:
    Rate.objects.create(
        kind="machine_price", subject=rows.KIND, value=3, valid_from=NOW - 24 * HOUR, actor="a", created_at=NOW
    )
    rows.node("n-00000001", created_at=NOW - 24 * HOUR)
    left = NOW - timedelta(minutes=10)
    rows.node("n-00000002", created_at=NOW - timedelta(minutes=30), state="retired", state_since=left)
    rows.node("n-00000003", created_at=NOW - 24 * HOUR, state="retired", state_since=NOW - 3 * HOUR)
    times = [NOW - timedelta(minutes=minutes) for minutes in (60, 20, 0)]
    assert machine_costs(times) == ([3.0, 6.0, 3.0], set())
    rows.machine("m-1", where="us-east-1", runs="n-00000001", market="spot", price_per_hour=9.5)
    Rate.objects.all().delete()
    assert machine_costs(times) == ([9.5, 9.5, 9.5], {rows.KIND})
