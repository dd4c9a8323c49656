"""Checks what an account allows this install in a region, call by call, with dry runs for calls that would change
something. Changes nothing, in AWS or here."""

import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from functools import partial
from math import inf
from typing import Any

from fleet.capacity.planning.pools import RESERVATIONS, Market, UnitView
from fleet.clouds.aws.actions import TEXT_MOST, quota_name
from fleet.clouds.aws.calls import PAGES_MOST, CallFailed, Refused, call
from fleet.clouds.aws.launch import LaunchBase, instance_networks, run_instances
from fleet.clouds.aws.region import StackRefused, region_read
from fleet.clouds.models import CapacityPool, CloudRegion
from fleet.clouds.planning.launches import AttemptView
from fleet.clouds.planning.upkeep import CloudBase
from fleet.deployments.selectors import instance_types_wanted
from fleet.machines.models import Machine
from fleet.nodes.models import Node
from fleet.reconcile.planning.states import NodeState
from kernel import clock
from models_registry.instance_types.models import InstanceType
from models_registry.instance_types.selectors import instance_shapes

DENIED = frozenset({"UnauthorizedOperation", "AccessDenied", "AccessDeniedException", "AuthorizationError"})
ENCODED = re.compile(r"Encoded authorization failure message: ([A-Za-z0-9_-]{1,10000})")
PRICE_LIST = "us-east-1"
DRY_RUN = "DryRunOperation"
"""The error of a dry run that would have succeeded."""

OWN_TURNS = 5
OWN_WAIT_MOST_S = 10.0
"""Wait for the own call budget: dry runs of RunInstances use it up after four pools, and it refills at 1.6 a second."""

Send = Callable[..., dict[str, Any]]


class Verdict(StrEnum):
    """An operator must fix `denied` and `missing`. `unknown`: no answer, or nothing to test with."""

    ALLOWED = "allowed"
    DENIED = "denied"
    MISSING = "missing"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Finding:
    """`text`: the consequence, or AWS's message."""

    verdict: Verdict
    what: str
    text: str = ""


def region_check(
    cloud: CloudRegion, install: str, now: datetime, wait: Callable[[float], None] = time.sleep
) -> Iterator[Finding]:
    """Yields the findings about one region as they come: tens of calls, some seconds. `wait` sleeps for so many
    seconds."""
    send = partial(send_in_turn, wait)
    types = sorted(instance_types_wanted())
    try:
        read = region_read(cloud.aws_region, cloud.stack, install, instance_shapes(types), send)
    except StackRefused as refused:
        yield Finding(Verdict.MISSING, f"stack {cloud.stack}", str(refused))
        return
    except CallFailed as error:
        yield failed_finding(f"stack {cloud.stack}", error, cloud.aws_region, send)
        return
    yield Finding(Verdict.ALLOWED, f"stack {cloud.stack}", f"zones {', '.join(read.base.zones)}")
    yield from stack_drift(cloud, read.base)
    yield from _describe_images(read.base, cloud.aws_region, send)
    for service, operation, region, params in _read_calls(cloud.aws_region, read.base):
        yield try_call(service, operation, region, params, send)
    pools = list(CapacityPool.objects.filter(region_id=cloud.pk, enabled=True))
    for pool in pools:
        yield _check_launch(pool, read.base, install, now, cloud.aws_region, send)
    yield _check_termination(cloud, send)
    yield from _check_offers(types, {each.instance_type for each in read.pools})
    yield from _check_quotas(cloud, pools, send)


def _describe_images(base: CloudBase, region: str, send: Send) -> Iterator[Finding]:
    """Lists the stack's images with their dates, so that a person can pin them."""
    try:
        found = send("ec2", "DescribeImages", region, ImageIds=sorted(base.root_devices))["Images"]
    except CallFailed as error:
        yield failed_finding("images", error, region, send)
        return
    for image in sorted(found, key=lambda each: str(each["ImageId"])):
        made = str(image.get("CreationDate", ""))[:10] or "an unknown day"
        text = f"{image.get('Name') or 'without a name'}, for {image.get('Architecture')}, made on {made}"
        yield Finding(Verdict.ALLOWED, f"image {image['ImageId']}", text)


