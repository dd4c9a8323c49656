"""Builds the parameters of EC2's `RunInstances` for an attempt: network interfaces, first-boot script and tags. Pure:
no client, clock or row. The same attempt always gives the same parameters, because EC2 compares them when a token is
repeated. Everything that must be found again is tagged by the launch itself, because a visible machine cannot always be
tagged yet. The boot script (`first_boot.sh`) has no secret, since every process on the machine can read it. It makes a
cache of the instance's own disks, then fetches the join script from the control plane, so that the text is the same in
every release. A machine that never joins shuts itself down. Interfaces come from `instance_interfaces.json`, an extract
of `DescribeInstanceTypes`; all machines of a type get the same ones, because a spare must fit any cell."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from shlex import quote
from typing import Any

from engine_agent.protocol.strict_json import strict_loads
from fleet.capacity.planning.pools import RESERVATIONS, Market, UnitView
from fleet.clouds.planning.launches import AttemptView

TABLE = Path(__file__).with_name("instance_interfaces.json")
SCRIPT = Path(__file__).with_name("first_boot.sh")


@dataclass(frozen=True, slots=True)
class InstanceNetwork:
    """`efa_cards`: indices of the network cards that support EFA. `usage_classes` as EC2 names them: `on-demand`,
    `spot`, `capacity-block`."""

    cards: int
    efa_cards: tuple[int, ...]
    usage_classes: frozenset[str]


@dataclass(frozen=True, slots=True)
class Interface:
    """`kind` as EC2 names it: an `interface` has an address; an `efa-only` has none and reaches only other EFAs."""

    card: int
    device: int
    kind: str


@cache
def instance_networks() -> dict[str, InstanceNetwork]:
    rows: dict[str, dict[str, Any]] = strict_loads(TABLE.read_bytes())["instance_types"]
    return {
        name: InstanceNetwork(row["cards"], tuple(row["efa_cards"]), frozenset(row["usage_classes"]))
        for name, row in rows.items()
    }


def network_of(instance_type: str) -> InstanceNetwork:
    """Returns the network of an instance type. Raises ValueError if it is not in the table."""
    found = instance_networks().get(instance_type)
    if found is None:
        raise ValueError(f"the network cards of {instance_type} are not known; add it to {TABLE.name}")
    return found


def interfaces_of(instance_type: str) -> tuple[Interface, ...]:
    """Returns the interfaces of a machine: one with its address, and an EFA on each card that supports it.

    From "Maximize network bandwidth on Amazon EC2 instances with multiple network cards"
    (https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-acc-inst-types.html): card 0, device 0 is an `interface`;
    if card 0 supports EFA, its device 1 is `efa-only`; each further card has an `efa-only` as device 0. Its example for
    P5 has 32 EFAs and one address. A layout for P5 and P5e with several addresses for more IP bandwidth is not used: a
    node has one address. Older guides, such as Neuron's for trn1, use device 1 throughout and `efa` on card 0. Not
    tested on hardware. Raises ValueError if the type is not in the table."""
    efas = (Interface(card, 0 if card else 1, "efa-only") for card in network_of(instance_type).efa_cards)
    return (Interface(0, 0, "interface"), *efas)


BYTES_MOST = 16 * 1024
"""EC2's limit, before base64."""
JOIN_PATH = "/join/aws"
TRIES_FOR_S = 3600
"""The control plane terminates machines that have not joined after a third of this."""


@dataclass(frozen=True, slots=True)
class Boot:
    """Values for a machine's boot script. `pin`: of the control plane's public keys, as curl takes it; "" if the image
    trusts the authority of its certificate. `install`, `unit`: as in the machine's tags."""

    server: str
    pin: str
    region: str
    install: str
    unit: str


_FORMS = {
    "server": re.compile(r"https://[A-Za-z0-9.:\[\]-]{1,260}"),
    "pin": re.compile(r"(sha256//[A-Za-z0-9+/]{43}=(;sha256//[A-Za-z0-9+/]{43}=){0,7})?"),
    "region": re.compile(r"[a-z]{2,4}(-[a-z]{2,12}){1,3}-[0-9]{1,2}"),
    "install": re.compile(r"sw-[0-9a-f]{12}"),
    "unit": re.compile(r"[a-z0-9-]{1,64}"),
}


