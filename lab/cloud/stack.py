"""Resources of CloudFormation stacks that moto reports as complete without making them, or makes differently. Deploys
`deploy/aws/*.yaml`.

moto finds resource types among the direct subclasses of its class, so each maker here becomes one. The import
registers them in this process. They work only for accounts of a World."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moto.cloudformation import parsing
from moto.core.common_models import CloudFormationModel
from moto.core.utils import utcnow
from moto.ec2.models.amis import Ami
from moto.ec2.models.instance_types import INSTANCE_TYPES
from moto.ssm.models import Parameter

from lab.cloud.wire import Call
from lab.cloud.world import HANDLERS, World, world_of

Properties = Mapping[str, Any]


@dataclass
class Made:
    """`id`: what Ref gives; `attributes`: what GetAtt gives; `remove`: for when the stack is deleted."""

    id: str
    remove: Callable[[], object]
    attributes: Mapping[str, str] = field(default_factory=dict)


Maker = Callable[[World, str, str, Properties], Made]
"""World, region, name that CloudFormation would give it, properties."""


def _call_operation(world: World, region: str, service: str, operation: str, **params: Any) -> dict[str, Any]:
    call = Call(service, operation, region, world.access_key, {}, b"", params)
    return HANDLERS[service, operation](world, call)


def _tags(properties: Properties) -> list[dict[str, str]]:
    return [{"Key": each["Key"], "Value": each["Value"]} for each in properties.get("Tags") or ()]


def _placement_group(world: World, region: str, name: str, properties: Properties) -> Made:
    name = properties.get("GroupName", name)
    asked = {"GroupName": name, "Strategy": properties["Strategy"]}
    _call_operation(world, region, "ec2", "CreatePlacementGroup", **asked)
    world.groups[region][name]["Tags"] = _tags(properties)
    return Made(name, lambda: world.groups[region].pop(name, None))


def _egress_rule(world: World, region: str, name: str, properties: Properties) -> Made:
    backend = world.backend("ec2", region)
    protocol, destination = str(properties["IpProtocol"]), properties.get("DestinationSecurityGroupId")
    ports = (None, None) if protocol == "-1" else (properties["FromPort"], properties["ToPort"])
    ranges = [{"CidrIp": properties["CidrIp"]}] if "CidrIp" in properties else []
    rule = (properties["GroupId"], protocol, *ports, ranges)
    groups = [{"GroupId": destination}] if destination else []
    backend.authorize_security_group_egress(*rule, source_groups=groups)
    return Made(name, lambda: backend.revoke_security_group_egress(*rule, source_groups=groups))


def _route_table_of_subnet(world: World, region: str, name: str, properties: Properties) -> Made:
    """moto's own is known to no route table."""
    backend = world.backend("ec2", region)
    made = backend.associate_route_table(route_table_id=properties["RouteTableId"], subnet_id=properties["SubnetId"])
    return Made(made, lambda: backend.disassociate_route_table(made))


def _queue_policy(world: World, region: str, name: str, properties: Properties) -> Made:
    queues = [url.rpartition("/")[2] for url in properties["Queues"]]
    policy = json.dumps(properties["PolicyDocument"])
    for queue in queues:
        world.backend("sqs", region).get_queue(queue).policy = policy
    return Made(name, lambda: None)


def _bucket_policy(world: World, region: str, name: str, properties: Properties) -> Made:
    policy = json.dumps(properties["PolicyDocument"]).encode()
    world.backend("s3", "aws").put_bucket_policy(properties["Bucket"], policy)
    return Made(properties["Bucket"], lambda: None)


def _alarm(world: World, region: str, name: str, properties: Properties) -> Made:
    backend = world.backend("cloudwatch", region)
    name = properties.get("AlarmName", name)
    backend.put_metric_alarm(
        name=name, namespace=properties["Namespace"], metric_name=properties["MetricName"],
        comparison_operator=properties["ComparisonOperator"], evaluation_periods=properties["EvaluationPeriods"],
        period=properties["Period"], threshold=float(properties["Threshold"]), statistic=properties["Statistic"],
        description=properties.get("AlarmDescription", ""), dimensions=list(properties.get("Dimensions") or ()),
        alarm_actions=properties.get("AlarmActions") or [], ok_actions=properties.get("OKActions") or [],
        treat_missing_data=properties.get("TreatMissingData"),
    )  # fmt: skip
    return Made(name, lambda: backend.delete_alarms([name]))


