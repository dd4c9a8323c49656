"""The templates as AWS's own schemas see them, and each of their resources as the API shows it once it is deployed."""

import json
from collections import Counter
from typing import Any

import pytest
import yaml

from engine_agent.protocol.ports import CLOUD_INGRESS, ingress_ports
from lab.cloud.stack import TEMPLATES
from tests.deploy.aws.conftest import INSTALL, Deployed

pytestmark = pytest.mark.cloud

REGIONS = ["us-east-1", "us-west-2", "eu-west-1", "ap-northeast-1"]


class _Loader(yaml.SafeLoader):
    """Takes CloudFormation's tags as what they are followed by."""


_LOADED: dict[type, Any] = {
    yaml.ScalarNode: lambda loader, node: loader.construct_scalar(node),
    yaml.SequenceNode: lambda loader, node: loader.construct_sequence(node, deep=True),
}
_Loader.add_multi_constructor("!", lambda loader, _, node: _LOADED[type(node)](loader, node))


def stated(template: str) -> Counter[str]:
    """How many resources of each type it has."""
    resources = yaml.load((TEMPLATES / template).read_text(), _Loader)["Resources"]  # noqa: S506  # a safe one
    return Counter(each["Type"] for each in resources.values())


@pytest.mark.parametrize("template", sorted(path.name for path in TEMPLATES.glob("*.yaml")))
def test_a_template_is_one_by_awss_own_schemas(template: str, thorough: bool) -> None:
    """By default with the schemas of one region, of which each takes a second to read."""
    from cfnlint.api import ManualArgs, lint  # takes long to load: not while tests are collected

    matches = lint(_text(template), config=ManualArgs(regions=REGIONS if thorough else REGIONS[:1]))
    assert [str(each) for each in matches if not each.rule.id.startswith("I")] == []


def _text(template: str) -> str:
    return (TEMPLATES / template).read_text()


def ours(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What carries the install's tag."""
    return [each for each in found if {"Key": "switchyard:install", "Value": INSTALL} in each.get("Tags", ())]


def test_every_resource_of_the_region_is_there(deployed: Deployed) -> None:
    world = deployed.world
    ec2, elb = world.client("ec2"), world.client("elbv2")
    sqs, events = world.client("sqs"), world.client("events")
    vpc = ours(ec2.describe_vpcs()["Vpcs"])[0]["VpcId"]
    here = [{"Name": "vpc-id", "Values": [vpc]}]
    attached = [{"Name": "attachment.vpc-id", "Values": [vpc]}]
    gateways = ec2.describe_internet_gateways(Filters=attached)["InternetGateways"]
    tables = ec2.describe_route_tables(Filters=here)["RouteTables"]
    groups = ours(ec2.describe_security_groups(Filters=here)["SecurityGroups"])
    queues = [url.rpartition("/")[2] for url in sqs.list_queues()["QueueUrls"]]
    policy = _attribute(sqs, f"{INSTALL}-notices", "Policy")
    there = Counter(
        {
            "AWS::EC2::VPC": len(ours(ec2.describe_vpcs()["Vpcs"])),
            "AWS::EC2::InternetGateway": len(gateways),
            "AWS::EC2::VPCGatewayAttachment": len(gateways),
            "AWS::EC2::Subnet": len(ours(ec2.describe_subnets(Filters=here)["Subnets"])),
            "AWS::EC2::RouteTable": len(
                [each for each in tables if not any(one.get("Main") for one in each["Associations"])]
            ),
            "AWS::EC2::Route": sum(
                each.get("DestinationCidrBlock") == "0.0.0.0/0" for one in tables for each in one["Routes"]
            ),
            "AWS::EC2::SubnetRouteTableAssociation": sum(
                "SubnetId" in each for one in tables for each in one["Associations"]
            ),
            "AWS::EC2::EIP": len(ec2.describe_addresses()["Addresses"]),
            "AWS::EC2::NatGateway": len(ec2.describe_nat_gateways(Filters=here)["NatGateways"]),
            "AWS::EC2::VPCEndpoint": len(ec2.describe_vpc_endpoints(Filters=here)["VpcEndpoints"]),
            "AWS::EC2::PlacementGroup": len(ours(ec2.describe_placement_groups()["PlacementGroups"])),
            "AWS::EC2::SecurityGroup": len(groups),
            "AWS::EC2::SecurityGroupIngress": sum(len(_peers(each["IpPermissions"])) for each in groups),
            "AWS::EC2::SecurityGroupEgress": sum(
                len(each.get("UserIdGroupPairs", ())) for one in groups for each in one["IpPermissionsEgress"]
            ),
            "AWS::ElasticLoadBalancingV2::LoadBalancer": sum(
                each["Type"] == "network" for each in elb.describe_load_balancers()["LoadBalancers"]
            ),
            "AWS::ElasticLoadBalancingV2::TargetGroup": len(elb.describe_target_groups()["TargetGroups"]),
            "AWS::ElasticLoadBalancingV2::Listener": sum(
                len(elb.describe_listeners(LoadBalancerArn=each["LoadBalancerArn"])["Listeners"])
                for each in elb.describe_load_balancers()["LoadBalancers"]
            ),
            "AWS::SQS::Queue": len([each for each in queues if each.startswith(INSTALL)]),
            "AWS::SQS::QueuePolicy": int("events.amazonaws.com" in policy),
            "AWS::Events::Rule": len(
                [
                    each
                    for each in events.list_rules()["Rules"]
                    if events.list_targets_by_rule(Rule=each["Name"])["Targets"]
                ]
            ),
        }
    )

    # One zone of the four, of which each has nine resources, is left out.
    fourth = Counter(_zone_kinds())
    assert there == stated("region.yaml") - fourth


def _peers(permissions: list[dict[str, Any]]) -> list[Any]:
    return [peer for each in permissions for kind in ("IpRanges", "UserIdGroupPairs") for peer in each.get(kind, ())]


def _zone_kinds() -> list[str]:
    resources = yaml.load(_text("region.yaml"), _Loader)["Resources"]  # noqa: S506  # a safe one
    return [each["Type"] for each in resources.values() if each.get("Condition") == "HasZoneD"]


def _attribute(sqs: Any, queue: str, name: str) -> str:
    url = sqs.get_queue_url(QueueName=queue)["QueueUrl"]
    return str(sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["All"])["Attributes"][name])


