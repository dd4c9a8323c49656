"""Places of machines in the test cloud: read in batches, within the budget, and used for placement."""

from datetime import datetime

import pytest

from fleet.capacity.planning.pools import Market
from fleet.clouds.aws.calls import Refused, budget_spend
from fleet.clouds.models import CapacityPool, CloudRegion
from fleet.clouds.planning.call_budget import TOPOLOGY_CALL
from fleet.clouds.services.upkeep import cloud_places, cloud_reservation_places
from fleet.machines.models import Machine
from fleet.nodes.models import Node
from kernel import clock
from lab.cloud.machines import Market as Sold
from lab.cloud.machines import Reserved
from lab.cloud.world import Fault
from tests.fleet.clouds.aws.cloud_fleet import REGION, TRN1, CloudFleet, make_pool

pytestmark = pytest.mark.cloud


def ask(fleet: CloudFleet) -> None:
    cloud_places(CloudRegion.objects.get(), clock.now())


def launched(fleet: CloudFleet, count: int = 2) -> list[str]:
    nodes = fleet.order(count)
    fleet.provision()
    fleet.world.clock.advance(60)
    return nodes


def paths() -> dict[str, tuple[str, ...]]:
    return {node.id: tuple(node.topology) for node in Node.objects.all()}


def test_nodes_get_their_network_nodes_below_their_zone(cloud_fleet: CloudFleet) -> None:
    nodes = launched(cloud_fleet)
    assert set(paths().values()) == {("use1-az1",)}
    ask(cloud_fleet)
    for node in nodes:
        machine = cloud_fleet.world.machines.get(cloud_fleet.machine(node).provider_id)
        assert machine is not None
        assert paths()[node] == ("use1-az1", *machine.network_nodes)
    ask(cloud_fleet)
    assert cloud_fleet.world.count("DescribeInstanceTopology") == 1, "what is known is not asked for again at once"


def test_a_machine_that_runs_not_yet_is_asked_for_later_and_throws_nobody_back(cloud_fleet: CloudFleet) -> None:
    (node,) = cloud_fleet.order(1)
    cloud_fleet.provision()
    ask(cloud_fleet)
    assert paths()[node] == ("use1-az1",)
    cloud_fleet.world.clock.advance(120)
    ask(cloud_fleet)
    assert len(paths()[node]) == 4


@pytest.mark.parametrize("code", ["RequestLimitExceeded", "InternalError"])
def test_a_call_that_fails_is_made_again(cloud_fleet: CloudFleet, code: str) -> None:
    (node,) = launched(cloud_fleet, 1)
    cloud_fleet.world.faults.append(Fault("DescribeInstanceTopology", code, times=5))
    ask(cloud_fleet)
    assert paths()[node] == ("use1-az1",)
    cloud_fleet.world.faults.clear()
    cloud_fleet.world.clock.advance(60)
    ask(cloud_fleet)
    assert len(paths()[node]) == 4
    assert Machine.objects.get().topology_at is not None


def test_the_reservation_nearest_to_what_stays_is_chosen_before_anything_is_launched(cloud_fleet: CloudFleet) -> None:
    (node,) = launched(cloud_fleet, 1)
    ask(cloud_fleet)
    here, now = paths()[node], cloud_fleet.world.clock.now()
    capacity = cloud_fleet.world.machines.capacity
    subnet = CapacityPool.objects.get(position=1).subnet
    for position, nodes in ((3, ("far", "away", "off")), (4, here[1:])):
        reserved = capacity.reserve(Reserved(TRN1, "us-east-1a", 4, now, market=Sold.ON_DEMAND, network_nodes=nodes))
        make_pool(position, "us-east-1a", subnet, market=Market.RESERVED, reservation=reserved.id)
    cloud_reservation_places(CloudRegion.objects.get(region_id=REGION), clock.now())
    assert [tuple(pool.view().path) for pool in CapacityPool.objects.filter(position__in=(3, 4))] == [
        ("use1-az1", "far", "away", "off"),
        here,
    ]


def test_looks_a_second_apart_use_nearly_all_calls_that_our_budget_allows(
    cloud_fleet: CloudFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def one_call(cloud: CloudRegion, now: datetime) -> int:
        not_before = budget_spend(cloud.aws_region, TOPOLOGY_CALL, 0)
        if not_before is not None:
            raise Refused("RequestLimitExceeded", "ours is used up", 503, not_before)
        made.append(now)
        return 100

    monkeypatch.setattr("fleet.clouds.services.upkeep.region_places", one_call)
    cloud, began = CloudRegion.objects.get(), clock.now()
    while (clock.now() - began).total_seconds() < 60:
        look = clock.now()
        cloud_places(cloud, look, wait=cloud_fleet.world.clock.advance)
        cloud_fleet.world.clock.advance(1 - (clock.now() - look).total_seconds())
    assert 44 <= len(made) <= 49, "60 s allow 48 and the first; without waiting it is one in two seconds"
