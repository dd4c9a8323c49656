"""RunInstances of the cloud of tests: all or none, once per token, in its places, within what there is."""

from typing import Any

import pytest

from lab.cloud.machines import Market
from lab.cloud.server import World
from tests.lab.cloud.conftest import Network, ids_of, refusal

pytestmark = pytest.mark.cloud

TRN1 = "trn1.32xlarge"
SPOT = {"MarketType": "spot"}


def test_two_machines_or_none(world: World, network: Network) -> None:
    world.machines.capacity.free = {
        (TRN1, "us-east-1a", Market.ON_DEMAND): 1,
        (TRN1, "us-east-1b", Market.ON_DEMAND): 2,
    }

    assert refusal(network.ec2.run_instances, **network.request(2)) == "InsufficientInstanceCapacity"
    assert network.states() == {}
    assert len(network.launch(2, zone="us-east-1b")) == 2
    assert refusal(network.ec2.run_instances, **network.request(1, zone="us-east-1b")) == "InsufficientInstanceCapacity"
    assert len(network.launch(1, zone="us-east-1b", InstanceMarketOptions=SPOT)) == 1


def test_as_many_as_there_are_from_the_least_to_the_most(world: World, network: Network) -> None:
    world.machines.capacity.free[TRN1, "us-east-1a", Market.ON_DEMAND] = 3

    assert len(network.launch(MinCount=2, MaxCount=5)) == 3


def test_a_machine_that_ended_leaves_its_place_and_its_address(world: World, network: Network) -> None:
    world.machines.capacity.free[TRN1, "us-east-1a", Market.ON_DEMAND] = 1
    [first] = network.launch()
    address = world.machines.get(first).moto.private_ip_address  # type: ignore[union-attr]
    network.ec2.terminate_instances(InstanceIds=[first])

    assert refusal(network.ec2.run_instances, **network.request()) == "InsufficientInstanceCapacity"
    world.clock.advance(world.delays.shutting_down_s)
    answer = network.ec2.run_instances(**network.request())
    assert answer["Instances"][0]["PrivateIpAddress"] == address


def test_the_same_token_launches_once(world: World, network: Network) -> None:
    request = network.request(2, ClientToken="t" * 64)
    first = network.ec2.run_instances(**request)

    assert ids_of(network.ec2.run_instances(**request)) == ids_of(first)
    assert [each["AmiLaunchIndex"] for each in first["Instances"]] == [0, 1]
    changed = {**request, "InstanceType": "trn1n.32xlarge"}
    assert refusal(network.ec2.run_instances, **changed) == "IdempotentParameterMismatch"
    elsewhere = network.request(2, zone="us-east-1b", ClientToken="t" * 64)
    assert not set(ids_of(network.ec2.run_instances(**elsewhere))) & set(ids_of(first))


def test_a_token_whose_machines_ended_is_spent(network: Network) -> None:
    request = network.request(1, ClientToken="one")
    network.ec2.terminate_instances(InstanceIds=ids_of(network.ec2.run_instances(**request)))

    assert refusal(network.ec2.run_instances, **request) == "IdempotentInstanceTerminated"


def test_each_interface_has_its_card_its_kind_and_its_tags(network: Network) -> None:
    tags = [{"Key": "switchyard:unit", "Value": "u-1"}]
    kinds = ("instance", "volume", "network-interface")
    specified = [{"ResourceType": kind, "Tags": tags} for kind in kinds]
    network.launch(2, cards=8, TagSpecifications=specified)

    found = network.ec2.describe_instances()["Reservations"][0]["Instances"]
    for each in found:
        places = [(n["Attachment"]["NetworkCardIndex"], n["InterfaceType"]) for n in each["NetworkInterfaces"]]
        assert places == [(0, "interface"), *((card, "efa-only") for card in range(1, 8))]
        assert [n.get("PrivateIpAddress") for n in each["NetworkInterfaces"]] == [each["PrivateIpAddress"], *[None] * 7]
    interfaces = network.ec2.describe_network_interfaces()["NetworkInterfaces"]
    assert len(interfaces) == 16
    assert all(each["TagSet"] == tags for each in interfaces)


