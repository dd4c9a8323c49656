"""Which machines a plan may count on, by what a region gets them from."""

from datetime import timedelta

import pytest

from fleet.models import CapacityPool, InstanceType
from fleet.selectors.machine_pools import BOUGHT_MOST, machine_pools
from tests.fleet import rows
from tests.fleet.rows import KIND, NOW

pytestmark = pytest.mark.django_db
EAST = ("us-east-1", KIND)


def test_what_can_be_launched_costs_what_a_machine_costs() -> None:
    rows.node("n-1")
    InstanceType.objects.update(price_per_hour=2.5)
    (pool,) = machine_pools([EAST], NOW)
    assert (pool.name, pool.count, pool.price, pool.now) == ("launched", BOUGHT_MOST, 2.5, 1)


def test_machines_that_joined_are_paid_for_and_no_more_than_there_are() -> None:
    rows.region("us-east-1", provider="machines")
    rows.node("n-1")
    (pool,) = machine_pools([EAST], NOW)
    assert (pool.name, pool.count, pool.price, pool.now) == ("joined", 1, 0.0, 1)


def test_pools_of_a_cloud_are_what_they_are_declared_as() -> None:
    rows.region("us-east-1", provider="aws")
    rows.node("n-1", markets=["block"])
    shared = {"region_id": EAST[0], "instance_type_id": KIND, "zone": "a", "subnet": "s", "image": "i"}
    CapacityPool.objects.create(
        **shared, position=0, market="block", reservation="cr-1", free=3, ends_at=NOW + timedelta(hours=10)
    )
    CapacityPool.objects.create(**shared, position=1, market="spot", price_per_hour=4.0)
    CapacityPool.objects.create(**shared, position=2, market="on_demand", price_per_hour=9.0)
    CapacityPool.objects.create(**shared, position=3, market="reserved", free=50, enabled=False)
    block, spot, on_demand = machine_pools([EAST], NOW)
    assert (block.name, block.count, block.now, block.price) == ("block in a (cr-1)", 4, 1, 0.0)
    assert block.until_s == 10 * 3600.0 - 2400.0
    assert (spot.price, on_demand.price, spot.count) == (4.0, 9.0, BOUGHT_MOST)


def test_no_more_queries_with_more_pools(django_assert_num_queries: object) -> None:
    rows.node("n-1")
    with django_assert_num_queries(7):  # type: ignore[operator]
        machine_pools([EAST, ("us-west-2", KIND)], NOW)