def test_every_resource_of_the_base_is_there(deployed: Deployed) -> None:
    world = deployed.world
    iam, s3 = world.client("iam"), world.client("s3")
    bucket = deployed.base["ArtifactBucket"]
    there = Counter(
        {
            "AWS::S3::Bucket": int(bucket in [each["Name"] for each in s3.list_buckets()["Buckets"]]),
            "AWS::S3::BucketPolicy": int("TlsOnly" in s3.get_bucket_policy(Bucket=bucket)["Policy"]),
            "AWS::IAM::Role": len(iam.list_roles()["Roles"]),
            "AWS::IAM::InstanceProfile": len(iam.list_instance_profiles()["InstanceProfiles"]),
            "AWS::IAM::ManagedPolicy": len(iam.list_policies(Scope="Local")["Policies"]),
            "AWS::SNS::Topic": len(world.client("sns").list_topics()["Topics"]),
            "AWS::CloudWatch::Alarm": len(world.client("cloudwatch").describe_alarms()["MetricAlarms"]),
        }
    )

    assert there == stated("base.yaml")


def test_what_depends_on_more_than_being_there(deployed: Deployed) -> None:
    world = deployed.world
    elb, sqs = world.client("elbv2"), world.client("sqs")
    arn = deployed.region["EntryTargets"]
    attributes = elb.describe_target_group_attributes(TargetGroupArn=arn)["Attributes"]
    group = elb.describe_target_groups(TargetGroupArns=[arn])["TargetGroups"][0]
    alarm = world.client("cloudwatch").describe_alarms()["MetricAlarms"][0]
    redrive = json.loads(_attribute(sqs, f"{INSTALL}-notices", "RedrivePolicy"))

    assert {"Key": "deregistration_delay.timeout_seconds", "Value": "300"} in attributes
    assert (group["TargetType"], group["HealthCheckPath"], group["HealthCheckPort"]) == ("ip", "/healthz", "8080")
    assert alarm["TreatMissingData"] == "breaching"
    assert redrive["deadLetterTargetArn"].endswith(f"{INSTALL}-notices-dead")
    assert int(redrive["maxReceiveCount"]) == 5  # cfn-lint takes 0


def test_the_ports_of_ingresses_are_open_to_the_load_balancer_alone(deployed: Deployed) -> None:
    """Those for gRPC because the stack states `Grpc`."""
    ec2, elb = deployed.world.client("ec2"), deployed.world.client("elbv2")
    [entry] = elb.describe_load_balancers()["LoadBalancers"]
    listeners = elb.describe_listeners(LoadBalancerArn=entry["LoadBalancerArn"])["Listeners"]
    target_ports = {each["TargetGroupArn"]: each["Port"] for each in elb.describe_target_groups()["TargetGroups"]}
    found = {each["Port"]: target_ports[each["DefaultActions"][0]["TargetGroupArn"]] for each in listeners}
    ports = ingress_ports(CLOUD_INGRESS)
    assert found == {
        443: ports["applications over TLS"], 80: ports["applications"],
        8443: ports["gRPC over TLS"], 50051: ports["gRPC"],
    }  # fmt: skip

    [group] = ec2.describe_security_groups(GroupIds=[deployed.region["IngressGroup"]])["SecurityGroups"]
    [of_entry] = entry["SecurityGroups"]
    opened = {
        each["FromPort"]
        for each in group["IpPermissions"]
        if of_entry in [pair["GroupId"] for pair in each["UserIdGroupPairs"]]
    }
    assert opened == set(found.values())
    [group] = ec2.describe_security_groups(GroupIds=[of_entry])["SecurityGroups"]
    assert {each["FromPort"] for each in group["IpPermissions"]} == set(found)


def test_a_notice_of_ec2_reaches_the_queue_and_another_ones_does_not(deployed: Deployed) -> None:
    world = deployed.world
    sqs, events = world.client("sqs"), world.client("events")
    for source, kind in (
        ("aws.ec2", "EC2 Spot Instance Interruption Warning"), ("aws.ec2", "EBS Volume Notification"),
        ("a.stranger", "EC2 Spot Instance Interruption Warning"),
    ):  # fmt: skip
        events.put_events(Entries=[{"Source": source, "DetailType": kind, "Detail": "{}"}])

    url = sqs.get_queue_url(QueueName=f"{INSTALL}-notices")["QueueUrl"]
    got = sqs.receive_message(QueueUrl=url, MaxNumberOfMessages=10, WaitTimeSeconds=0).get("Messages", [])
    assert [json.loads(each["Body"])["detail-type"] for each in got] == ["EC2 Spot Instance Interruption Warning"]
