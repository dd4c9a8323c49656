"""User changes of pools and later readings of the stack; pools by price; machines that a plan may count on."""

from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest

from fleet.capacity.planning.pools import UNPRICED, Market, pool_state
from fleet.capacity.selectors import BOUGHT_MOST, is_in_state, machine_pools, pool_views
from fleet.capacity.services import NewPool, pool_change, pool_declare, pool_delete, pool_resume
from fleet.clouds.aws.region import PoolFound
from fleet.clouds.models import CapacityPool, CloudRegion
from fleet.clouds.services.regions import pools_add
from fleet.machines.models import ProviderCall
from fleet.nodes.models import Node
from fleet.reconcile.planning.states import PoolState
from fleet.regions.models import Rate, Region
from kernel.models import Event
from kernel.refusals import Conflict, InvalidInput
from models_registry.instance_types.models import InstanceType
from tests.fleet import rows
from tests.fleet.pools import TYPE, cloud_region, order, pool
from tests.fleet.rows import KIND, NOW

pytestmark = pytest.mark.django_db

WHO: dict[str, Any] = {"actor": "ada", "now": NOW}


def spot(zone: str = "us-east-1a", **columns: Any) -> CapacityPool:
    return pool_declare(NewPool(**{"region": "us-east-1", "instance_type": TYPE, "zone": zone, **columns}), **WHO)


def test_a_declared_pool_is_in_the_place_of_the_others_and_says_who_added_it() -> None:
    pool(0)
    made = spot(max_price=9.5)
    assert (made.subnet, made.image, made.zone_id, made.declared_by) == ("subnet-a", "ami-1", "use1-a", "ada")
    assert order() == ["on_demand in us-east-1a", "spot in us-east-1a"]
    event = Event.objects.get(kind="region.pool")
    assert event.message == "pool of trn1.32xlarge spot in us-east-1a was declared by ada"
    assert event.region == "us-east-1"


def test_one_may_be_added_before_the_others() -> None:
    pool(0)
    pool(1, zone="us-east-1b")
    spot(position=0)
    assert order() == ["spot in us-east-1a", "on_demand in us-east-1a", "on_demand in us-east-1b"]


@pytest.mark.parametrize(
    ("wrong", "field", "says"),
    [
        ({"region": "mars"}, "region", "there is no region 'mars' in a cloud"),
        ({"instance_type": "inf2.xlarge"}, "instance_type", "us-east-1 has no 'inf2.xlarge'; it has trn1.32xlarge"),
        (
            {"zone": "us-east-1z"},
            "zone",
            "no zone 'us-east-1z' of us-east-1 offers trn1.32xlarge; these do: us-east-1a",
        ),
        ({"market": Market.ON_DEMAND}, "market", "comes from the region's stack"),
        ({"market": Market.OPEN, "max_price": 3.0}, "max_price", "only a spot pool has a highest price"),
        ({"instance_type": "no.such"}, "instance_type", "no.such are not known"),
    ],
)
def test_what_cannot_be_is_refused_and_says_what_could(wrong: dict[str, Any], field: str, says: str) -> None:
    pool(0)
    with pytest.raises(InvalidInput, match=says.replace(".", r"\.")) as refused:
        spot(**wrong)
    assert refused.value.field == field
    assert CapacityPool.objects.count() == 1


def test_a_pool_is_declared_once_and_only_where_the_stack_was_read() -> None:
    pool(0)
    spot()
    with pytest.raises(Conflict, match="already"):
        spot()
    CloudRegion.objects.update(state="refused")
    with pytest.raises(Conflict, match="region us-east-1 is refused"):
        spot(market=Market.OPEN)


def test_what_a_person_said_survives_the_next_reading() -> None:
    first, second = pool(0), pool(1, zone="us-east-1b")
    made = spot(position=0)
    pool_change(pool_id=first.pk, columns={"enabled": False}, **WHO)
    before = list(CapacityPool.objects.order_by("pk").values())
    found = [PoolFound(TYPE, Market.ON_DEMAND, zone, "other", "other", "ami-2") for zone in (first.zone, second.zone)]
    again = PoolFound(TYPE, Market.SPOT, made.zone, "other", "other", "ami-2")
    assert pools_add("us-east-1", [*found, again]) == 0
    assert list(CapacityPool.objects.order_by("pk").values()) == before
    assert pools_add("us-east-1", [PoolFound(TYPE, Market.ON_DEMAND, "us-east-1c", "z", "s", "ami-2")]) == 1
    assert order()[-1] == "on_demand in us-east-1c"


