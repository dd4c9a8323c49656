"""Ingresses of a region that is an ECS cluster: a task in each zone that the stack names."""

import pytest

from fleet.clouds.models import CloudRegion
from fleet.machines.models import Machine
from kernel import clock
from lab.cloud.ecs import register_instances
from tests.fleet.clouds.ecs.cluster_fleet import CLUSTER, ClusterFleet
from tests.lab.cloud.conftest import make_network
from traffic.routing.models import Ingress
from traffic.routing.services.ingresses import cloud_ingresses_ensure

pytestmark = pytest.mark.cloud

ZONES = ("us-east-1a", "us-east-1b")


def pass_by(fleet: ClusterFleet) -> None:
    fleet.world.clock.advance(11)
    cloud_ingresses_ensure(now=clock.now())


def test_each_zone_gets_a_task_and_one_that_stopped_is_replaced(cluster_fleet: ClusterFleet) -> None:
    network = make_network(cluster_fleet.world)
    machines = [network.launch(1, zone=zone, InstanceType="c7i.2xlarge")[0] for zone in ZONES]
    cluster_fleet.world.clock.advance(60)
    register_instances(cluster_fleet.world, CLUSTER, machines)
    pass_by(cluster_fleet)
    assert not Ingress.objects.exists(), "the stack names no zones for ingresses"

    cloud = CloudRegion.objects.get()
    cloud.base["zones"] = {zone: {"subnet": "", "zone_id": zone} for zone in ZONES}
    cloud.save()
    for _ in range(3):
        pass_by(cluster_fleet)
    placed = {row.runs: row.zone for row in Machine.objects.filter(role="ingress")}
    assert placed == dict(Ingress.objects.values_list("id", "zone"))
    assert sorted(placed.values()) == list(ZONES)
    assert "" not in set(Ingress.objects.values_list("address", flat=True))
    definitions = {task.definition for task in cluster_fleet.tasks()}
    assert len(definitions) == 1
    assert "-ingress-c7i-2xlarge:" in definitions.pop()

    stopped = cluster_fleet.tasks()[0]
    cluster_fleet.ecs.stop_task(cluster=CLUSTER, task=stopped.arn)
    for _ in range(8):
        pass_by(cluster_fleet)
    alive = set(Machine.objects.filter(runs__in=Ingress.objects.values("id")).values_list("provider_id", flat=True))
    assert stopped.arn.rpartition("/")[2] not in alive
    assert len(cluster_fleet.tasks()) == 2
