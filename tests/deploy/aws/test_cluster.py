"""The stack of a cluster in the cloud of tests: what its policies allow against the table of our calls, and who may be
a task. Read by the control plane."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from fleet.clouds.aws.actions import Role, actions_of
from fleet.clouds.aws.region import StackRefused
from fleet.clouds.ecs.region import cluster_read
from tests.deploy.aws.conftest import INSTALL
from tests.deploy.aws.test_policies import as_list

if TYPE_CHECKING:
    from lab.cloud.server import World

pytestmark = pytest.mark.cloud

IMAGES = {"NodeImage": f"registry/node-agent@sha256:{'a' * 64}", "IngressImage": "registry/ingress:1.0"}

GROUP = "arn:aws:elasticloadbalancing:us-east-1:123456789012:targetgroup"
TARGETS = {"EntryTargets": f"{GROUP}/a/1", "GrpcTargets": f"{GROUP}/b/2", "PlainGrpcTargets": f"{GROUP}/c/3"}


@pytest.fixture(scope="module")
def cluster() -> "Iterator[tuple[World, dict[str, str]]]":
    from lab.cloud.server import World, serve
    from lab.cloud.stack import deploy, deploy_base

    world = World()
    with serve(world):
        base = deploy_base(world, INSTALL)
        given = {"Install": INSTALL, "ArtifactBucket": base["ArtifactBucket"], **IMAGES, **TARGETS}
        yield world, deploy(world, "us-east-1", "switchyard-ecs", "ecs.yaml", given)
    assert world.bugs == []


def statements_of(world: "World", name: str) -> dict[str, dict[str, Any]]:
    iam = world.client("iam")
    arn = f"arn:aws:iam::{world.account}:policy/{name}"
    version = iam.get_policy(PolicyArn=arn)["Policy"]["DefaultVersionId"]
    document = iam.get_policy_version(PolicyArn=arn, VersionId=version)["PolicyVersion"]["Document"]
    document = json.loads(document) if isinstance(document, str) else document
    return {each["Sid"]: each for each in document["Statement"]}


def test_the_control_plane_may_do_what_its_calls_to_the_cluster_need(cluster: "tuple[World, dict[str, str]]") -> None:
    world, outputs = cluster
    found = statements_of(world, f"{INSTALL}-control-cluster-us-east-1")

    assert {action for each in found.values() for action in as_list(each["Action"])} == actions_of(Role.CLUSTER)
    assert found["Tasks"]["Condition"]["ArnEquals"]["ecs:cluster"].endswith(f"cluster/{outputs['Cluster']}")
    given = found["GiveTasksTheirRole"]
    assert given["Condition"] == {"StringEquals": {"iam:PassedToService": "ecs-tasks.amazonaws.com"}}
    roles = sorted(outputs[name] for name in ("NodeTaskRole", "IngressTaskRole", "ExecutionRole"))
    assert sorted(given["Resource"]) == roles


@pytest.mark.parametrize("role", ["node-task", "ingress-task"])
def test_a_role_of_tasks_is_taken_by_ecs_alone(cluster: "tuple[World, dict[str, str]]", role: str) -> None:
    world, _ = cluster
    found = world.client("iam").get_role(RoleName=f"{INSTALL}-{role}-us-east-1")["Role"]["AssumeRolePolicyDocument"]
    [statement] = (json.loads(found) if isinstance(found, str) else found)["Statement"]
    assert statement["Principal"] == {"Service": "ecs-tasks.amazonaws.com"}
    assert statement["Condition"] == {"StringEquals": {"aws:SourceAccount": world.account}}


def test_the_stack_is_read_and_that_of_another_install_is_refused(cluster: "tuple[World, dict[str, str]]") -> None:
    from botocore import xform_name

    world, outputs = cluster

    def send(service: str, operation: str, region: str, **params: Any) -> dict[str, Any]:
        answer: dict[str, Any] = getattr(world.client(service, region), xform_name(operation))(**params)
        return answer

    base = cluster_read("us-east-1", "switchyard-ecs", INSTALL, send).base
    assert base.cluster is not None
    assert (base.cluster.name, base.account) == (outputs["Cluster"], world.account)
    assert (base.cluster.image, base.cluster.ingress_image) == (IMAGES["NodeImage"], IMAGES["IngressImage"])
    assert base.target_groups == dict(zip(("tls", "grpc", "plain_grpc"), TARGETS.values(), strict=True))
    assert (base.node_role, base.queue_url) == (f"{INSTALL}-node-task-us-east-1", outputs["NoticeQueue"])
    with pytest.raises(StackRefused, match="is of install"):
        cluster_read("us-east-1", "switchyard-ecs", "sw-ffffffffffff", send)


def test_machines_of_the_group_do_not_look_like_launches_of_the_install() -> None:
    """Garbage collection of EC2 terminates machines that have the tag and no row."""
    from lab.cloud.stack import TEMPLATES

    group = (TEMPLATES / "ecs.yaml").read_text().partition("  Group:\n")[2].partition("  Provider:\n")[0]
    tag = group.partition("Key: switchyard:install")[2].partition("- Key")[0]
    assert "PropagateAtLaunch: false" in tag
