"""Lists and deletes volumes, network interfaces and spot requests of this install that are attached to nothing, and
terminates machines. EC2 filters the lists, so they are short however large the fleet is."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from fleet.planning.garbage_collection import ResourceKind
from fleet.providers.aws import calls
from fleet.providers.aws.launch import TAG_INSTALL, TAG_UNIT

PAGE = 500


@dataclass(frozen=True, slots=True)
class Unattached:
    """`unit`: from its tags, or "". `created_at`: None for network interfaces, because EC2 does not state it."""

    kind: ResourceKind
    id: str
    unit: str
    created_at: datetime | None


def unattached_list(region: str, install: str) -> list[Unattached]:
    """Lists them in a region as AWS names it. A spot request counts while it is open and has no machine.

    Raises:
        CallFailed: The list is not complete.
    """
    return [
        *(
            _unattached(ResourceKind.VOLUME, one["VolumeId"], one.get("Tags"), one.get("CreateTime"))
            for one in _listed(region, install, "DescribeVolumes", "Volumes", status="available")
        ),
        *(
            _unattached(ResourceKind.INTERFACE, one["NetworkInterfaceId"], one.get("TagSet"), None)
            for one in _listed(region, install, "DescribeNetworkInterfaces", "NetworkInterfaces", status="available")
        ),
        *(
            _unattached(ResourceKind.SPOT_REQUEST, one["SpotInstanceRequestId"], one.get("Tags"), one.get("CreateTime"))
            for one in _listed(region, install, "DescribeSpotInstanceRequests", "SpotInstanceRequests", state="open")
            if not one.get("InstanceId")
        ),
    ]


def unattached_delete(region: str, kind: ResourceKind, name: str) -> None:
    """Deletes one. EC2 refuses if it was attached in the meantime.

    Raises:
        CallFailed: It may still exist.
    """
    match kind:
        case ResourceKind.VOLUME:
            calls.call("ec2", "DeleteVolume", region, VolumeId=name)
        case ResourceKind.INTERFACE:
            calls.call("ec2", "DeleteNetworkInterface", region, NetworkInterfaceId=name)
        case ResourceKind.SPOT_REQUEST:
            calls.call("ec2", "CancelSpotInstanceRequests", region, SpotInstanceRequestIds=[name])


def machines_terminate(region: str, names: Sequence[str]) -> None:
    """Terminates machines by one call.

    Raises:
        CallFailed: They may still run.
    """
    calls.call("ec2", "TerminateInstances", region, machines=len(names), InstanceIds=list(names))


def _listed(region: str, install: str, operation: str, member: str, **filters: str) -> Iterator[dict[str, Any]]:
    wanted = {f"tag:{TAG_INSTALL}": install, **filters}
    asked = [{"Name": name, "Values": [value]} for name, value in wanted.items()]
    for page in calls.pages(operation, region, Filters=asked, MaxResults=PAGE):
        yield from page[member]


def _unattached(kind: ResourceKind, name: str, tags: Any, created_at: Any) -> Unattached:
    unit = next((tag["Value"] for tag in tags or () if tag["Key"] == TAG_UNIT), "")
    return Unattached(kind, name, unit, created_at)
