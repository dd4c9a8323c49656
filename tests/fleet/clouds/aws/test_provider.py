"""Launches of units with PostgreSQL and the test cloud: once, whole, in one zone, although answers are lost, and
terminated when given back."""

import pytest

from fleet.capacity.planning.pools import Market
from fleet.clouds.base import ProviderError, Unknown, provider_named
from fleet.clouds.models import CallBucket, CapacityPool, CloudRegion, Install, LaunchAttempt, LaunchUnit
from fleet.machines.models import Machine
from fleet.nodes.models import Node
from fleet.reconcile.planning.snapshot import ProviderStatus
from fleet.reconcile.planning.states import MachineState
from lab.cloud.world import Ending, Fault, When
from tests.fleet.clouds.aws.cloud_fleet import TRN1, CloudFleet, described, tags_of

pytestmark = pytest.mark.cloud


def test_a_unit_of_two_is_launched_by_one_call_and_each_node_has_its_machine(cloud_fleet: CloudFleet) -> None:
    nodes = cloud_fleet.order(2)
    cloud_fleet.provision()

    assert cloud_fleet.world.count("RunInstances") == 1
    assert not cloud_fleet.waiting()
    unit, install = LaunchUnit.objects.get(), Install.objects.get()
    machines = [cloud_fleet.machine(node) for node in nodes]
    assert [machine.provider_id for machine in machines] == cloud_fleet.live()
    for machine, seen in zip(machines, described(cloud_fleet.world, cloud_fleet.live()), strict=True):
        expected = {"install": install.id, "unit": unit.id, "attempt": "1"}
        assert {f"switchyard:{key}": value for key, value in expected.items()}.items() <= tags_of(seen).items()
        assert machine.address == seen["PrivateIpAddress"]
        assert (machine.zone, machine.market, machine.price_per_hour) == ("us-east-1a", "on_demand", None)
    assert {tuple(node.topology) for node in Node.objects.all()} == {("use1-az1",)}
    assert unit.ended_at is not None


def test_a_zone_without_capacity_rests_and_the_next_pool_has_the_whole_unit(cloud_fleet: CloudFleet) -> None:
    cloud_fleet.limit(left=1)
    cloud_fleet.order(2)
    cloud_fleet.provision_for(20)

    assert cloud_fleet.outcomes() == ["no_capacity", "launched"]
    assert cloud_fleet.zones() == {"us-east-1b"}
    first = CapacityPool.objects.get(zone="us-east-1a")
    assert (first.failures, first.pause_reason[:28]) == (1, "InsufficientInstanceCapacity")
    cloud_fleet.order(2)
    cloud_fleet.provision()
    assert cloud_fleet.outcomes() == ["no_capacity", "launched", "launched"], "the pool that rests is not asked"


def test_a_unit_is_bought_in_no_market_that_its_deployment_refuses(cloud_fleet: CloudFleet) -> None:
    CapacityPool.objects.filter(zone="us-east-1a").update(market=Market.SPOT)
    first, *_ = cloud_fleet.order(2, markets=frozenset({Market.ON_DEMAND, Market.RESERVED}))
    cloud_fleet.provision()

    assert cloud_fleet.zones() == {"us-east-1b"}
    assert cloud_fleet.machine(first).market == "on_demand"
    assert Node.objects.get(id=first).markets == ["on_demand"]
    other, *_ = cloud_fleet.order(2, markets=frozenset({Market.BLOCK}))
    cloud_fleet.provision_for(20)
    assert len(cloud_fleet.live()) == 2
    assert "spot in us-east-1a: its deployment does not use spot" in Node.objects.get(id=other).reason


def test_a_unit_that_no_pool_has_waits_and_says_so(cloud_fleet: CloudFleet) -> None:
    for zone in ("us-east-1a", "us-east-1b"):
        cloud_fleet.limit(zone=zone)
    nodes = cloud_fleet.order(2)
    cloud_fleet.provision_for(60, step_s=20)

    assert cloud_fleet.world.count("RunInstances") == 2
    reason = Node.objects.get(id=nodes[0]).reason
    assert reason.startswith(
        f"it waits for its machine: no pool of {TRN1} may be used now; on_demand in us-east-1a: it is paused"
    )
    cloud_fleet.limit(zone="us-east-1b", left=2)
    cloud_fleet.provision_for(240, step_s=60)
    assert len(cloud_fleet.live()) == 2


@pytest.mark.parametrize(
    "fault",
    [
        Fault("RunInstances", when=When.AFTER, ending=Ending.RESET),
        Fault("RunInstances", when=When.AFTER, ending=Ending.CUT),
        Fault("RunInstances", "InternalError", When.AFTER),
    ],
    ids=["reset", "cut", "500"],
)
def test_an_answer_that_is_lost_is_asked_for_again_by_the_same_attempt(cloud_fleet: CloudFleet, fault: Fault) -> None:
    cloud_fleet.world.faults.append(fault)
    nodes = cloud_fleet.order(2)
    cloud_fleet.provision()
    assert LaunchAttempt.objects.get().ended_at is None
    assert len(cloud_fleet.live()) == 2
    cloud_fleet.provision_for(20)

    assert cloud_fleet.outcomes() == ["launched"]
    assert [cloud_fleet.machine(node).provider_id for node in nodes] == cloud_fleet.live()