def send_in_turn(wait: Callable[[float], None], *names: str, **params: Any) -> dict[str, Any]:
    """Makes a call once the own budget allows it; other processes use the same budget. Raises CallFailed as `call`
    does, or if the budget stayed used up."""
    for _ in range(OWN_TURNS - 1):
        try:
            return call(*names, **params)
        except Refused as refused:
            ahead_s = (refused.not_before - clock.now()).total_seconds() if refused.not_before is not None else None
            if ahead_s is None or ahead_s > OWN_WAIT_MOST_S:
                raise
            wait(max(ahead_s, 0.0))
    return call(*names, **params)


def stack_drift(cloud: CloudRegion, base: CloudBase) -> Iterator[Finding]:
    if not cloud.base:
        return
    known = cloud.stated_base()
    for name in CloudBase.__dataclass_fields__:
        before, stated = getattr(known, name), getattr(base, name)
        if before != stated:
            text = f"in use is {before!r}, the stack states {stated!r}; the stack is read again within a day"
            yield Finding(Verdict.MISSING, f"stack {cloud.stack}: {name}", text)


def _read_calls(region: str, base: CloudBase) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    few: dict[str, Any] = {"MaxResults": 5}
    for operation, params in {
        "DescribeInstances": few, "DescribeInstanceStatus": few, "DescribeInstanceTopology": few,
        "DescribeCapacityReservations": few, "DescribeCapacityReservationTopology": few,
        "DescribeVolumes": few, "DescribeNetworkInterfaces": few, "DescribeSpotInstanceRequests": few,
    }.items():  # fmt: skip
        yield "ec2", operation, region, params
    for operation, params in watching_calls():
        yield "cloudwatch", operation, region, params
    for url in (base.queue_url, base.dead_letter_url):
        yield "sqs", "GetQueueAttributes", region, {"QueueUrl": url, "AttributeNames": ["QueueArn"]}
    for arn in base.target_groups.values():
        yield "elbv2", "DescribeTargetHealth", region, {"TargetGroupArn": arn}
    yield "s3", "ListObjectsV2", region, {"Bucket": base.bucket, "Prefix": "control/", "MaxKeys": 1}
    if base.hosted_zone:
        first = {"HostedZoneId": base.hosted_zone, "MaxItems": "1"}
        yield "route53", "ListResourceRecordSets", region, first
    yield "pricing", "GetProducts", PRICE_LIST, {"ServiceCode": "AmazonEC2", "MaxResults": 1}


def watching_calls() -> Iterator[tuple[str, dict[str, Any]]]:
    """The calls of CloudWatch that regions with alarms and policies with metrics need."""
    at = clock.now()
    metric = {"Metric": {"Namespace": "AWS/EC2", "MetricName": "CPUUtilization"}, "Period": 60, "Stat": "Average"}
    queries = [{"Id": "m0", "MetricStat": metric}]
    yield "DescribeAlarms", {"MaxRecords": 1}
    yield "GetMetricData", {"MetricDataQueries": queries, "StartTime": at - timedelta(minutes=1), "EndTime": at}


def try_call(
    service: str, operation: str, region: str, params: Mapping[str, Any], send: Send, what: str = ""
) -> Finding:
    what = what or f"{service} {operation}"
    try:
        send(service, operation, region, **params)
    except CallFailed as error:
        return failed_finding(what, error, region, send)
    return Finding(Verdict.ALLOWED, what)


def failed_finding(what: str, error: CallFailed, region: str, send: Send) -> Finding:
    if error.code == DRY_RUN:
        return Finding(Verdict.ALLOWED, what, "by a dry run")
    if error.code in DENIED:
        return Finding(Verdict.DENIED, what, _decode_denial(error, region, send))
    if not error.code or error.http_status >= 500:
        return Finding(Verdict.UNKNOWN, what, str(error))
    return Finding(Verdict.MISSING, what, str(error))


def _decode_denial(error: CallFailed, region: str, send: Send) -> str:
    """Why a call was denied, if this role may decode it: AWS encodes the policy that denied it."""
    if not (encoded := ENCODED.search(error.whole)):
        return str(error)
    try:
        return str(
            send("sts", "DecodeAuthorizationMessage", region, EncodedMessage=encoded[1])["DecodedMessage"]
        )[:TEXT_MOST]  # fmt: skip
    except CallFailed:
        return f"{error.code}; why cannot be decoded"