def test_all_machines_of_a_launch_have_the_profile(world: World, network: Network) -> None:
    iam = world.client("iam")
    iam.create_instance_profile(InstanceProfileName="node")

    network.launch(2, IamInstanceProfile={"Name": "node"})

    found = network.ec2.describe_iam_instance_profile_associations()["IamInstanceProfileAssociations"]
    assert len({each["InstanceId"] for each in found}) == 2


@pytest.mark.parametrize(
    ("params", "code"),
    [
        ({"UserData": "x" * 16385}, "InvalidParameterValue"),
        ({"ClientToken": "t" * 65}, "InvalidParameterValue"),
        ({"MinCount": 2, "MaxCount": 1}, "InvalidParameterValue"),
        ({"Placement": {"GroupName": "nobody's"}}, "InvalidPlacementGroup.Unknown"),
        ({"InstanceType": "inf2.xlarge", "cards": 2}, "InvalidParameterCombination"),
        ({"cards": 9}, "InvalidParameterValue"),
        ({"InstanceMarketOptions": {"MarketType": "capacity-block"}}, "InvalidParameterCombination"),
        (
            {"TagSpecifications": [{"ResourceType": "spot-instances-request", "Tags": [{"Key": "a", "Value": "b"}]}]},
            "InvalidParameterCombination",
        ),
        ({"DryRun": True}, "DryRunOperation"),
    ],
)
def test_what_ec2_refuses_is_refused(network: Network, params: dict[str, Any], code: str) -> None:
    assert refusal(network.ec2.run_instances, **network.request(**params)) == code
    assert network.states() == {}


def test_several_interfaces_have_no_public_address(network: Network) -> None:
    request = network.request(cards=2)
    request["NetworkInterfaces"][0]["AssociatePublicIpAddress"] = True

    assert refusal(network.ec2.run_instances, **request) == "InvalidParameterCombination"


def test_a_full_subnet_refuses_all(world: World, network: Network) -> None:
    vpc = network.ec2.describe_vpcs(Filters=[{"Name": "cidr", "Values": ["10.0.0.0/16"]}])["Vpcs"][0]["VpcId"]
    small = network.ec2.create_subnet(VpcId=vpc, CidrBlock="10.0.96.0/28", AvailabilityZone="us-east-1a")
    network.subnets["us-east-1a"] = small["Subnet"]["SubnetId"]

    network.launch(10, cards=2)
    assert refusal(network.ec2.run_instances, **network.request(2)) == "InsufficientFreeAddressesInSubnet"


def test_quotas_count_the_vcpus_of_a_family_and_a_market(world: World, network: Network) -> None:
    world.quotas = {"Running On-Demand Trn instances": 256, "All Trn Spot Instance Requests": 128}

    network.launch(2)
    network.launch(1, InstanceMarketOptions=SPOT)
    network.launch(1, InstanceType="p5.48xlarge")

    assert refusal(network.ec2.run_instances, **network.request()) == "VcpuLimitExceeded"
    spot = network.request(InstanceMarketOptions=SPOT)
    assert refusal(network.ec2.run_instances, **spot) == "MaxSpotInstanceCountExceeded"


def test_placement_groups_are_there_until_they_are_deleted_and_not_while_they_are_used(network: Network) -> None:
    group = network.ec2.create_placement_group(GroupName="sw", Strategy="cluster")["PlacementGroup"]
    ids = network.launch(1, Placement={"GroupName": "sw"})

    described = network.ec2.describe_instances(InstanceIds=ids)["Reservations"][0]["Instances"][0]
    assert described["Placement"]["GroupName"] == "sw"
    assert network.ec2.describe_placement_groups(GroupNames=["sw"])["PlacementGroups"] == [group]
    assert refusal(network.ec2.create_placement_group, GroupName="sw") == "InvalidPlacementGroup.Duplicate"
    assert refusal(network.ec2.delete_placement_group, GroupName="sw") == "InvalidPlacementGroup.InUse"


def test_a_group_that_nobody_is_in_goes(world: World, network: Network) -> None:
    network.ec2.create_placement_group(GroupName="sw")
    network.ec2.delete_placement_group(GroupName="sw")

    assert refusal(network.ec2.describe_placement_groups, GroupNames=["sw"]) == "InvalidPlacementGroup.Unknown"
