"""Checks what an account allows this install in a region that is an ECS cluster, call by call. ECS has no dry runs, so
calls that would change something name things that do not exist: ECS checks permissions first. Changes nothing, in AWS
or here."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial
from typing import Any

from fleet.clouds.aws.calls import CallFailed
from fleet.clouds.aws.check import (
    Finding,
    Send,
    Verdict,
    failed_finding,
    send_in_turn,
    stack_drift,
    try_call,
    watching_calls,
)
from fleet.clouds.aws.region import StackRefused
from fleet.clouds.ecs.cluster import instances_read
from fleet.clouds.ecs.region import cluster_read
from fleet.clouds.models import CloudRegion
from fleet.clouds.planning.upkeep import CloudBase, ClusterBase
from fleet.deployments.selectors import instance_types_wanted
from fleet.machines.planner import INGRESS_TYPE

NOTHING = "0" * 32
"""The ID of no task, container instance or revision."""
ABSENT = frozenset(
    {"ClientException", "InvalidParameterException", "ResourceNotFoundException", "TargetNotFoundException"}
)
"""Errors of ECS for things that do not exist, after it has checked the permission."""
BY_A_CALL = "by a call about nothing"


def cluster_check(
    cloud: CloudRegion, install: str, now: datetime, wait: Callable[[float], None] = time.sleep
) -> Iterator[Finding]:
    """Yields the findings about one region as they come. `wait` sleeps for so many seconds."""
    send = partial(send_in_turn, wait)
    region = cloud.aws_region
    try:
        base = cluster_read(region, cloud.stack, install, send).base
    except StackRefused as refused:
        yield Finding(Verdict.MISSING, f"stack {cloud.stack}", str(refused))
        return
    except CallFailed as error:
        yield failed_finding(f"stack {cloud.stack}", error, region, send)
        return
    if base.cluster is None:
        raise ValueError(f"stack {cloud.stack} was read without a cluster")
    yield Finding(
        Verdict.ALLOWED, f"stack {cloud.stack}", f"cluster {base.cluster.name}, nodes run {base.cluster.image}"
    )
    yield from stack_drift(cloud, base)
    for service, operation, params in _read_calls(base):
        yield try_call(service, operation, region, params, send)
    for operation, params in _probes(base.cluster, base.account, region):
        yield _probe(operation, region, params, send)
    yield Finding(Verdict.UNKNOWN, "ecs RegisterTaskDefinition", "only a launch can test it, and passing the roles")
    yield from _machines(region, base)


def _read_calls(base: CloudBase) -> Iterator[tuple[str, str, dict[str, Any]]]:
    yield "ec2", "DescribeInstances", {"MaxResults": 5}
    yield "ec2", "DescribeInstanceTopology", {"MaxResults": 5}
    for operation, params in watching_calls():
        yield "cloudwatch", operation, params
    for url in (base.queue_url, base.dead_letter_url):
        yield "sqs", "GetQueueAttributes", {"QueueUrl": url, "AttributeNames": ["QueueArn"]}
    for arn in base.target_groups.values():
        yield "elbv2", "DescribeTargetHealth", {"TargetGroupArn": arn}
    yield "s3", "ListObjectsV2", {"Bucket": base.bucket, "Prefix": "control/", "MaxKeys": 1}


def _probes(cluster: ClusterBase, account: str, region: str) -> Iterator[tuple[str, dict[str, Any]]]:
    there = {"cluster": cluster.name}
    instance, revision = {"containerInstances": [NOTHING]}, f"switchyard-none-{NOTHING}:1"
    yield "ListContainerInstances", there | {"maxResults": 1}
    yield "DescribeContainerInstances", there | instance
    yield "ListTasks", there | {"maxResults": 1}
    yield "DescribeTasks", there | {"tasks": [NOTHING]}
    yield "ListTaskDefinitions", {"familyPrefix": f"switchyard-none-{NOTHING}"}
    yield "DescribeTaskDefinition", {"taskDefinition": revision}
    yield "DeregisterTaskDefinition", {"taskDefinition": revision}
    yield "StartTask", there | instance | {"taskDefinition": revision}
    yield "StopTask", there | {"task": NOTHING}
    attribute = {"name": "switchyard.path", "value": "none", "targetType": "container-instance", "targetId": NOTHING}
    yield "PutAttributes", there | {"attributes": [attribute]}
    task = f"arn:aws:ecs:{region}:{account}:task/{cluster.name}/{NOTHING}"
    yield "TagResource", {"resourceArn": task, "tags": [{"key": "switchyard:cell", "value": ""}]}


def _probe(operation: str, region: str, params: dict[str, Any], send: Send) -> Finding:
    what = f"ecs {operation}"
    try:
        send("ecs", operation, region, **params)
    except CallFailed as error:
        is_absent = error.code in ABSENT and error.http_status < 500
        return Finding(Verdict.ALLOWED, what, BY_A_CALL) if is_absent else failed_finding(what, error, region, send)
    return Finding(Verdict.ALLOWED, what)


def _machines(region: str, base: CloudBase) -> Iterator[Finding]:
    """Container instances by type, and wanted types that have none."""
    if base.cluster is None:
        return
    try:
        instances = instances_read(region, base.cluster.name)
    except CallFailed as error:
        yield Finding(Verdict.UNKNOWN, "container instances", str(error))
        return
    counts = Counter(one.instance_type for one in instances)
    usable = Counter(one.instance_type for one in instances if one.connected and one.status == "ACTIVE")
    for kind, count in sorted(counts.items()):
        text = f"{count}, of which {usable[kind]} are active with a connected ECS agent"
        yield Finding(Verdict.ALLOWED if usable[kind] else Verdict.MISSING, f"container instances of {kind}", text)
    wanted = {*instance_types_wanted(), *((INGRESS_TYPE,) if base.zones else ())}
    for kind in sorted(wanted - set(counts)):
        yield Finding(Verdict.UNKNOWN, f"container instances of {kind}", "there are none; its nodes wait")
