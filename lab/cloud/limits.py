"""How often calls may be made and how many vCPUs may run: AWS's token buckets and quotas, by account and region.

Buckets are from "Request throttling for the Amazon EC2 API"; names and codes of quotas from Service Quotas.
"""

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

from lab.cloud.wire import Call, Refused


class Bucket(NamedTuple):
    """Tokens it holds, and how many come back each second."""

    size: float
    refill: float


READS = Bucket(100, 20)
UNPAGED_READS = Bucket(50, 10)
"""Of DescribeInstances and DescribeInstanceStatus without a filter or pages."""
WRITES = Bucket(50, 5)
BY_OPERATION = {
    "RunInstances": Bucket(5, 2),
    "TerminateInstances": Bucket(100, 5),
    "CreateTags": Bucket(100, 10),
    "DescribeInstanceTopology": Bucket(1, 1),
    "DescribeCapacityBlockOfferings": Bucket(10, 0.15),
    "PurchaseCapacityBlock": Bucket(10, 0.15),
    "CreateLaunchTemplateVersion": Bucket(100, 5),
}
INSTANCES = {"RunInstances": Bucket(1000, 2), "TerminateInstances": Bucket(1000, 20)}
"""A second bucket of these calls: of machines."""
CHANGES = Bucket(5, 5)
"""Of Route 53, an account."""
UNPAGED = ("DescribeInstances", "DescribeInstanceStatus")


class Limits:
    """The buckets. Off until a test switches them on: `enforced`."""

    def __init__(self, *, enforced: bool = False) -> None:
        self.enforced = enforced
        self._left: dict[tuple[str, str], tuple[float, float]] = {}

    def take(self, call: Call, now: float) -> None:
        """A token for a call.

        Raises:
            Refused: RequestLimitExceeded, or Throttling of Route 53.
        """
        if not self.enforced:
            return
        if call.service == "route53":
            self._take(("", "route53"), CHANGES, 1, now, "Throttling")
        elif call.service == "ec2":
            if call.operation in INSTANCES:
                machines = int(call.form.get("MaxCount") or sum("InstanceId." in key for key in call.form))
                self._take((call.region, f"{call.operation} machines"), INSTANCES[call.operation], machines, now)
            name, bucket = _ec2_bucket(call)
            self._take((call.region, name), bucket, 1, now)

    def _take(
        self, key: tuple[str, str], bucket: Bucket, tokens: int, now: float, code: str = "RequestLimitExceeded"
    ) -> None:
        left, at = self._left.get(key, (bucket.size, now))
        left = min(bucket.size, left + (now - at) * bucket.refill)
        self._left[key] = (left, now)
        if left < tokens:
            raise Refused(code, "Request limit exceeded.")
        self._left[key] = (left - tokens, now)


def _ec2_bucket(call: Call) -> tuple[str, Bucket]:
    if call.operation in BY_OPERATION:
        return call.operation, BY_OPERATION[call.operation]
    if not call.operation.startswith(("Describe", "Get")):
        return "writes", WRITES
    asked = any(key.startswith(("Filter.", "MaxResults", "InstanceId.")) for key in call.form)
    return ("unpaged", UNPAGED_READS) if call.operation in UNPAGED and not asked else ("reads", READS)


FAMILIES = {"p": "P", "g": "G and VT", "vt": "G and VT", "inf": "Inf", "trn": "Trn"}
STANDARD = "Standard (A, C, D, H, I, M, R, T, Z)"


def quota_of(instance_type: str, *, spot: bool) -> str:
    """Name of the quota that counts an instance type's vCPUs, as Service Quotas spells it."""
    family = re.match("[a-z]+", instance_type)
    name = FAMILIES.get(family[0] if family else "", STANDARD)
    return f"All {name} Spot Instance Requests" if spot else f"Running On-Demand {name} instances"


def check_quota(quotas: Mapping[str, int], instance_type: str, vcpus: int, running: int, *, spot: bool) -> None:
    """`vcpus` more beside those that are `running` in the same quota.

    Raises:
        Refused: VcpuLimitExceeded, or MaxSpotInstanceCountExceeded.
    """
    most = quotas.get(quota_of(instance_type, spot=spot), math.inf)
    if running + vcpus > most and spot:
        raise Refused("MaxSpotInstanceCountExceeded", "Max spot instance count exceeded")
    if running + vcpus > most:
        raise Refused(
            "VcpuLimitExceeded",
            f"You have requested more vCPU capacity than your current vCPU limit of {most} allows for the instance "
            "bucket that the specified instance type belongs to.",
        )
