"""What a person says of pools of capacity, and what the next reading of the stack leaves of it."""

from datetime import timedelta
from typing import Any

import pytest

from fleet.models import CapacityPool, CloudRegion, Node, ProviderCall
from fleet.planning.markets import Market
from fleet.planning.pools import pool_state
from fleet.planning.states import PoolState
from fleet.providers.aws.stack import PoolFound
from fleet.selectors.capacity_pool import is_in_state
from fleet.services.capacity_pool import NewPool, pool_change, pool_declare, pool_delete, pool_resume
from fleet.services.cloud_region import pools_add
from kernel.models import Event
from kernel.refusals import Conflict, InvalidInput
from tests.fleet import rows
from tests.fleet.capacity import TYPE, cloud_region, order, pool
from tests.fleet.rows import NOW

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
        ({"market": Market.ON_DEMAND}, "market", "found by the reading"),
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
    with pytest.raises(Conflict, match="switch it off instead"):
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