def test_pools_change_places_whole() -> None:
    pools = [pool(place, zone=f"us-east-1{zone}") for place, zone in ((0, "a"), (3, "b"), (7, "c"))]
    pool_change(pool_id=pools[2].pk, columns={"position": 0}, **WHO)
    assert order() == [f"on_demand in us-east-1{zone}" for zone in "cab"]
    assert list(CapacityPool.objects.order_by("position").values_list("position", flat=True)) == [0, 1, 2]
    pool_change(pool_id=pools[2].pk, columns={"position": 99}, **WHO)
    assert order() == [f"on_demand in us-east-1{zone}" for zone in "abc"]


def test_what_is_so_already_leaves_no_trace() -> None:
    one = pool(0)
    pool_change(pool_id=one.pk, columns={"enabled": True, "position": 0, "max_price": None}, **WHO)
    pool_resume(pool_id=one.pk, **WHO)
    assert not Event.objects.exists()


def test_a_pool_that_rests_is_tried_again_and_what_waits_for_it_at_once() -> None:
    resting = pool(0, paused_until=NOW + timedelta(minutes=9), pause_reason="none left", failures=3)
    node = rows.node("n-00000001", state="joining")
    Node.objects.filter(pk=node.pk).update(instance_type_id=TYPE)
    later = NOW + timedelta(minutes=9)
    columns = {"action": "launch", "reason": "r", "requested_at": NOW, "due_at": later}
    waiting = ProviderCall.objects.create(node=node, **columns)
    pool_resume(pool_id=resting.pk, why="they called", **WHO)
    resting.refresh_from_db()
    waiting.refresh_from_db()
    assert (resting.paused_until, resting.failures, resting.pause_reason) == (None, 0, "")
    assert waiting.due_at == NOW
    assert Event.objects.get().message.endswith("was resumed by ada: they called")


def test_a_call_that_runs_is_not_hurried() -> None:
    resting = pool(0, paused_until=NOW + timedelta(minutes=9), failures=1)
    node = rows.node("n-00000001", state="joining")
    Node.objects.filter(pk=node.pk).update(instance_type_id=TYPE)
    later = NOW + timedelta(minutes=9)
    columns = {"action": "launch", "reason": "r", "requested_at": NOW, "due_at": later, "claim": "somebody"}
    running = ProviderCall.objects.create(node=node, **columns)
    pool_resume(pool_id=resting.pk, **WHO)
    running.refresh_from_db()
    assert running.due_at == later


def test_only_what_a_person_added_is_removed() -> None:
    found = pool(0)
    made = spot()
    pool_delete(pool_id=made.pk, **WHO)
    with pytest.raises(Conflict, match="disable it instead"):
        pool_delete(pool_id=found.pk, **WHO)
    assert order() == ["on_demand in us-east-1a"]


def test_each_pool_is_in_the_state_that_planning_says() -> None:
    soon, late = NOW + timedelta(minutes=5), NOW + timedelta(days=2)
    for number, (enabled, paused, ends, free, market) in enumerate(
        (enabled, paused, ends, free, market)
        for enabled in (True, False)
        for paused in (None, NOW, soon)
        for ends in (None, soon, late)
        for free in (None, 0, 2)
        for market in (Market.BLOCK, Market.ON_DEMAND)
    ):
        pool(number, market, enabled=enabled, paused_until=paused, ends_at=ends, free=free)
    for state in PoolState:
        wanted = {row.pk for row in CapacityPool.objects.all() if pool_state(row.view(), NOW) is state}
        assert wanted, state
        assert set(CapacityPool.objects.filter(is_in_state(state, NOW)).values_list("pk", flat=True)) == wanted


def test_a_region_without_pools_says_so() -> None:
    cloud_region()
    with pytest.raises(InvalidInput, match="it has no type yet"):
        spot()


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
    with django_assert_num_queries(9):  # type: ignore[operator]
        machine_pools([EAST, ("us-west-2", KIND)], NOW)
