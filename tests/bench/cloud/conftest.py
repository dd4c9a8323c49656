"""A cloud whose clock stands still, and a network in it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from botocore.exceptions import ClientError

from bench.cloud.clock import Clock
from bench.cloud.server import World, serve

BEGAN = 1_800_000_000.0
IMAGE = "ami-12c6146b"


def refusal(call: Any, **params: Any) -> str:
    """Code of the error that a call gets; empty: none."""
    try:
        call(**params)
    except ClientError as error:
        return str(error.response["Error"]["Code"])
    return ""


def ids_of(answer: Any) -> list[str]:
    """Machines in an answer of RunInstances or DescribeInstances, in order of launch."""
    instances = [each for one in answer.get("Reservations", [answer]) for each in one["Instances"]]
    return [each["InstanceId"] for each in instances]


@dataclass
class Network:
    """A subnet in each of two zones. `launch` asks for machines in the first one, where nothing else is said."""

    ec2: Any
    subnets: dict[str, str]
    group: str

    def interfaces(self, cards: int = 1, zone: str = "us-east-1a") -> list[dict[str, Any]]:
        """One of each card, as a Trainium machine has them."""
        return [
            {
                "NetworkCardIndex": card, "DeviceIndex": 0, "InterfaceType": "efa-only" if card else "interface",
                "SubnetId": self.subnets[zone], "Groups": [self.group], "DeleteOnTermination": True,
            }
            for card in range(cards)
        ]  # fmt: skip

    def request(self, count: int = 1, zone: str = "us-east-1a", cards: int = 1, **params: Any) -> dict[str, Any]:
        """Parameters of RunInstances."""
        return {
            "ImageId": IMAGE, "InstanceType": "trn1.32xlarge", "MinCount": count, "MaxCount": count,
            "NetworkInterfaces": self.interfaces(cards, zone), **params,
        }  # fmt: skip

    def launch(self, count: int = 1, **params: Any) -> list[str]:
        """Ids of new machines."""
        return ids_of(self.ec2.run_instances(**self.request(count, **params)))

    def states(self, **params: Any) -> dict[str, str]:
        """Id -> state of all that are described."""
        found = self.ec2.describe_instances(**params)["Reservations"]
        return {each["InstanceId"]: each["State"]["Name"] for one in found for each in one["Instances"]}


@pytest.fixture
def world() -> Iterator[World]:
    """An account of its own. Nothing in it may have failed at the end."""
    world = World(Clock(BEGAN))
    with serve(world):
        yield world
    assert world.bugs == []


@pytest.fixture
def network(world: World) -> Network:
    """With a client of EC2 in us-east-1."""
    return make_network(world)


def make_network(world: World) -> Network:
    """10.0.0.0/16, a security group, and a subnet in two zones."""
    ec2 = world.client("ec2")
    vpc = ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
    subnets = {
        zone: ec2.create_subnet(VpcId=vpc, CidrBlock=cidr, AvailabilityZone=zone)["Subnet"]["SubnetId"]
        for zone, cidr in (("us-east-1a", "10.0.0.0/20"), ("us-east-1b", "10.0.16.0/20"))
    }
    group = ec2.create_security_group(GroupName="nodes", Description="Nodes", VpcId=vpc)["GroupId"]
    return Network(ec2, subnets, group)
