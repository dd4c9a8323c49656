"""What a RunInstances asks for, and what EC2 refuses of it before it looks for capacity; moto takes it all."""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moto.ec2.models.instance_types import INSTANCE_TYPES

from lab.cloud.capacity import Market
from lab.cloud.wire import Call, Refused
from lab.cloud.world import World

USER_DATA_BYTES = 16384
TOKEN_LENGTH = 64


@dataclass(frozen=True)
class Launch:
    """What a request asks for. `interfaces`: the first one is the machine's own; `position`: its number in
    the form."""

    instance_type: str
    least: int
    most: int
    zone: str
    subnet: Any
    market: Market
    group: str
    reservation_id: str | None
    interfaces: Sequence[Mapping[str, Any]]
    token: str
    digest: str
    tags: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


def read_launch(world: World, call: Call) -> Launch:
    """What a request asks for.

    Raises:
        Refused: EC2 would not even look for capacity.
    """
    params = call.params
    least, most = int(params["MinCount"]), int(params["MaxCount"])
    numbered = enumerate(params.get("NetworkInterfaces") or [{}], 1)
    interfaces = sorted(({**each, "position": at} for at, each in numbered), key=card_and_device)
    market = Market((params.get("InstanceMarketOptions") or {}).get("MarketType") or Market.ON_DEMAND)
    placement = params.get("Placement") or {}
    target = (params.get("CapacityReservationSpecification") or {}).get("CapacityReservationTarget") or {}
    _check_form(params, least, most, interfaces, market)
    subnet = _subnet(world, call.region, params.get("SubnetId") or interfaces[0].get("SubnetId"), placement)
    group = placement.get("GroupName", "")
    if group and group not in world.groups.get(call.region, {}):
        raise Refused("InvalidPlacementGroup.Unknown", f"The Placement Group '{group}' is unknown.")
    return Launch(
        params.get("InstanceType", "m1.small"), least, most, subnet.availability_zone, subnet, market, group,
        target.get("CapacityReservationId"), interfaces, params.get("ClientToken", ""), _digest(params),
        {each["ResourceType"]: _pairs(each.get("Tags")) for each in params.get("TagSpecifications") or ()},
    )  # fmt: skip


def _check_form(
    params: Mapping[str, Any], least: int, most: int, interfaces: Sequence[Mapping[str, Any]], market: Market
) -> None:
    """What EC2 refuses before it looks at capacity, and moto accepts."""
    if not 1 <= least <= most:
        raise Refused("InvalidParameterValue", f"minCount {least} and maxCount {most} are no range.")
    if len(params.get("ClientToken", "")) > TOKEN_LENGTH:
        raise Refused("InvalidParameterValue", f"The client token has more than {TOKEN_LENGTH} characters.")
    if len(base64.b64decode(params.get("UserData", ""))) > USER_DATA_BYTES:
        raise Refused("InvalidParameterValue", f"User data is limited to {USER_DATA_BYTES} bytes")
    kinds = {each["ResourceType"] for each in params.get("TagSpecifications") or ()}
    if "spot-instances-request" in kinds and market is not Market.SPOT:
        raise Refused(
            "InvalidParameterCombination",
            "You cannot specify tags for Spot instances requests if there are no Spot instances requests being created "
            "by the request.",
        )
    if len(interfaces) > 1 and any(is_true(each.get("AssociatePublicIpAddress")) for each in interfaces):
        raise Refused(
            "InvalidParameterCombination",
            "The associatePublicIPAddress parameter cannot be specified when launching with multiple network "
            "interfaces.",
        )
    _check_cards(params.get("InstanceType", ""), interfaces)


def _check_cards(instance_type: str, interfaces: Sequence[Mapping[str, Any]]) -> None:
    """As DescribeInstanceTypes has it, of which moto keeps a copy."""
    network = INSTANCE_TYPES.get(instance_type, {}).get("NetworkInfo", {})
    cards = int(network.get("MaximumNetworkCards") or 1)
    most_efa = int((network.get("EfaInfo") or {}).get("MaximumEfaInterfaces") or 0)
    efa = sum(each.get("InterfaceType", "interface").startswith("efa") for each in interfaces)
    if efa > most_efa:
        raise Refused("InvalidParameterCombination", f"{instance_type} has {most_efa} EFA interfaces, not {efa}.")
    places = [card_and_device(each) for each in interfaces]
    if len(set(places)) < len(places) or max(places)[0] >= cards:
        raise Refused("InvalidParameterValue", f"{instance_type} has {cards} network cards, each place on them once.")
    if places[0] != (0, 0):
        raise Refused("InvalidParameterCombination", "The primary interface is device 0 of network card 0.")


def _digest(params: Mapping[str, Any]) -> str:
    """Of everything but the token; the zone is part of a token's key already."""
    same = sorted((key, repr(value)) for key, value in params.items() if key != "ClientToken")
    return hashlib.sha256(repr(same).encode()).hexdigest()


def card_and_device(interface: Mapping[str, Any]) -> tuple[int, int]:
    """The place of an interface; both are 0 where nothing is said."""
    return int(interface.get("NetworkCardIndex") or 0), int(interface.get("DeviceIndex") or 0)


def is_true(value: object) -> bool:
    return str(value).lower() == "true"


def _pairs(tags: Sequence[Mapping[str, str]] | None) -> dict[str, str]:
    return {each["Key"]: each.get("Value", "") for each in tags or ()}


def _subnet(world: World, region: str, subnet_id: str | None, placement: Mapping[str, Any]) -> Any:
    """moto's own; the default one of the zone where none is named."""
    ec2 = world.backend("ec2", region)
    if subnet_id:
        return ec2.get_subnet(subnet_id)
    return ec2.get_default_subnets()[placement.get("AvailabilityZone") or f"{region}a"]
