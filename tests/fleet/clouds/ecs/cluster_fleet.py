"""A region that is an ECS cluster in the test cloud, with four container instances, and orders through the fleet's
services."""

from dataclasses import dataclass, field
from typing import Any

import msgspec

from fleet.clouds.models import CloudRegion
from fleet.clouds.planning.upkeep import CloudBase, ClusterBase
from fleet.reconcile.planning.states import CloudRegionState
from fleet.regions.models import Region
from lab.cloud.ecs import Task, register_instances
from lab.cloud.server import World
from models_registry.instance_types.services import instance_type_ensure
from tests.fleet.clouds.aws.cloud_fleet import REGION, TRN1, CloudFleet
from tests.lab.cloud.conftest import make_network

CLUSTER = "switchyard"
REGISTRY = "123456789012.dkr.ecr.us-east-1.amazonaws.com"


@dataclass
class ClusterFleet(CloudFleet):
    """`machines`: EC2 instances in order of launch, `instances`: their container instances."""

    machines: list[str] = field(default_factory=list)
    instances: list[str] = field(default_factory=list)

    @property
    def ecs(self) -> Any:
        return self.world.client("ecs")

    def tasks(self) -> list[Task]:
        """Tasks that run or start."""
        return [task for task in self.world.tasks.values() if task.stops is None]

    def instance(self, index: int) -> Any:
        """moto's container instance."""
        rows = self.world.backend("ecs", REGION).container_instances[CLUSTER]
        return rows[self.instances[index].rpartition("/")[2]]


def make_cluster_fleet(world: World, count: int = 4) -> ClusterFleet:
    network = make_network(world)
    world.client("ecs").create_cluster(clusterName=CLUSTER)
    machines = [network.launch(1)[0] for _ in range(count)]
    world.clock.advance(60)
    instances = register_instances(world, CLUSTER, machines)
    region = Region.objects.create(name=REGION, provider="ecs")
    instance_type_ensure(TRN1)
    base = CloudBase(
        account=world.account,
        zones={},
        node_group="",
        node_profile="",
        node_role="node-task",
        ingress_role="ingress-task",
        cluster=ClusterBase(
            name=CLUSTER,
            task_role=f"arn:aws:iam::{world.account}:role/node-task",
            ingress_role=f"arn:aws:iam::{world.account}:role/ingress-task",
            execution_role=f"arn:aws:iam::{world.account}:role/execution",
            image=f"{REGISTRY}/node-agent:1.0",
            ingress_image=f"{REGISTRY}/ingress:1.0",
            log_group="/switchyard/nodes",
        ),
    )
    CloudRegion.objects.create(
        region=region,
        aws_region=REGION,
        stack="switchyard-ecs",
        state=CloudRegionState.READY,
        base=msgspec.to_builtins(base),
    )
    return ClusterFleet(world, TRN1, machines, instances)
