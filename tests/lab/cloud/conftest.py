"""A cloud whose clock stands still, and a network in it. Every worker loads this file, so moto and boto3 are imported
where they are used: they take 1.5 CPU seconds and 0.2 GB.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from lab.cloud.server import World

BEGAN = 1_800_000_000.0
IMAGE = "ami-12c6146b"


def refusal(call: Any, **params: Any) -> str:
    """Code of the error that a call gets; empty: none."""
    from botocore.exceptions import ClientError

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
    vpc: str

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
        return {
            "ImageId": IMAGE, "InstanceType": "trn1.32xlarge", "MinCount": count, "MaxCount": count,
            "NetworkInterfaces": self.interfaces(cards, zone), **params,
        }  # fmt: skip

    def launch(self, count: int = 1, **params: Any) -> list[str]:
        return ids_of(self.ec2.run_instances(**self.request(count, **params)))

    def states(self, **params: Any) -> dict[str, str]:
        """Id -> state of all that are described."""
        found = self.ec2.describe_instances(**params)["Reservations"]
        return {each["InstanceId"]: each["State"]["Name"] for one in found for each in one["Instances"]}


@pytest.fixture
def world() -> "Iterator[World]":
    """A separate account. No handler may have failed at the end."""
    from lab.cloud.server import World, serve
    from lab.cloud.world import Clock

    world = World(Clock(BEGAN))
    with serve(world):
        yield world
    assert world.bugs == []


@pytest.fixture
def network(world: "World") -> Network:
    """With a client of EC2 in us-east-1."""
    return make_network(world)


def make_network(world: "World") -> Network:
    """10.0.0.0/16, a security group, and a subnet in two zones: made in moto itself, which is quicker than by calls."""
    moto = world.backend("ec2", "us-east-1")
    vpc = moto.create_vpc("10.0.0.0/16").id
    subnets = {
        zone: moto.create_subnet(vpc, cidr, availability_zone=zone).id
        for zone, cidr in (("us-east-1a", "10.0.0.0/20"), ("us-east-1b", "10.0.16.0/20"))
    }
    group = moto.create_security_group("nodes", "Nodes", vpc_id=vpc).id
    return Network(world.client("ec2"), subnets, group, vpc)


def make_target_group(world: "World", network: Network) -> tuple[Any, str]:
    """A client of load balancers, and the ARN of a group behind one: checked every 5 s, healthy after two checks."""
    client = world.client("elbv2")
    nth = str(world.count("CreateLoadBalancer"))
    group = client.create_target_group(
        Name=f"entry-{nth}", Protocol="TCP", Port=443, VpcId=network.vpc, TargetType="ip", HealthCheckProtocol="HTTP",
        HealthCheckPath="/healthz", HealthCheckIntervalSeconds=5, HealthCheckTimeoutSeconds=5, HealthyThresholdCount=2,
    )["TargetGroups"][0]["TargetGroupArn"]  # fmt: skip
    balancer = client.create_load_balancer(
        Name=f"entry-{nth}", Type="network", Subnets=list(network.subnets.values()), Scheme="internal"
    )["LoadBalancers"][0]["LoadBalancerArn"]
    forward = [{"Type": "forward", "TargetGroupArn": group}]
    client.create_listener(LoadBalancerArn=balancer, Protocol="TCP", Port=443, DefaultActions=forward)
    return client, group


def target_states(client: Any, group: str, **params: Any) -> dict[str, str]:
    """Address -> state."""
    found = client.describe_target_health(TargetGroupArn=group, **params)["TargetHealthDescriptions"]
    return {each["Target"]["Id"]: each["TargetHealth"]["State"] for each in found}


@dataclass
class Zone:
    """A hosted zone: inference.example."""

    route53: Any
    id: str

    def change_checked(self, changes: list[dict[str, Any]]) -> str:
        made = self.route53.change_resource_record_sets(HostedZoneId=self.id, ChangeBatch={"Changes": changes})
        return str(made["ChangeInfo"]["Id"])

    def change(self, *changes: dict[str, Any]) -> str:
        return self.change_checked(list(changes))

    def sets(self) -> list[dict[str, Any]]:
        """All but those that each zone has."""
        found = self.route53.list_resource_record_sets(HostedZoneId=self.id)["ResourceRecordSets"]
        return [each for each in found if each["Type"] not in ("NS", "SOA")]

    def weights(self) -> dict[str, int]:
        """Set identifier -> weight."""
        return {each["SetIdentifier"]: each["Weight"] for each in self.sets() if "Weight" in each}


def make_zone(world: "World") -> Zone:
    route53 = world.client("route53")
    created = route53.create_hosted_zone(
        Name="inference.example.", CallerReference=str(world.count("CreateHostedZone"))
    )
    return Zone(route53, created["HostedZone"]["Id"])


def record(action: str, region: str, weight: int, address: str = "192.0.2.1") -> dict[str, Any]:
    """A change of a region's weighted record."""
    return {
        "Action": action,
        "ResourceRecordSet": {
            "Name": "llm.inference.example", "Type": "A", "SetIdentifier": region, "Weight": weight, "TTL": 10,
            "ResourceRecords": [{"Value": address}],
        },
    }  # fmt: skip


def text(action: str, revision: int) -> dict[str, Any]:
    """A change of the TXT that holds a revision."""
    return {
        "Action": action,
        "ResourceRecordSet": {
            "Name": "_switchyard.llm.inference.example", "Type": "TXT", "TTL": 10,
            "ResourceRecords": [{"Value": f'"rev={revision}"'}],
        },
    }  # fmt: skip
