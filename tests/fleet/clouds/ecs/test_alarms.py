"""Alarms about tasks of ECS: by task, by container instance, by service and by cluster."""

import pytest

from fleet.clouds.models import CloudRegion
from fleet.clouds.services.alarms import cloud_alarms
from fleet.faults.models import Incident, Signal
from fleet.machines.models import Machine
from fleet.nodes.models import Node
from fleet.regions.models import Region
from kernel import clock
from tests.fleet.clouds.ecs.cluster_fleet import CLUSTER, ClusterFleet

pytestmark = pytest.mark.cloud


def alarm(fleet: ClusterFleet, name: str, **dimensions: str) -> None:
    client = fleet.world.client("cloudwatch")
    client.put_metric_alarm(
        AlarmName=name, Namespace="ECS/ContainerInsights", MetricName="MemoryUtilized", Statistic="Maximum", Period=60,
        Threshold=1, EvaluationPeriods=1, ComparisonOperator="GreaterThanThreshold",
        Dimensions=[{"Name": key, "Value": value} for key, value in dimensions.items()],
    )  # fmt: skip
    client.set_alarm_state(AlarmName=name, StateValue="ALARM", StateReason="full")


def test_a_task_is_a_node_and_a_service_or_cluster_an_incident(cluster_fleet: ClusterFleet) -> None:
    nodes = cluster_fleet.order(2)
    for _ in range(3):
        cluster_fleet.provision()
        cluster_fleet.world.clock.advance(31)
    Node.objects.filter(id__in=nodes).update(state="ready")
    machines = {row.runs: row for row in Machine.objects.filter(runs__in=nodes)}
    assert set(machines) == set(nodes)
    Region.objects.update(alarms=[{"prefix": "t-", "replaces": True}])
    task = machines[nodes[0]].provider_id
    container = next(
        each.instance for each in cluster_fleet.tasks() if each.arn.endswith(machines[nodes[1]].provider_id)
    )
    alarm(cluster_fleet, "t-task", ClusterName=CLUSTER, TaskId=task)
    alarm(cluster_fleet, "t-host", ClusterName=CLUSTER, ContainerInstanceId=container.rpartition("/")[2])
    alarm(cluster_fleet, "t-service", ClusterName=CLUSTER, ServiceName="web")
    alarm(cluster_fleet, "t-cluster", ClusterName=CLUSTER)
    alarm(cluster_fleet, "t-other", ClusterName="other")

    cloud_alarms(CloudRegion.objects.get(), clock.now())

    assert {row.node_id: row.evidence["alarms"][0]["alarm"] for row in Signal.objects.all()} == {
        nodes[0]: "t-task",
        nodes[1]: "t-host",
    }
    assert sorted(CloudRegion.objects.get().alarmed.values()) == ["t-host", "t-task"]
    about = {row.evidence["alarm"]: row.evidence["about"] for row in Incident.objects.all()}
    assert about == {"t-service": "service web", "t-cluster": f"cluster {CLUSTER}"}
