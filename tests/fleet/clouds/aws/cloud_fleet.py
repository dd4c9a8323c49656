"""A region in the test cloud: its stack, two pools of Trainium, and orders through the fleet's services. Time is the
cloud's."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec

from fleet.capacity.planning.pools import ANY, Market, Markets
from fleet.clouds.models import CapacityPool, CloudRegion, LaunchAttempt
from fleet.clouds.planning.upkeep import CloudBase, ZoneBase
from fleet.machines.models import Machine, ProviderCall
from fleet.machines.services.orders import calls_claim
from fleet.machines.services.provisioning import call_carry_out
from fleet.nodes.models import Node
from fleet.nodes.services.nodes import node_retire, nodes_launch
from fleet.reconcile.planning.decisions import LaunchNodes, RetireNode
from fleet.reconcile.planning.states import CloudRegionState, NodeState
from fleet.regions.models import Region
from kernel import clock
from lab.cloud.machines import Market as Sold
from lab.cloud.server import World
from models_registry.instance_types.models import InstanceType
from tests.lab.cloud.conftest import IMAGE, make_network

TRN1 = "trn1.32xlarge"
REGION = "us-east-1"
ZONES = {"us-east-1a": "use1-az1", "us-east-1b": "use1-az2"}
MANY = 1000


@dataclass
class CloudFleet:
    world: World
    kind: str = TRN1

    def order(self, count: int = 2, unit: int = 0, markets: Markets = ANY) -> list[str]:
        """Orders nodes that are launched together. Returns their IDs, in order."""
        there = Node.objects.exclude(state=NodeState.RETIRED).count()
        decision = LaunchNodes(REGION, self.kind, count, "needed", there=there, unit=unit or count, markets=markets)
        known = set(Node.objects.values_list("id", flat=True))
        nodes_launch(decision, now=clock.now())
        return sorted(set(Node.objects.values_list("id", flat=True)) - known)

    def give_back(self, *nodes: str) -> None:
        for node in Node.objects.filter(id__in=nodes):
            node_retire(RetireNode(node.id, NodeState(node.state), "not needed"), now=clock.now())

    def provision(self) -> None:
        for calls in calls_claim(free={}, otherwise=MANY, now=clock.now()):
            call_carry_out(calls)

    def provision_for(self, seconds: float, step_s: float = 10.0) -> None:
        """Runs provisioning while time passes."""
        for _ in range(int(seconds / step_s)):
            self.provision()
            self.world.clock.advance(step_s)
        self.provision()

    def limit(self, *, zone: str = "us-east-1a", left: int = 0) -> None:
        """Sets how many on-demand machines a zone has left."""
        self.world.machines.capacity.free[self.kind, zone, Sold.ON_DEMAND] = left

    def live(self) -> list[str]:
        """Machines that are billed, in order of launch."""
        return [machine.id for machine in self.world.machines.live()]

    def zones(self) -> set[str]:
        return {machine.zone for machine in self.world.machines.live()}

    def outcomes(self) -> list[str]:
        return list(LaunchAttempt.objects.order_by("begun_at", "number").values_list("outcome", flat=True))

    def machine(self, node: str) -> Machine:
        return Machine.objects.get(runs=node)

    def waiting(self) -> int:
        return ProviderCall.objects.count()


def make_fleet(world: World, kind: str = TRN1) -> CloudFleet:
    """With an on-demand pool in each zone, in order."""
    network = make_network(world)
    profile = world.client("iam").create_instance_profile(InstanceProfileName="node")["InstanceProfile"]["Arn"]
    region = Region.objects.create(name=REGION, provider="aws")
    InstanceType.objects.create(name=kind, accelerator="trainium", chips=16, price_per_hour=21.5)
    base = CloudBase(
        account=world.account,
        zones={zone: ZoneBase(network.subnets[zone], ZONES[zone]) for zone in ZONES},
        node_group=network.group,
        node_profile=profile,
        node_role="node",
    )
    CloudRegion.objects.create(
        region=region,
        aws_region=REGION,
        stack="switchyard",
        state=CloudRegionState.READY,
        base=msgspec.to_builtins(base),
    )
    for position, zone in enumerate(ZONES, 1):
        make_pool(position, zone, network.subnets[zone], instance_type_id=kind)
    return CloudFleet(world, kind)


def make_pool(position: int, zone: str, subnet: str, **columns: Any) -> CapacityPool:
    defaults = {"market": Market.ON_DEMAND, "zone_id": ZONES[zone], "image": IMAGE, "instance_type_id": TRN1}
    return CapacityPool.objects.create(
        region_id=REGION,
        position=position,
        zone=zone,
        subnet=subnet,
        **{**defaults, **columns},
    )


def moment(world: World) -> datetime:
    return datetime.fromtimestamp(world.clock.now(), UTC)


def tags_of(instance: Any) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for tag in instance.get("Tags", ())}


def described(world: World, ids: Sequence[str]) -> list[Any]:
    found = world.client("ec2").describe_instances(InstanceIds=list(ids))["Reservations"]
    return [instance for one in found for instance in one["Instances"]]