def _check_launch(pool: CapacityPool, base: CloudBase, install: str, now: datetime, region: str, send: Send) -> Finding:
    """One machine, as a unit would ask for it."""
    view = pool.view()
    what = f"ec2 RunInstances of {view.instance_type} from {view.name}"
    is_node = InstanceType.objects.get(name=view.instance_type).accelerator != "none"
    launch_base = LaunchBase(
        install=install,
        security_group=base.node_group if is_node else base.ingress_group,
        instance_profile_arn=base.node_profile if is_node else base.ingress_profile,
        root_device=base.root_device_of(pool.image),
        root_gib=base.root_gib,
    )
    unit = UnitView("aws-check", pool.region_id, view.instance_type, 1, frozenset(Market))
    try:
        request = run_instances(unit, AttemptView(1, "aws-check", view, 1, now, now), launch_base, "#!/bin/sh\n")
    except ValueError as error:
        return Finding(Verdict.MISSING, what, str(error))
    del request["ClientToken"]  # AWS would remember a token with these parameters
    return try_call("ec2", "RunInstances", region, request | {"DryRun": True}, send, what)


def _check_termination(cloud: CloudRegion, send: Send) -> Finding:
    what = "ec2 TerminateInstances"
    machine = Machine.objects.filter(region_id=cloud.pk, provider="aws").exclude(provider_id="").first()
    if machine is None:
        return Finding(Verdict.UNKNOWN, what, "there is no machine yet to test it with")
    params = {"InstanceIds": [machine.provider_id], "DryRun": True}
    return try_call("ec2", "TerminateInstances", cloud.aws_region, params, send)


def _check_offers(types: list[str], offered: set[str]) -> Iterator[Finding]:
    for kind in sorted(set(types) & set(instance_networks())):
        if kind not in offered:
            text = "no zone of the stack and no reservation offers it"
            yield Finding(Verdict.UNKNOWN, f"type {kind}", text)


def _check_quotas(cloud: CloudRegion, pools: list[CapacityPool], send: Send) -> Iterator[Finding]:
    """Compares the vCPUs of wanted machines, or of one machine of each type with a pool, with the quotas. Reserved
    capacity has no quota."""
    kinds = sorted({pool.instance_type_id for pool in pools if pool.market not in {*RESERVATIONS, Market.SPOT}})
    if not kinds:
        return
    region = cloud.aws_region
    try:
        found = send("ec2", "DescribeInstanceTypes", region, InstanceTypes=kinds)["InstanceTypes"]
        limits = dict(_quota_limits(region, send))
    except CallFailed as error:
        yield failed_finding("quotas", error, region, send)
        return
    vcpus = {each["InstanceType"]: int(each["VCpuInfo"]["DefaultVCpus"]) for each in found}
    wanted: dict[str, int] = {}
    for kind in kinds:
        rows = Node.objects.filter(region_id=cloud.pk, instance_type_id=kind).exclude(state=NodeState.RETIRED)
        name = quota_name(kind, Market.ON_DEMAND)
        wanted[name] = wanted.get(name, 0) + vcpus.get(kind, 0) * max(1, rows.count())
    for name, needed in sorted(wanted.items()):
        limit = limits.get(name, inf)
        if name not in limits:
            yield Finding(Verdict.UNKNOWN, f"quota {name}", "AWS lists no such quota")
        else:
            verdict = Verdict.ALLOWED if limit >= needed else Verdict.MISSING
            yield Finding(verdict, f"quota {name}", f"{limit:.0f} vCPUs; {needed} are needed")


def _quota_limits(region: str, send: Send) -> Iterator[tuple[str, float]]:
    token = ""
    for _ in range(PAGES_MOST):
        more = {"NextToken": token} if token else {}
        page = send("service-quotas", "ListServiceQuotas", region, ServiceCode="ec2", **more)
        for each in page["Quotas"]:
            yield each["QuotaName"], float(each["Value"])
        token = page.get("NextToken") or ""
        if not token:
            return
