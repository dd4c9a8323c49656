"""A launch of a unit as the parameters of EC2's `RunInstances`. Pure: no client, clock or row.

The same attempt always gives the same parameters, for EC2 compares them when a token comes again. Everything that we
must find again is tagged in the launch itself: a machine that is visible is not always one that can be tagged yet.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fleet.planning.launch_units import AttemptView
from fleet.planning.markets import Market
from fleet.planning.pools import RESERVATIONS, UnitView
from fleet.providers.aws.interfaces import interfaces_of, network_of

TAG_INSTALL = "switchyard:install"
TAG_UNIT = "switchyard:unit"
TAG_ATTEMPT = "switchyard:attempt"
TAGS = (TAG_INSTALL, TAG_UNIT, TAG_ATTEMPT, "Name")
"""All that a launch sets: policies allow no others."""

Request = dict[str, Any]

_USAGE_CLASSES = {Market.SPOT: "spot", Market.BLOCK: "capacity-block"}
"""Of the others it is `on-demand`."""
_MARKET_TYPES = {
    Market.SPOT: "spot",
    Market.BLOCK: "capacity-block",
    Market.INTERRUPTIBLE: "interruptible-capacity-reservation",
}


@dataclass(frozen=True, slots=True)
class LaunchBase:
    """What all launches of one role in a region share, from the region's stack. `security_group`: lets everything
    through from and to itself, without which EFAs do not speak. `root_device`: what the image calls its root volume."""

    install: str
    security_group: str
    instance_profile_arn: str
    root_device: str
    root_gib: int = 200


def run_instances(unit: UnitView, attempt: AttemptView, base: LaunchBase, user_data: str) -> Request:
    """The parameters of the one call of an attempt. `user_data` is plain text: boto3 encodes it.

    Raises:
        ValueError: EC2 has no such launch: the type is unknown or not sold so, or the pool lacks what its market needs.
    """
    pool = attempt.pool
    _check(unit, attempt)
    return {
        "ImageId": pool.image,
        "InstanceType": unit.instance_type,
        "MinCount": attempt.count,
        "MaxCount": attempt.count,
        "ClientToken": attempt.token,
        "UserData": user_data,
        "IamInstanceProfile": {"Arn": base.instance_profile_arn},
        "InstanceInitiatedShutdownBehavior": "terminate",
        "MetadataOptions": {
            "HttpEndpoint": "enabled",
            "HttpTokens": "required",
            "HttpPutResponseHopLimit": 1,
            "InstanceMetadataTags": "enabled",
        },
        "BlockDeviceMappings": [_root_volume(base)],
        "NetworkInterfaces": list(_interfaces(unit.instance_type, pool.subnet, base.security_group)),
        "TagSpecifications": list(_tags(unit, attempt, base.install)),
        **_market(attempt),
        **({"Placement": {"GroupName": pool.placement_group}} if pool.placement_group else {}),
    }


def _check(unit: UnitView, attempt: AttemptView) -> None:
    pool = attempt.pool
    if pool.instance_type != unit.instance_type or attempt.count != unit.count:
        raise ValueError(f"attempt {attempt.number} is not of unit {unit.id}: its type or count is another")
    usage_class(unit.instance_type, pool.market)
    if pool.market in RESERVATIONS and not pool.reservation:
        raise ValueError(f"a pool of market {pool.market} needs the id of its reservation")


def usage_class(instance_type: str, market: Market) -> str:
    """How EC2 sells machines of a type to a market, in its words.

    Raises:
        ValueError: it does not; or the type is not known.
    """
    wanted = _USAGE_CLASSES.get(market, "on-demand")
    offered = network_of(instance_type).usage_classes
    if wanted not in offered:
        raise ValueError(f"{instance_type} is not sold as {wanted}; it is as {', '.join(sorted(offered))}")
    return wanted


def _market(attempt: AttemptView) -> Request:
    """How it is bought. Without a preference EC2 would use up open reservations for what is to be bought on demand."""
    pool = attempt.pool
    asked: Request = {}
    if pool.market in _MARKET_TYPES:
        asked["InstanceMarketOptions"] = {"MarketType": _MARKET_TYPES[pool.market]}
    if pool.market is Market.SPOT:
        price = {"MaxPrice": f"{pool.max_price:.4f}"} if pool.max_price is not None else {}
        options = {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate", **price}
        asked["InstanceMarketOptions"]["SpotOptions"] = options
        return asked
    if pool.market in RESERVATIONS:
        chosen: Request = {"CapacityReservationTarget": {"CapacityReservationId": pool.reservation}}
    else:
        chosen = {"CapacityReservationPreference": "open" if pool.market is Market.OPEN else "none"}
    return asked | {"CapacityReservationSpecification": chosen}


def _root_volume(base: LaunchBase) -> Request:
    volume = {"VolumeSize": base.root_gib, "VolumeType": "gp3", "Encrypted": True, "DeleteOnTermination": True}
    return {"DeviceName": base.root_device, "Ebs": volume}


def _interfaces(instance_type: str, subnet: str, group: str) -> Iterator[Request]:
    """Subnet and group belong to each interface once there is one; a public address excludes several."""
    for one in interfaces_of(instance_type):
        yield {
            "NetworkCardIndex": one.card,
            "DeviceIndex": one.device,
            "InterfaceType": one.kind,
            "SubnetId": subnet,
            "Groups": [group],
            "DeleteOnTermination": True,
        }


def _tags(unit: UnitView, attempt: AttemptView, install: str) -> Iterator[Request]:
    """A request for spot machines may be tagged only where one is made: else EC2 refuses the launch
    (https://github.com/aws/karpenter-provider-aws/issues/5850)."""
    values = dict(zip(TAGS, (install, unit.id, str(attempt.number), f"switchyard-{unit.id}"), strict=True))
    tags = [{"Key": key, "Value": value} for key, value in values.items()]
    kinds = ["instance", "volume", "network-interface"]
    if attempt.pool.market is Market.SPOT:
        kinds.append("spot-instances-request")
    for kind in kinds:
        yield {"ResourceType": kind, "Tags": tags}