def _load_balancer(world: World, region: str, name: str, properties: Properties) -> Made:
    """moto's own takes no `Type`, tag or attribute from a template."""
    backend = world.backend("elbv2", region)
    balancer = backend.create_load_balancer(
        properties.get("Name", name), properties.get("SecurityGroups") or [], properties["Subnets"],
        scheme=properties.get("Scheme", "internet-facing"), loadbalancer_type=properties.get("Type", "application"),
        tags=_tags(properties),
    )  # fmt: skip
    balancer.activate()
    backend.modify_load_balancer_attributes(balancer.arn, _attributes(properties.get("LoadBalancerAttributes")))
    named = {"DNSName": balancer.dns_name, "LoadBalancerName": balancer.name, "CanonicalHostedZoneID": BALANCER_ZONE}
    return Made(balancer.arn, lambda: backend.delete_load_balancer(balancer.arn), named)


BALANCER_ZONE = "Z26RNL4JYFTOTI"
"""In which a network load balancer of us-east-1 has its name; each region has another, and moto none."""


def _target_group(world: World, region: str, name: str, properties: Properties) -> Made:
    """moto's own takes no tag or attribute from a template."""
    backend = world.backend("elbv2", region)
    names = {
        "vpc_id": "VpcId", "protocol": "Protocol", "port": "Port", "target_type": "TargetType",
        "healthcheck_protocol": "HealthCheckProtocol", "healthcheck_port": "HealthCheckPort",
        "healthcheck_path": "HealthCheckPath", "healthcheck_interval_seconds": "HealthCheckIntervalSeconds",
        "healthcheck_timeout_seconds": "HealthCheckTimeoutSeconds", "healthy_threshold_count": "HealthyThresholdCount",
        "unhealthy_threshold_count": "UnhealthyThresholdCount",
    }  # fmt: skip
    group = backend.create_target_group(
        name=properties.get("Name", name), **{ours: properties.get(theirs) for ours, theirs in names.items()}
    )
    backend.add_tags([group.arn], _tags(properties))
    group.attributes.update(_attributes(properties.get("TargetGroupAttributes")))
    return Made(group.arn, lambda: backend.delete_target_group(group.arn))


def _secret(world: World, region: str, name: str, properties: Properties) -> Made:
    backend = world.backend("secretsmanager", region)
    generated = properties.get("GenerateSecretString") or {}
    value = properties.get("SecretString") or json.dumps(
        {**json.loads(generated.get("SecretStringTemplate", "{}")), generated.get("GenerateStringKey", "value"): "made"}
    )
    name = properties.get("Name", name)
    made = backend.create_secret(
        name=name, secret_string=value, secret_binary=None, description=properties.get("Description"),
        tags=_tags(properties), kms_key_id=None, client_request_token=None, replica_regions=[], force_overwrite=False,
    )  # fmt: skip
    arn = json.loads(made)["ARN"]
    return Made(arn, lambda: backend.delete_secret(arn, None, True))


def _attributes(stated: list[dict[str, str]] | None) -> dict[str, str]:
    return {each["Key"]: each["Value"] for each in stated or ()}


MAKERS: dict[str, tuple[Maker, tuple[str, ...]]] = {
    "AWS::CloudWatch::Alarm": (_alarm, ("Arn",)),
    "AWS::EC2::PlacementGroup": (_placement_group, ("GroupName",)),
    "AWS::EC2::SecurityGroupEgress": (_egress_rule, ()),
    "AWS::EC2::SubnetRouteTableAssociation": (_route_table_of_subnet, ()),
    "AWS::ElasticLoadBalancingV2::LoadBalancer": (
        _load_balancer,
        ("DNSName", "LoadBalancerName", "CanonicalHostedZoneID"),
    ),
    "AWS::ElasticLoadBalancingV2::TargetGroup": (_target_group, ()),
    "AWS::S3::BucketPolicy": (_bucket_policy, ()),
    "AWS::SQS::QueuePolicy": (_queue_policy, ()),
    "AWS::SecretsManager::Secret": (_secret, ("Id",)),
}
"""Type -> who makes it, and what GetAtt may ask of it."""


