"""The AWS calls of each role with the IAM actions that they need, and the meaning of EC2's launch errors. Pure: tables.
Calls that are missing here are not made, and policies allow nothing else. A node may change nothing, and the control
plane cannot change its own permissions. Only listed error codes move a launch to another pool or repeat it; every other
code is a refusal. Answers that are not EC2 errors (time-outs, closed connections, unreadable bodies) are `unknown`; the
caller handles them."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from fleet.capacity.planning.pools import LaunchOutcome, Market, Scope, quota_family


class Role(StrEnum):
    """The caller. An ingress makes only the calls of its image; the deployer is CloudFormation. `CLUSTER`: the control
    plane where a region is an ECS cluster, by a policy of that stack (`deploy/aws/ecs.yaml`)."""

    CONTROL = "control"
    CLUSTER = "cluster"
    NODE = "node"


@dataclass(frozen=True, slots=True)
class Call:
    """`service` as boto3 names its client, `operation` as AWS names the call, `actions` of IAM. `bound`: the condition
    that a policy must set, in words; "" if IAM has no condition for the action."""

    service: str
    operation: str
    actions: tuple[str, ...]
    bound: str = ""
    role: Role = Role.CONTROL


_QUEUES = "the region's queue of notices, and the install's queues of requests"
_WRITTEN = "control/ and files/ of the install's bucket, the place of usage, and places that tenants' batches write to"
_READ = f"{_WRITTEN}; buckets of queues, and places that tenants' batches read from"
_OURS = "resources tagged switchyard:install = this install"


def _plain(service: str, prefix: str, *operations: str, bound: str = "") -> tuple[Call, ...]:
    """Calls whose IAM action has the same name."""
    return tuple(Call(service, name, (f"{prefix}:{name}",), bound) for name in operations)


_CALLS = (
    Call(
        "ec2",
        "RunInstances",
        ("ec2:RunInstances", "ec2:CreateTags", "iam:PassRole"),
        f"{_OURS}, in the request; tags set by RunInstances only; the two roles of instances, passed to EC2",
    ),
    Call("ec2", "TerminateInstances", ("ec2:TerminateInstances",), _OURS),
    Call("ec2", "RebootInstances", ("ec2:RebootInstances",), _OURS),
    Call("ec2", "DeleteVolume", ("ec2:DeleteVolume",), _OURS),
    Call("ec2", "DeleteNetworkInterface", ("ec2:DeleteNetworkInterface",), _OURS),
    Call("ec2", "CancelSpotInstanceRequests", ("ec2:CancelSpotInstanceRequests",), _OURS),
    *_plain(
        "ec2",
        "ec2",
        "DescribeInstances",
        "DescribeInstanceStatus",
        "DescribeInstanceTopology",
        "DescribeCapacityReservations",
        "DescribeCapacityReservationTopology",
        "DescribeInstanceTypes",
        "DescribeInstanceTypeOfferings",
        "DescribeSubnets",
        "DescribeImages",
        "DescribeVolumes",
        "DescribeNetworkInterfaces",
        "DescribeSpotInstanceRequests",
        "DescribeSpotPriceHistory",
    ),
    Call("sts", "DecodeAuthorizationMessage", ("sts:DecodeAuthorizationMessage",)),
    *_plain("cloudformation", "cloudformation", "DescribeStacks", bound="the install's stacks"),
    *_plain("sqs", "sqs", "ReceiveMessage", "GetQueueAttributes", bound=_QUEUES),
    Call("sqs", "DeleteMessageBatch", ("sqs:DeleteMessage",), _QUEUES),
    *_plain(
        "route53",
        "route53",
        "ChangeResourceRecordSets",
        "ListResourceRecordSets",
        bound="the entry's hosted zone",
    ),
    *_plain("route53", "route53", "GetChange"),
    *_plain(
        "elbv2", "elasticloadbalancing", "RegisterTargets", "DeregisterTargets", bound="the region's target groups"
    ),
    *_plain("elbv2", "elasticloadbalancing", "DescribeTargetHealth"),
    *_plain("cloudwatch", "cloudwatch", "PutMetricData", bound="the namespace Switchyard"),
    *_plain("cloudwatch", "cloudwatch", "DescribeAlarms", "GetMetricData"),
    *_plain("pricing", "pricing", "GetProducts"),
    *_plain("service-quotas", "servicequotas", "ListServiceQuotas"),
    Call("s3", "GetObject", ("s3:GetObject",), _READ),
    Call("s3", "PutObject", ("s3:PutObject",), _WRITTEN),
    *(
        Call("s3", name, ("s3:PutObject",), _WRITTEN)
        for name in ("CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload")
    ),
    Call("s3", "AbortMultipartUpload", ("s3:AbortMultipartUpload",), _WRITTEN),
    Call("s3", "DeleteObject", ("s3:DeleteObject",), "files/ of the install's bucket"),
    Call("s3", "DeleteObjects", ("s3:DeleteObject",), "files/ of the install's bucket"),
    Call("s3", "ListObjectsV2", ("s3:ListBucket",), "artifacts/, control/ and files/ of the install's bucket"),
    Call("s3", "ListMultipartUploads", ("s3:ListBucketMultipartUploads",), "the install's bucket"),
    Call("s3", "GetObject", ("s3:GetObject", "kms:Decrypt"), "artifacts/ of the install's bucket", Role.NODE),
    Call("s3", "ListObjectsV2", ("s3:ListBucket",), "artifacts/ of the install's bucket", Role.NODE),
    Call(
        "ecs",
        "StartTask",
        ("ecs:StartTask", "ecs:TagResource", "iam:PassRole"),
        "the stack's cluster; the roles of tasks, passed to ECS",
        Role.CLUSTER,
    ),
    *(
        Call("ecs", name, (f"ecs:{name}",), "the stack's cluster", Role.CLUSTER)
        for name in (
            "StopTask",
            "DescribeTasks",
            "ListTasks",
            "ListContainerInstances",
            "DescribeContainerInstances",
            "PutAttributes",
        )
    ),
    Call(
        "ecs",
        "TagResource",
        ("ecs:TagResource",),
        f"tasks of the stack's cluster, {_OURS}; cell, generation and node only",
        Role.CLUSTER,
    ),
    Call(
        "ecs",
        "RegisterTaskDefinition",
        ("ecs:RegisterTaskDefinition", "ecs:TagResource", "iam:PassRole"),
        f"{_OURS}, in the request; the roles of tasks, passed to ECS",
        Role.CLUSTER,
    ),
    *(
        Call("sqs", name, (action,), "the cluster's queue of notices", Role.CLUSTER)
        for name, action in (
            ("ReceiveMessage", "sqs:ReceiveMessage"),
            ("GetQueueAttributes", "sqs:GetQueueAttributes"),
            ("DeleteMessageBatch", "sqs:DeleteMessage"),
        )
    ),
    # IAM has no resource for these.
    *(
        Call("ecs", name, (f"ecs:{name}",), "revisions of the install's families, by its own code", Role.CLUSTER)
        for name in ("DeregisterTaskDefinition", "DescribeTaskDefinition", "ListTaskDefinitions")
    ),
    # Nodes prove their identity by this call. AWS allows it to every caller.
    Call("sts", "GetCallerIdentity", (), role=Role.NODE),
)

CALLS: Mapping[tuple[Role, str, str], Call] = MappingProxyType(
    {(call.role, call.service, call.operation): call for call in _CALLS}
)


def actions_of(role: Role) -> frozenset[str]:
    """Returns exactly the IAM actions that a role needs."""
    return frozenset(action for call in _CALLS if call.role is role for action in call.actions)


def is_known(service: str, operation: str) -> bool:
    """Whether the control plane makes this call."""
    return any((role, service, operation) in CALLS for role in (Role.CONTROL, Role.CLUSTER))


TEXT_MOST = 400
"""Characters of AWS's message that are kept: an encoded IAM message has thousands."""

