"""Volumes, network interfaces and requests for spot machines of this install that are attached to nothing: lists and
ends them. EC2 filters the lists, so they are short however large the fleet is."""

from collections.abc import Iterator
from typing import Any

from fleet.planning.cloud_leftovers import Leftover, LeftoverKind
from fleet.providers.aws import calls
from fleet.providers.aws.launch import TAG_INSTALL, TAG_UNIT

PAGE = 500


def leftovers_list(region: str, install: str) -> list[Leftover]:
    """All of them, in a region as AWS calls it. A request is one while no machine came of it, or is still to come.

    Raises:
        CallFailed: it is not known; what came before is no whole list.
    """
    return [
        *(
            _leftover(LeftoverKind.VOLUME, one["VolumeId"], one.get("Tags"), one.get("CreateTime"))
            for one in _listed(region, install, "DescribeVolumes", "Volumes", status="available")
        ),
        *(
            _leftover(LeftoverKind.INTERFACE, one["NetworkInterfaceId"], one.get("TagSet"), None)
            for one in _listed(region, install, "DescribeNetworkInterfaces", "NetworkInterfaces", status="available")
        ),
        *(
            _leftover(LeftoverKind.SPOT_REQUEST, one["SpotInstanceRequestId"], one.get("Tags"), one.get("CreateTime"))
            for one in _listed(region, install, "DescribeSpotInstanceRequests", "SpotInstanceRequests", state="open")
            if not one.get("InstanceId")
        ),
    ]


def leftover_end(region: str, one: Leftover) -> None:
    """EC2 refuses it for what was attached meanwhile.

    Raises:
        CallFailed: it may still be there.
    """
    match one.kind:
        case LeftoverKind.VOLUME:
            calls.call("ec2", "DeleteVolume", region, VolumeId=one.provider_id)
        case LeftoverKind.INTERFACE:
            calls.call("ec2", "DeleteNetworkInterface", region, NetworkInterfaceId=one.provider_id)
        case LeftoverKind.SPOT_REQUEST:
            calls.call("ec2", "CancelSpotInstanceRequests", region, SpotInstanceRequestIds=[one.provider_id])


def _listed(region: str, install: str, operation: str, member: str, **filters: str) -> Iterator[dict[str, Any]]:
    wanted = {f"tag:{TAG_INSTALL}": install, **filters}
    asked = [{"Name": name, "Values": [value]} for name, value in wanted.items()]
    for page in calls.pages(operation, region, Filters=asked, MaxResults=PAGE):
        yield from page[member]


def _leftover(kind: LeftoverKind, provider_id: str, tags: Any, created_at: Any) -> Leftover:
    unit = next((tag["Value"] for tag in tags or () if tag["Key"] == TAG_UNIT), "")
    return Leftover(kind, provider_id, unit, created_at)