class _Resource:
    def __init__(self, made: Made) -> None:
        self.made = made

    @property
    def physical_resource_id(self) -> str:
        return self.made.id

    def is_created(self) -> bool:
        return True

    def get_cfn_attribute(self, attribute_name: str) -> str:
        return self.made.attributes[attribute_name]

    def delete(self, account_id: str, region_name: str) -> None:
        self.made.remove()


def _register(kind: str, maker: Maker, attributes: tuple[str, ...]) -> type:
    """moto takes the last direct subclass of a type."""

    def create(
        _cls: Any, /, resource_name: str, cloudformation_json: Any, account_id: str, region_name: str, **_: Any
    ) -> _Resource:
        properties = cloudformation_json["Properties"]
        return _Resource(maker(world_of(account_id), region_name, resource_name, properties))

    return type(
        kind.replace("::", ""),
        (CloudFormationModel,),
        {
            "cloudformation_name_type": staticmethod(lambda: ""),
            "cloudformation_type": staticmethod(lambda: kind),
            "has_cfn_attr": classmethod(lambda cls, attr: attr in attributes),
            "create_from_cloudformation_json": classmethod(create),
        },
    )


def _without_no_value(resource_json: Any, resources_map: Any) -> Any:
    """moto leaves AWS::NoValue in lists."""
    cleaned = _CLEANED(resource_json, resources_map)
    return [each for each in cleaned if each is not None] if isinstance(cleaned, list) else cleaned


_CLEANED = parsing.clean_json
parsing.clean_json = _without_no_value
_KEPT = [_register(kind, *made) for kind, made in MAKERS.items()]
"""Keeps the classes alive: moto finds them through weak references."""
parsing.get_model_list.cache_clear()
parsing.get_model_map.cache_clear()
parsing.get_name_type_map.cache_clear()


@dataclass(frozen=True)
class PublicImage:
    parameter: str
    id: str
    architecture: str = "x86_64"


_DEEP_LEARNING = "/aws/service/deeplearning/ami/{}/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id"
_UBUNTU = "/aws/service/canonical/ubuntu/server/24.04/stable/current/{}/hvm/ebs-gp3/ami-id"
IMAGES = (
    PublicImage("/aws/service/neuron/dlami/multi-framework/ubuntu-24.04/latest/image_id", "ami-0000000000000aaaa"),
    PublicImage(_DEEP_LEARNING.format("x86_64"), "ami-0000000000000bbbb"),
    PublicImage(_DEEP_LEARNING.format("arm64"), "ami-000000000000bbbaa", "arm64"),
    PublicImage(_UBUNTU.format("amd64"), "ami-0000000000000cccc"),
    PublicImage(_UBUNTU.format("arm64"), "ami-000000000000cccaa", "arm64"),
)
ECS_IMAGE = PublicImage(
    "/aws/service/ecs/optimized-ami/amazon-linux-2023/recommended/image_id", "ami-0000000000000eeee"
)
"""Of container instances: it has an ECS agent."""
PINNED = PublicImage("", "ami-0000000000000dddd")
"""An older image, which no parameter names."""
ROOT_DEVICE = "/dev/sda1"


def publish_images(world: World, region: str) -> None:
    ec2, ssm = world.backend("ec2", region), world.backend("ssm", region)
    ssm._parameters.latest_amis_loaded = True  # or moto would add its own, of images that it does not have
    for each in (*IMAGES, ECS_IMAGE, PINNED):
        ec2.amis[each.id] = Ami(
            ec2, each.id, name=each.parameter, public=True, root_device_name=ROOT_DEVICE, architecture=each.architecture
        )
        if each.parameter:
            ssm._parameters[each.parameter] = [_parameter(world, each.parameter, each.id)]


def _parameter(world: World, name: str, value: str) -> Any:
    made: Any = Parameter  # whose base, to mypy, is abstract
    return made(
        account_id=world.account, name=name, value=value, parameter_type="String", description=None,
        allowed_pattern=None, keyid=None, last_modified_date=utcnow(), version=1, data_type="aws:ec2:image",
    )  # fmt: skip


