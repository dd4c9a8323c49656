"""Prices of machines from the price list and the spot history, and after a failed list."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from fleet.capacity.planning.pools import Market
from fleet.clouds.aws.region import latest, on_demand_prices, prices_of
from fleet.clouds.models import CapacityPool, CloudRegion
from fleet.clouds.services.regions import KEPT, cloud_prices, cloud_spot_prices
from fleet.machines.models import Machine
from kernel import clock
from lab.cloud.world import Fault
from tests.fleet.clouds.aws.cloud_fleet import TRN1, CloudFleet

pytestmark = pytest.mark.cloud

NOON = datetime(2026, 11, 24, 12, tzinfo=UTC)


def product(*prices: str, unit: str = "Hrs") -> str:
    dimensions = {str(number): {"unit": unit, "pricePerUnit": {"USD": price}} for number, price in enumerate(prices)}
    return json.dumps({"product": {}, "terms": {"OnDemand": {"t": {"priceDimensions": dimensions}}}})


@pytest.mark.parametrize(
    ("text", "prices"),
    [
        (product("21.5000000000"), {21.5}),
        (product("0.0000000000", "21.5"), {21.5}),
        (product("21.5", unit="Quantity"), set()),
        (product("-1"), set()),
        (product("inf"), set()),
        (product("nan"), set()),
        (product("much"), set()),
        ('{"terms": {}}', set()),
        ('{"terms": []}', set()),
        ('{"terms": {"OnDemand": {"t": {"priceDimensions": {"d": {}}}}}}', set()),
        ('{"terms": {"OnDemand": {}}, "terms": {}}', set()),
        ("[", set()),
        ("[" * 100_000, set()),
    ],
)
def test_a_product_states_its_prices_or_none(text: str, prices: set[float]) -> None:
    assert prices_of(text) == prices


def test_two_prices_of_one_type_are_none_and_a_list_of_many_pages_ends() -> None:
    asked: list[dict[str, Any]] = []

    def send(*_: str, **params: Any) -> dict[str, Any]:
        asked.append(params)
        kind = next(each["Value"] for each in params["Filters"] if each["Field"] == "instanceType")
        if kind == "endless":
            return {"PriceList": [product("3")], "NextToken": "again"}
        return {"PriceList": [product("1"), product("2" if kind == "two" else "1")]}

    assert on_demand_prices("us-east-1", ["one", "two", "endless"], send) == {"one": 1.0, "endless": 3.0}
    assert len(asked) == 12


def test_the_youngest_price_of_spot_counts() -> None:
    def row(price: str, at: datetime, zone: str = "us-east-1a") -> dict[str, Any]:
        return {"InstanceType": TRN1, "AvailabilityZone": zone, "Timestamp": at, "SpotPrice": price}

    earlier = NOON - timedelta(hours=3)
    rows = [row("6.0", earlier), row("6.45", NOON), row("7", earlier, "us-east-1b"), row("6.1", earlier)]
    assert latest(rows) == {(TRN1, "us-east-1a"): 6.45, (TRN1, "us-east-1b"): 7.0}


def prices() -> list[float | None]:
    return list(CapacityPool.objects.order_by("position").values_list("price_per_hour", flat=True))


def test_pools_and_machines_that_run_have_the_price_of_the_list(cloud_fleet: CloudFleet) -> None:
    cloud_fleet.order(1)
    cloud_fleet.provision()
    cloud_fleet.world.prices = {(TRN1, "us-east-1"): 24.78, (TRN1, "us-west-2"): 99.0}
    cloud_prices(CloudRegion.objects.get(), clock.now())
    assert prices() == [24.78, 24.78]
    assert Machine.objects.get().price_per_hour == 24.78

    cloud_fleet.order(1)
    cloud_fleet.provision()
    assert {machine.price_per_hour for machine in Machine.objects.all()} == {24.78}


def test_a_list_that_fails_costs_nothing_but_the_price_and_that_after_a_week(cloud_fleet: CloudFleet) -> None:
    cloud, now = CloudRegion.objects.get(), clock.now()
    cloud_fleet.order(1)
    cloud_fleet.provision()
    cloud_fleet.world.prices = {(TRN1, "us-east-1"): 24.78}
    cloud_prices(cloud, now)
    cloud_fleet.world.faults.append(Fault("GetProducts", code="AccessDeniedException", times=2))
    cloud_prices(cloud, now + timedelta(days=1))
    assert prices() == [24.78, 24.78]
    cloud_prices(cloud, now + KEPT + timedelta(days=1))
    assert prices() == [None, None]
    assert Machine.objects.get().price_per_hour is None


def test_spot_is_asked_for_only_where_it_is_used(cloud_fleet: CloudFleet) -> None:
    cloud = CloudRegion.objects.get()
    cloud_spot_prices(cloud, clock.now())
    assert cloud_fleet.world.count("DescribeSpotPriceHistory") == 0
    CapacityPool.objects.filter(position=1).update(market=Market.SPOT)
    cloud_spot_prices(cloud, clock.now())
    assert cloud_fleet.world.count("DescribeSpotPriceHistory") == 1
    assert prices()[0] is None
