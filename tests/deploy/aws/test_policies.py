"""Policies of the stacks against the table of our calls: a role may do what its calls need, and nothing else."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from fleet.clouds.aws.actions import Role, actions_of
from fleet.clouds.aws.launch import TAGS
from tests.deploy.aws.conftest import INSTALL, Deployed

pytestmark = pytest.mark.cloud

REGION_ROLES = {Role.CONTROL: "control", Role.NODE: "node"}
UNBOUND_PREFIXES = (
    *("ec2:Describe", "ec2:Get", "sts:", "pricing:", "servicequotas:", "elasticloadbalancing:Describe"),
    "cloudwatch:GetMetricData",
)
"""IAM knows no resource for these."""


def statements(deployed: Deployed, role: str) -> Iterator[dict[str, Any]]:
    """Of all policies of a role, as IAM has them."""
    iam = deployed.world.client("iam")
    attached = iam.list_attached_role_policies(RoleName=f"{INSTALL}-{role}")["AttachedPolicies"]
    assert not iam.list_role_policies(RoleName=f"{INSTALL}-{role}")["PolicyNames"]
    for each in attached:
        version = iam.get_policy(PolicyArn=each["PolicyArn"])["Policy"]["DefaultVersionId"]
        document = iam.get_policy_version(PolicyArn=each["PolicyArn"], VersionId=version)["PolicyVersion"]["Document"]
        yield from (json.loads(document) if isinstance(document, str) else document)["Statement"]


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def by_sid(deployed: Deployed, role: str = "control") -> dict[str, dict[str, Any]]:
    return {each["Sid"]: each for each in statements(deployed, role)}


@pytest.mark.parametrize(("role", "name"), REGION_ROLES.items())
def test_a_role_may_do_what_its_calls_need_and_nothing_else(deployed: Deployed, role: Role, name: str) -> None:
    allowed = [action for each in statements(deployed, name) for action in as_list(each["Action"])]

    assert set(allowed) == actions_of(role)
    assert all(each["Effect"] == "Allow" for each in statements(deployed, name))


def test_an_ingress_may_do_nothing(deployed: Deployed) -> None:
    assert list(statements(deployed, "ingress")) == []


@pytest.mark.parametrize("name", ["control", "node"])
def test_what_iam_can_bind_is_bound(deployed: Deployed, name: str) -> None:
    for each in statements(deployed, name):
        if "*" in as_list(each["Resource"]) and not each.get("Condition"):
            assert all(action.startswith(UNBOUND_PREFIXES) for action in as_list(each["Action"])), each["Sid"]


def test_only_what_is_tagged_as_ours_is_launched_and_ended(deployed: Deployed) -> None:
    found = by_sid(deployed)
    launch, end = found["LaunchOnlyTagged"]["Condition"], found["EndOurs"]["Condition"]

    assert launch["StringEquals"] == {"aws:RequestTag/switchyard:install": INSTALL}
    assert set(launch["ForAllValues:StringEquals"]["aws:TagKeys"]) == set(TAGS)
    assert end == {"StringEquals": {"ec2:ResourceTag/switchyard:install": INSTALL}}
    assert found["TagInLaunches"]["Condition"] == {"StringEquals": {"ec2:CreateAction": "RunInstances"}}
    assert found["Targets"]["Condition"] == {"StringEquals": {"aws:ResourceTag/switchyard:install": INSTALL}}


def test_only_the_two_roles_of_machines_are_given_and_to_ec2_alone(deployed: Deployed) -> None:
    given = by_sid(deployed)["GiveMachinesTheirRole"]

    assert sorted(arn.rpartition("/")[2] for arn in given["Resource"]) == [f"{INSTALL}-ingress", f"{INSTALL}-node"]
    assert given["Condition"] == {"StringEquals": {"iam:PassedToService": "ec2.amazonaws.com"}}


def test_a_node_reads_artifacts_and_the_control_plane_its_claim(deployed: Deployed) -> None:
    bucket = f"arn:aws:s3:::{deployed.base['ArtifactBucket']}"

    assert by_sid(deployed, "node")["ReadArtifacts"]["Resource"] == f"{bucket}/artifacts/*"
    assert by_sid(deployed)["Claim"]["Resource"] == f"{bucket}/control/*"


@pytest.mark.parametrize("name", ["node", "ingress"])
def test_a_machines_role_is_taken_by_ec2_alone(deployed: Deployed, name: str) -> None:
    """Any other principal could choose the session name, and so pose as any machine that has not joined."""
    role = deployed.world.client("iam").get_role(RoleName=f"{INSTALL}-{name}")["Role"]
    trust = role["AssumeRolePolicyDocument"]

    assert (json.loads(trust) if isinstance(trust, str) else trust)["Statement"] == [
        {"Effect": "Allow", "Principal": {"Service": "ec2.amazonaws.com"}, "Action": "sts:AssumeRole"}
    ]