NO_CAPACITY = frozenset(
    {
        "InsufficientInstanceCapacity",
        "ReservationCapacityExceeded",
        "InsufficientFreeAddressesInSubnet",
        "Unsupported",  # this zone does not offer the type
        "UnfulfillableCapacity",
        "SpotMaxPriceTooLow",
        "InsufficientHostCapacity",
    }
)
NO_QUOTA = frozenset(
    {"VcpuLimitExceeded", "InstanceLimitExceeded", "MaxSpotInstanceCountExceeded", "PendingVerification"}
)
LATER = frozenset({"RequestLimitExceeded", "InternalError", "Unavailable", "ServiceUnavailable"})
THROTTLED = "RequestLimitExceeded"
OF_THE_SUBNET = frozenset({"InsufficientFreeAddressesInSubnet"})

_ONE_BY_ONE = {
    "IdempotentInstanceTerminated": LaunchOutcome.ATTEMPT_ENDED,
    "IdempotentParameterMismatch": LaunchOutcome.MISMATCHED,
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """The meaning of an error. `text`: AWS's message. `needs_person`: retries cannot succeed until an operator acts."""

    outcome: LaunchOutcome
    text: str
    scope: Scope = Scope.POOL
    needs_person: bool = False


def classify(code: str, message: str, http_status: int) -> Verdict:
    """Returns the meaning of an EC2 error for `RunInstances`, by its code. A 5xx with an unknown code may have been
    carried out (https://docs.aws.amazon.com/ec2/latest/devguide/ec2-api-idempotency.html)."""
    text = f"{code}: {message}"
    text = text if len(text) <= TEXT_MOST else f"{text[:TEXT_MOST]}…"
    if code in NO_CAPACITY:
        return Verdict(LaunchOutcome.NO_CAPACITY, text, Scope.SUBNET if code in OF_THE_SUBNET else Scope.POOL)
    if code in NO_QUOTA:
        return Verdict(LaunchOutcome.NO_QUOTA, text, needs_person=True)
    if code in LATER:
        return Verdict(LaunchOutcome.LATER, text)
    if code in _ONE_BY_ONE:
        return Verdict(_ONE_BY_ONE[code], text, needs_person=_ONE_BY_ONE[code] is LaunchOutcome.MISMATCHED)
    if http_status >= 500:
        return Verdict(LaunchOutcome.UNKNOWN, text)
    return Verdict(LaunchOutcome.REFUSED, text, needs_person=True)


def quota_name(instance_type: str, market: Market) -> str:
    """Returns the quota for such machines as the Service Quotas console names it; "" if no single quota applies."""
    family = _FAMILIES.get(quota_family(instance_type), quota_family(instance_type).capitalize())
    if market is Market.SPOT:
        return f"the quota of Spot requests for {family} instances"
    return f"Running On-Demand {family} instances"


_FAMILIES = {"standard": "Standard (A, C, D, H, I, M, R, T, Z)", "g": "G and VT"}
