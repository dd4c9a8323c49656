"""Global Accelerator's endpoint groups: the dial of each region, and tags. moto has no such service.

Its API is in us-west-2 alone. There is no token and no revision: the last writer wins, as in AWS.
"""

import secrets
from typing import Any

from bench.cloud.wire import Call, Refused
from bench.cloud.world import World, handles

REGION = "us-west-2"
SERVICE = "globalaccelerator"


@handles(SERVICE, "CreateEndpointGroup")
def create_endpoint_group(world: World, call: Call) -> dict[str, Any]:
    """One of each region and listener, open unless it says otherwise."""
    _check_region(call)
    listener, region = call.params["ListenerArn"], call.params["EndpointGroupRegion"]
    if any((arn.startswith(listener), each["EndpointGroupRegion"]) == (True, region) for arn, each in _all(world)):
        raise Refused("EndpointGroupAlreadyExistsException", f"{listener} has an endpoint group in {region}.")
    arn = f"{listener}/endpoint-group/{secrets.token_hex(6)}"
    world.endpoint_groups[arn] = {
        "EndpointGroupArn": arn, "EndpointGroupRegion": region,
        "TrafficDialPercentage": _dial(call.params.get("TrafficDialPercentage", 100.0)),
    }  # fmt: skip
    world.tags[arn] = {each["Key"]: each["Value"] for each in call.params.get("Tags") or ()}
    return {"EndpointGroup": world.endpoint_groups[arn]}


@handles(SERVICE, "DescribeEndpointGroup")
def describe_endpoint_group(world: World, call: Call) -> dict[str, Any]:
    """By its ARN."""
    return {"EndpointGroup": _known(world, call, "EndpointGroupArn")}


@handles(SERVICE, "UpdateEndpointGroup")
def update_endpoint_group(world: World, call: Call) -> dict[str, Any]:
    """What is given; the rest stays."""
    group = _known(world, call, "EndpointGroupArn")
    if "TrafficDialPercentage" in call.params:
        group["TrafficDialPercentage"] = _dial(call.params["TrafficDialPercentage"])
    return {"EndpointGroup": group}


@handles(SERVICE, "TagResource")
def tag_resource(world: World, call: Call) -> dict[str, Any]:
    """More tags, or other values."""
    _known(world, call, "ResourceArn")
    world.tags[call.params["ResourceArn"]] |= {each["Key"]: each["Value"] for each in call.params["Tags"]}
    return {}


@handles(SERVICE, "ListTagsForResource")
def list_tags_for_resource(world: World, call: Call) -> dict[str, Any]:
    """All of them."""
    _known(world, call, "ResourceArn")
    tags = world.tags[call.params["ResourceArn"]]
    return {"Tags": [{"Key": key, "Value": value} for key, value in tags.items()]}


def _all(world: World) -> list[tuple[str, dict[str, Any]]]:
    return list(world.endpoint_groups.items())


def _check_region(call: Call) -> None:
    if call.region != REGION:
        raise Refused("UnrecognizedClientException", f"Global Accelerator is in {REGION} alone, not in {call.region}.")


def _known(world: World, call: Call, name: str) -> dict[str, Any]:
    _check_region(call)
    group = world.endpoint_groups.get(call.params[name])
    if group is None:
        raise Refused("EndpointGroupNotFoundException", f"There is no endpoint group {call.params[name]}.")
    return group


def _dial(percent: float) -> float:
    if not 0 <= float(percent) <= 100:
        raise Refused("InvalidArgumentException", f"A dial of {percent} % is not from 0 to 100.")
    return float(percent)