def test_a_throttled_launch_is_repeated_and_the_budget_is_halved(cloud_fleet: CloudFleet) -> None:
    cloud_fleet.world.faults.append(Fault("RunInstances", "RequestLimitExceeded"))
    cloud_fleet.order(2)
    cloud_fleet.provision()
    bucket = CallBucket.objects.get(call="RunInstances")
    assert (bucket.tokens, bucket.halved_until is not None) == (0.0, True)
    cloud_fleet.provision_for(30)

    assert cloud_fleet.outcomes() == ["launched"]


def test_a_quota_rests_all_pools_of_the_family_for_an_hour(cloud_fleet: CloudFleet) -> None:
    cloud_fleet.world.quotas = {"Running On-Demand Trn instances": 128}
    cloud_fleet.order(2)
    cloud_fleet.provision_for(60)

    assert cloud_fleet.outcomes() == ["no_quota"]
    assert all(pool.paused_until is not None for pool in CapacityPool.objects.all())


def test_a_refusal_ends_the_order_and_no_other_pool_is_asked(cloud_fleet: CloudFleet) -> None:
    cloud_fleet.world.faults.append(Fault("RunInstances", "UnauthorizedOperation"))
    nodes = cloud_fleet.order(2)
    cloud_fleet.provision_for(20)

    assert cloud_fleet.outcomes() == ["refused"]
    assert set(Node.objects.filter(id__in=nodes).values_list("state", flat=True)) == {"lost"}


def test_a_pool_that_refused_rests_and_what_is_ordered_in_its_place_is_asked_for_elsewhere(
    cloud_fleet: CloudFleet,
) -> None:
    cloud_fleet.world.faults.append(Fault("RunInstances", "UnauthorizedOperation", times=2))
    for _ in range(2):
        cloud_fleet.order(2)
        cloud_fleet.provision_for(10)
    nodes = cloud_fleet.order(2)
    cloud_fleet.provision_for(10)

    assert cloud_fleet.outcomes() == ["refused", "refused"], "the third waits until a pool is rested"
    assert {pool.pause_reason[:21] for pool in CapacityPool.objects.all()} == {"UnauthorizedOperation"}
    assert ": UnauthorizedOperation" in Node.objects.get(id=nodes[0]).reason
    cloud_fleet.provision_for(240, step_s=60)
    assert cloud_fleet.outcomes() == ["refused", "refused", "launched"]
    assert CapacityPool.objects.filter(failures=0, paused_until=None).count() == 1


def test_a_pool_that_ec2_could_not_be_asked_about_rests_as_well(cloud_fleet: CloudFleet) -> None:
    CapacityPool.objects.filter(zone="us-east-1a").update(market="reserved")  # of no reservation
    for _ in range(2):
        cloud_fleet.order(2)
        cloud_fleet.provision_for(10)

    assert cloud_fleet.outcomes() == ["launched"]
    assert CapacityPool.objects.get(zone="us-east-1a").failures == 1
    assert cloud_fleet.zones() == {"us-east-1b"}


@pytest.mark.parametrize("code", ["InsufficientInstanceCapacity", "VcpuLimitExceeded", "UnauthorizedOperation"])
def test_what_a_repeated_call_is_told_before_its_token_is_looked_up_proves_nothing(
    cloud_fleet: CloudFleet, code: str
) -> None:
    cloud_fleet.world.faults += [Fault("RunInstances", "InternalError", When.AFTER), Fault("RunInstances", code)]
    nodes = cloud_fleet.order(2)
    cloud_fleet.provision_for(60)

    assert cloud_fleet.world.count("RunInstances") == 2
    assert cloud_fleet.outcomes() == ["launched"]
    assert [cloud_fleet.machine(node).provider_id for node in nodes] == cloud_fleet.live()


def test_what_a_repeated_call_is_told_stands_once_lists_show_nothing(cloud_fleet: CloudFleet) -> None:
    faults = [Fault("RunInstances", "InternalError"), Fault("RunInstances", "InsufficientInstanceCapacity")]
    cloud_fleet.world.faults += faults
    cloud_fleet.order(2)
    cloud_fleet.provision_for(900, step_s=30)

    assert cloud_fleet.outcomes() == ["no_capacity", "launched"]
    first = CapacityPool.objects.get(zone="us-east-1a")
    assert first.pause_reason.startswith("attempt 1 in on_demand in us-east-1a found no capacity when it was repeated")
    assert cloud_fleet.zones() == {"us-east-1b"}


def test_a_member_that_was_given_back_while_the_answer_was_lost_is_launched_once_more_and_ended(
    cloud_fleet: CloudFleet,
) -> None:
    cloud_fleet.world.faults.append(Fault("RunInstances", "InternalError", When.AFTER))
    nodes = cloud_fleet.order(2)
    cloud_fleet.provision()
    cloud_fleet.give_back(nodes[1])
    cloud_fleet.provision_for(60)

    assert cloud_fleet.outcomes() == ["launched"]
    assert cloud_fleet.live() == [cloud_fleet.machine(nodes[0]).provider_id]
    assert Node.objects.get(id=nodes[1]).terminated_at is not None


