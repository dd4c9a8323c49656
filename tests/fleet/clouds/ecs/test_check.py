"""`manage.py aws_check` for a region that is an ECS cluster."""

import pytest

from fleet.clouds.aws.actions import CALLS, Role
from fleet.clouds.aws.check import Finding, Verdict
from fleet.clouds.aws.identity import install_ensure
from fleet.clouds.ecs.check import cluster_check
from fleet.clouds.models import CloudRegion
from kernel import clock
from lab.cloud.ecs import register_instances
from lab.cloud.stack import deploy, deploy_base
from lab.cloud.world import Fault
from tests.fleet.clouds.aws.cloud_fleet import REGION
from tests.fleet.clouds.ecs.cluster_fleet import ClusterFleet

pytestmark = pytest.mark.cloud


@pytest.fixture
def cloud(cluster_fleet: ClusterFleet) -> CloudRegion:
    """With a stack, whose cluster has one container instance."""
    world, install = cluster_fleet.world, install_ensure(clock.now()).id
    base = deploy_base(world, install)
    given = {
        "Install": install,
        "ArtifactBucket": base["ArtifactBucket"],
        "NodeImage": "r/node:1",
        "IngressImage": "r/i:1",
    }
    outputs = deploy(world, REGION, "switchyard-ecs", "ecs.yaml", given)
    register_instances(world, outputs["Cluster"], cluster_fleet.machines[:1])
    row = CloudRegion.objects.get()
    row.base = {}
    row.save()
    return row


def findings(cloud: CloudRegion) -> dict[str, Finding]:
    install = install_ensure(clock.now()).id
    return {found.what: found for found in cluster_check(cloud, install, clock.now(), wait=lambda _: None)}


def test_what_is_allowed_denied_and_missing(cluster_fleet: ClusterFleet, cloud: CloudRegion) -> None:
    found = findings(cloud)
    unsure = {name for name, one in found.items() if one.verdict is not Verdict.ALLOWED}
    assert unsure == {"ecs RegisterTaskDefinition"}, found
    assert found["ecs StopTask"].text == "by a call about nothing"
    of_cluster = {f"ecs {name}" for role, service, name in CALLS if role is Role.CLUSTER and service == "ecs"}
    assert {name for name in found if name.startswith("ecs ")} == of_cluster
    assert {"cloudwatch DescribeAlarms", "cloudwatch GetMetricData"} <= set(found)
    assert found["container instances of trn1.32xlarge"].text == "1, of which 1 are active with a connected ECS agent"
    assert cluster_fleet.tasks() == []

    cluster_fleet.world.faults += [Fault("StartTask", "AccessDeniedException"), Fault("ListTasks", "ServerException")]
    found = findings(cloud)
    assert found["ecs StartTask"].verdict is Verdict.DENIED
    cloud.stack = "nothing"
    assert [one.verdict for one in findings(cloud).values()] == [Verdict.MISSING]