def user_data(boot: Boot) -> str:
    """Returns the shell script of a machine's first boot, which cloud-init runs once. Raises ValueError if a value has
    the wrong form."""
    for name, form in _FORMS.items():
        if not form.fullmatch(getattr(boot, name)):
            raise ValueError(f"{name} {getattr(boot, name)!r} does not match {form.pattern}")
    known = {
        "SERVER": boot.server,
        "PIN": boot.pin,
        "AWS_REGION": boot.region,
        "INSTALL": boot.install,
        "UNIT": boot.unit,
        "JOIN_PATH": JOIN_PATH,
        "TRIES_FOR_S": str(TRIES_FOR_S),
    }
    lines = "".join(f"{name}={quote(value)}\n" for name, value in known.items())
    about = f"# Joins this machine to the Switchyard at {boot.server}. There is no secret in it."
    return f"#!/bin/sh\n{about}\n{lines}{SCRIPT.read_text()}"


TAG_INSTALL = "switchyard:install"
TAG_UNIT = "switchyard:unit"
TAG_ATTEMPT = "switchyard:attempt"
TAGS = (TAG_INSTALL, TAG_UNIT, TAG_ATTEMPT, "Name")
"""All tags of a launch: policies allow no others."""

Request = dict[str, Any]

_USAGE_CLASSES = {Market.SPOT: "spot", Market.BLOCK: "capacity-block"}
"""Other markets are `on-demand`."""
_MARKET_TYPES = {
    Market.SPOT: "spot",
    Market.BLOCK: "capacity-block",
    Market.INTERRUPTIBLE: "interruptible-capacity-reservation",
}


@dataclass(frozen=True, slots=True)
class LaunchBase:
    """Shared by all launches of one role in a region; from the region's stack. `security_group` allows all traffic
    within itself, which EFAs need. `root_device`: the image's name for its root volume."""

    install: str
    security_group: str
    instance_profile_arn: str
    root_device: str
    root_gib: int = 200


def run_instances(unit: UnitView, attempt: AttemptView, base: LaunchBase, user_data: str) -> Request:
    """Returns the parameters of an attempt's call. `user_data` is plain text: boto3 encodes it. Raises ValueError if
    EC2 cannot launch this: the type is unknown or not sold in this market, or the pool lacks a value."""
    pool = attempt.pool
    _check_attempt(unit, attempt)
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
        "NetworkInterfaces": list(_interface_specs(unit.instance_type, pool.subnet, base.security_group)),
        "TagSpecifications": list(_tag_specs(unit, attempt, base.install)),
        **_market_options(attempt),
        **({"Placement": {"GroupName": pool.placement_group}} if pool.placement_group else {}),
    }


def _check_attempt(unit: UnitView, attempt: AttemptView) -> None:
    pool = attempt.pool
    if pool.instance_type != unit.instance_type or attempt.count != unit.count:
        raise ValueError(f"attempt {attempt.number} is not of unit {unit.id}: its type or count is another")
    usage_class(unit.instance_type, pool.market)
    if pool.market in RESERVATIONS and not pool.reservation:
        raise ValueError(f"a pool of market {pool.market} needs the id of its reservation")


def usage_class(instance_type: str, market: Market) -> str:
    """Returns EC2's name for the way a machine is bought. Raises ValueError if the type is unknown or not sold like
    that."""
    wanted = _USAGE_CLASSES.get(market, "on-demand")
    offered = network_of(instance_type).usage_classes
    if wanted not in offered:
        raise ValueError(f"{instance_type} is not sold as {wanted}; it is as {', '.join(sorted(offered))}")
    return wanted


def _market_options(attempt: AttemptView) -> Request:
    """Without a preference, EC2 would use open reservations for on-demand launches."""
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


def _interface_specs(instance_type: str, subnet: str, group: str) -> Iterator[Request]:
    """With interfaces, subnet and group belong to each of them; a public address would exclude several."""
    for one in interfaces_of(instance_type):
        yield {
            "NetworkCardIndex": one.card,
            "DeviceIndex": one.device,
            "InterfaceType": one.kind,
            "SubnetId": subnet,
            "Groups": [group],
            "DeleteOnTermination": True,
        }


def _tag_specs(unit: UnitView, attempt: AttemptView, install: str) -> Iterator[Request]:
    """EC2 rejects launches that tag a spot request where none is made
    (https://github.com/aws/karpenter-provider-aws/issues/5850)."""
    values = dict(zip(TAGS, (install, unit.id, str(attempt.number), f"switchyard-{unit.id}"), strict=True))
    tags = [{"Key": key, "Value": value} for key, value in values.items()]
    kinds = ["instance", "volume", "network-interface"]
    if attempt.pool.market is Market.SPOT:
        kinds.append("spot-instances-request")
    for kind in kinds:
        yield {"ResourceType": kind, "Tags": tags}