def test_a_unit_that_was_given_back_while_the_answer_was_lost_is_found_by_its_tags_and_ended(
    cloud_fleet: CloudFleet,
) -> None:
    cloud_fleet.world.faults.append(Fault("RunInstances", "InternalError", When.AFTER))
    cloud_fleet.world.delays.visible_s = 90.0
    nodes = cloud_fleet.order(2)
    cloud_fleet.provision()
    cloud_fleet.give_back(*nodes)
    cloud_fleet.provision_for(360, step_s=30)

    assert cloud_fleet.world.count("RunInstances") == 1
    assert not cloud_fleet.live()
    assert not cloud_fleet.waiting()


def test_what_is_given_back_before_it_was_called_for_is_never_launched(cloud_fleet: CloudFleet) -> None:
    nodes = cloud_fleet.order(2)
    cloud_fleet.give_back(*nodes)
    cloud_fleet.provision()

    assert not cloud_fleet.world.count("RunInstances")
    assert not cloud_fleet.waiting()


def test_a_machine_is_ended_and_an_end_that_finds_none_yet_is_tried_again(cloud_fleet: CloudFleet) -> None:
    cloud_fleet.world.delays.visible_s = 45.0
    [node] = cloud_fleet.order(1)
    cloud_fleet.provision()
    machine = cloud_fleet.machine(node).pk
    cloud_fleet.give_back(node)
    cloud_fleet.provision()
    assert cloud_fleet.live(), "a young machine that is not found is none that is gone"
    cloud_fleet.provision_for(120)

    assert not cloud_fleet.live()
    row = Machine.objects.get(pk=machine)
    assert (row.state, row.cloud_state) == (MachineState.GONE, "shutting-down")


def test_a_machine_is_rebooted_and_one_that_has_ended_is_not(cloud_fleet: CloudFleet) -> None:
    [node] = cloud_fleet.order(1)
    cloud_fleet.provision()
    provider, name = provider_named("aws"), cloud_fleet.machine(node).provider_id
    with pytest.raises(ProviderError, match=f"{name} cannot be rebooted: IncorrectState"):
        provider.reboot(node)
    cloud_fleet.provision_for(60)
    provider.reboot(node)
    assert [machine.reboots for machine in cloud_fleet.world.machines] == [1]
    cloud_fleet.world.faults.append(Fault("RebootInstances", "InternalError"))
    with pytest.raises(Unknown, match=f"whether {name} was rebooted is not known"):
        provider.reboot(node)
    provider.terminate(node)
    with pytest.raises(ProviderError, match=f"{node} has no machine to reboot"):
        provider.reboot(node)


def test_the_caps_of_a_region_hold_whatever_is_ordered(cloud_fleet: CloudFleet) -> None:
    CloudRegion.objects.update(machines_cap=3)
    cloud_fleet.order(2)
    cloud_fleet.order(2)
    cloud_fleet.provision_for(60)
    assert len(cloud_fleet.live()) == 2
    assert "would exceed the cap of 3" in Node.objects.exclude(provider_call=None).first().reason  # type: ignore[union-attr]
    cloud_fleet.world.clock.advance(3600)
    cloud_fleet.provision_for(120, step_s=60)
    assert len(cloud_fleet.live()) == 4


def test_nothing_is_changed_while_the_install_is_read_only(cloud_fleet: CloudFleet) -> None:
    [first] = cloud_fleet.order(1)
    cloud_fleet.provision()
    Install.objects.update(read_only="another control plane holds it")
    cloud_fleet.order(1)
    cloud_fleet.give_back(first)
    cloud_fleet.provision_for(60)

    assert len(cloud_fleet.live()) == 1
    assert cloud_fleet.waiting() == 2


def test_a_machine_is_described_without_a_call_while_it_was_seen_just_now(cloud_fleet: CloudFleet) -> None:
    nodes = cloud_fleet.order(2)
    cloud_fleet.provision()
    aws, world = provider_named("aws"), cloud_fleet.world
    assert set(aws.describe(nodes).values()) == {ProviderStatus.RUNNING}
    assert not world.count("DescribeInstances")
    machine = world.machines.get(cloud_fleet.live()[0])
    assert machine is not None
    world.machines.end(machine, "Server.SpotInstanceTermination", "reclaimed")
    world.clock.advance(21)

    assert set(aws.describe(nodes).values()) == {ProviderStatus.RUNNING, ProviderStatus.GONE}
    assert world.count("DescribeInstances") == 1
    world.faults.append(Fault("DescribeInstances", "InternalError", times=4))
    world.clock.advance(21)
    assert set(aws.describe(nodes).values()) == {ProviderStatus.RUNNING, ProviderStatus.GONE}
    assert aws.describe(["n-nobody"]) == {"n-nobody": ProviderStatus.UNKNOWN}