TEMPLATES = Path(__file__).parents[2] / "deploy" / "aws"
HOME = "us-east-1"


def deploy(world: World, region: str, stack: str, template: str, parameters: dict[str, str]) -> dict[str, str]:
    client = world.client("cloudformation", region)
    given = [{"ParameterKey": key, "ParameterValue": value} for key, value in parameters.items()]
    body = (TEMPLATES / template).read_text()
    client.create_stack(
        StackName=stack, TemplateBody=body, Parameters=given, Capabilities=["CAPABILITY_NAMED_IAM"]
    )  # fmt: skip
    made = client.describe_stacks(StackName=stack)["Stacks"][0]
    if made["StackStatus"] != "CREATE_COMPLETE":
        raise RuntimeError(f"{stack} is {made['StackStatus']}: {made.get('StackStatusReason')}")
    return {each["OutputKey"]: each["OutputValue"] for each in made["Outputs"]}


def deploy_base(world: World, install: str, **parameters: str) -> dict[str, str]:
    return deploy(world, HOME, "switchyard-base", "base.yaml", {"Install": install, **parameters})


def deploy_region(world: World, region: str, base: dict[str, str], **parameters: str) -> dict[str, str]:
    """As stack `switchyard-REGION`, over its zones a and b unless `parameters` say more."""
    publish_images(world, region)
    passed_on = {key: base[key] for key in ("Install", "NodeProfile", "IngressProfile", "ArtifactBucket", "BaseRegion")}
    optional = {key: base[key] for key in ("HostedZoneId",) if key in base}
    stated = {"ZoneA": f"{region}a", "ZoneB": f"{region}b", **passed_on, **optional, **parameters}
    return deploy(world, region, f"switchyard-{region}", "region.yaml", stated)


TARGETS = ("EntryTargets", "PlainTargets", "GrpcTargets", "PlainGrpcTargets")


def deploy_cluster(
    world: World, region: str, base: dict[str, str], network: dict[str, str], images: dict[str, str]
) -> tuple[str, str]:
    """An ECS cluster in the network of a region, whose load balancer its ingresses serve. `images`: parameters with
    the images of tasks. Returns the names of the stack and of the cluster."""
    name = f"switchyard-ecs-{region}"
    given = {
        "Install": base["Install"],
        "ArtifactBucket": base["ArtifactBucket"],
        "IngressZones": f"{network['ZoneA']},{network['ZoneB']}",
        **{key: network[key] for key in ("EntryAddress", "EntryZone", *TARGETS) if key in network},
        **images,
    }
    return name, deploy(world, region, name, "ecs.yaml", given)["Cluster"]


def container_instances_launch(
    world: World, region: str, network: dict[str, str], cluster: str, machines: dict[str, int]
) -> None:
    """Launches so many machines of each type, which join the cluster, by turns in the two zones: what an Auto Scaling
    group does. Machines with accelerators stay in one zone."""
    user_data = f"#!/bin/sh\nmkdir -p /etc/ecs\necho ECS_CLUSTER={cluster} >/etc/ecs/ecs.config\n"
    client = world.client("ec2", region)
    for kind, count in machines.items():
        cards = int((INSTANCE_TYPES[kind]["NetworkInfo"].get("EfaInfo") or {}).get("MaximumEfaInterfaces") or 0)
        for index in range(count):
            subnet = network["SubnetA" if cards or index % 2 == 0 else "SubnetB"]
            group = network["NodeGroup" if cards else "IngressGroup"]
            interfaces = [
                {
                    "NetworkCardIndex": card, "DeviceIndex": 0 if card == 0 else 1, "SubnetId": subnet,
                    "Groups": [group], "DeleteOnTermination": True,
                    "InterfaceType": "interface" if not cards else "efa-only" if card else "efa",
                }
                for card in range(max(cards, 1))
            ]  # fmt: skip
            client.run_instances(
                ImageId=ECS_IMAGE.id, InstanceType=kind, MinCount=1, MaxCount=1, NetworkInterfaces=interfaces,
                UserData=user_data,
            )  # fmt: skip
