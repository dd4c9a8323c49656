"""What pools cost counts where their region tries the cheapest first."""

from datetime import timedelta
from decimal import Decimal

import pytest

from fleet.models import CapacityPool, InstanceType, Rate, Region
from fleet.planning.markets import Market
from fleet.planning.pools import UNPRICED
from fleet.selectors.capacity_pool import pool_views
from tests.fleet.capacity import TYPE, pool
from tests.fleet.rows import NOW

pytestmark = pytest.mark.django_db


def extra_prices(ahead: timedelta = timedelta()) -> list[float | None]:
    return [view.extra_price for view in pool_views(CapacityPool.objects.order_by("position"), NOW + ahead)]


def test_each_pool_has_its_price_once_the_cheapest_is_tried_first() -> None:
    pool(0, Market.ON_DEMAND)
    pool(1, Market.SPOT, price_per_hour=6.5)
    pool(2, Market.RESERVED, price_per_hour=21.5, reservation="cr-1")
    assert extra_prices() == [None, None, None]
    Region.objects.update(cheapest_first=True)
    assert extra_prices() == [21.5, 6.5, 0.0], "on demand by the list"
    InstanceType.objects.create(name="odd", accelerator="odd")
    CapacityPool.objects.filter(position=0).update(instance_type="odd")
    assert extra_prices() == [UNPRICED, 6.5, 0.0]
    tomorrow = timedelta(days=1)
    Rate.objects.create(
        kind="machine_price", subject=TYPE, market="spot", value=Decimal(5), valid_from=NOW + tomorrow, actor="a",
        created_at=NOW,
    )  # fmt: skip
    assert extra_prices(tomorrow) == [UNPRICED, 5.0, 0.0]
