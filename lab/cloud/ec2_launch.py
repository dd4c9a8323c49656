"""RunInstances and TerminateInstances as EC2 does them: all or none, once per client token, within capacity and quotas.

moto launches MinCount machines of whatever it is asked, and ignores tokens, placement groups, markets, reservations,
interfaces beyond the first two, their tags, and the profiles of all machines but the first."""

import base64
import hashlib
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from moto.ec2.models.instance_types import INSTANCE_TYPES

from lab.cloud.ec2_describe import check_found, check_heard, describe_by_id, fits, page_of, state_of
from lab.cloud.machines import Interface, Machine, Market, Reserved, check_quota, quota_of
from lab.cloud.wire import Call, Refused
from lab.cloud.world import World, handles

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


IDS = 100
PER_SPINE, PER_LEAF = 16, 2
WITH_TOPOLOGY = ("p", "trn", "hpc")
"""Families of which DescribeInstanceTopology knows network nodes: those for training and HPC, not Inf2 and G6."""


def place(world: World, machine: Machine) -> tuple[str, ...]:
    """Three nodes, widest first: of its reservation, or the next free place. Neighbours in time are seldom neighbours
    in the network. Nothing for types that have no topology."""
    if machine.reserved and machine.reserved.network_nodes:
        return machine.reserved.network_nodes
    family = re.match("[a-z]+", machine.instance_type)
    if not family or family[0] not in WITH_TOPOLOGY:
        return ()
    number = world.placed[machine.zone]
    world.placed[machine.zone] += 1
    spine, lane = divmod(number, PER_SPINE)
    lane = lane * 7 % PER_SPINE
    top = f"nn-{machine.zone}-{spine:04d}"
    return top, f"{top}-{lane // 4}", f"{top}-{lane // 4}-{lane // PER_LEAF % 2}"


@handles("ec2", "DescribeInstanceTopology")
def describe_instance_topology(world: World, call: Call) -> dict[str, Any]:
    """Of running machines of types that have one; all others are left out, without a word."""
    params = call.params
    ids, groups = params.get("InstanceIds") or [], params.get("GroupNames") or []
    if len(ids) > IDS or len(groups) > IDS:
        raise Refused("InvalidParameterValue", f"instance-ids cannot contain over {IDS} values.")
    if (ids or groups) and params.get("MaxResults"):
        raise Refused("InvalidParameterCombination", "MaxResults cannot be used with ids or group names.")
    check_heard(world, call.region, ids)
    check_found(world, call.region, ids)
    now = world.clock.now()
    found = [
        each
        for each in world.machines
        if each.region == call.region and each.network_nodes and each.state(now) == "running" and now >= each.visible
        if (not ids or each.id in ids) and (not groups or each.group in groups)
        if fits(params, {"availability-zone": each.zone, "instance-type": each.instance_type})
    ]
    page, token = page_of(params, found, range(1, IDS + 1))
    return {"Instances": [_instance(world, each) for each in page], **({"NextToken": token} if token else {})}


def _instance(world: World, machine: Machine) -> dict[str, Any]:
    group = {"GroupName": machine.group} if machine.group else {}
    return {
        "InstanceId": machine.id, "InstanceType": machine.instance_type, "AvailabilityZone": machine.zone,
        "ZoneId": machine.moto.ec2_backend.get_subnet(machine.moto.subnet_id).availability_zone_id,
        "NetworkNodes": list(machine.network_nodes), **group,
    }  # fmt: skip


@handles("ec2", "CreatePlacementGroup")
def create_placement_group(world: World, call: Call) -> dict[str, Any]:
    name, groups = call.params["GroupName"], world.groups.setdefault(call.region, {})
    if name in groups:
        raise Refused("InvalidPlacementGroup.Duplicate", f"The Placement Group '{name}' already exists.")
    tags: list[dict[str, str]] = next((each["Tags"] for each in call.params.get("TagSpecifications") or ()), [])
    groups[name] = {
        "GroupName": name, "State": "available", "Strategy": call.params.get("Strategy", "cluster"), "Tags": tags,
        "GroupId": f"pg-{secrets.token_hex(9)[:17]}",
        "GroupArn": f"arn:aws:ec2:{call.region}:{world.account}:placement-group/{name}",
    }  # fmt: skip
    return {"PlacementGroup": groups[name]}


@handles("ec2", "DescribePlacementGroups")
def describe_placement_groups(world: World, call: Call) -> dict[str, Any]:
    groups, names = world.groups.get(call.region, {}), call.params.get("GroupNames") or []
    for name in names:
        _check_known(name, groups)
    found = [group for name, group in groups.items() if not names or name in names]
    return {"PlacementGroups": [each for each in found if fits(call.params, _filters_of(each))]}


@handles("ec2", "DeletePlacementGroup")
def delete_placement_group(world: World, call: Call) -> dict[str, Any]:
    name, groups = call.params["GroupName"], world.groups.get(call.region, {})
    _check_known(name, groups)
    now = world.clock.now()
    if any(
        (each.group, each.region) == (name, call.region) and each.state(now) != "terminated" for each in world.machines
    ):
        raise Refused("InvalidPlacementGroup.InUse", f"The placement group '{name}' is in use and may not be deleted.")
    del groups[name]
    return {}


def _check_known(name: str, groups: Mapping[str, Any]) -> None:
    if name not in groups:
        raise Refused("InvalidPlacementGroup.Unknown", f"The Placement Group '{name}' is unknown.")


def _filters_of(group: Mapping[str, Any]) -> dict[str, str]:
    tags = {f"tag:{each['Key']}": each["Value"] for each in group["Tags"]}
    return {"group-name": group["GroupName"], "state": group["State"], "strategy": group["Strategy"], **tags}


NO_ADDRESS = "efa-only"


@handles("ec2", "RunInstances")
def run_instances(world: World, call: Call) -> dict[str, Any]:
    """Launch `most` machines, or as many as there is capacity for but `least`, or none."""
    launch = read_launch(world, call)
    earlier = world.launches.get((call.region, launch.zone, launch.token)) if launch.token else None
    if earlier:
        return _repeated_launch(world, call, launch, *earlier)
    if call.params.get("DryRun"):
        return world.moto(call)  # refuses, by saying that it would have done it
    if launch.zone in world.silent_zones:
        raise Refused("Unavailable", "The server is overloaded and can't handle the request.")
    reserved, count = _launch_capacity(world, launch)
    _check_quota(world, call.region, launch, count)
    first = f"NetworkInterface.{launch.interfaces[0]['position']}."
    others = {key: None for key in call.form if key.startswith("NetworkInterface.") and not key.startswith(first)}
    answer = world.moto(call, {**others, "MinCount": str(count), "MaxCount": str(count)})
    ids = [each["InstanceId"] for each in answer["Instances"]]
    machines = [_remember(world, call, launch, machine_id, reserved) for machine_id in ids]
    _same_profile(world, call.region, machines)
    if not reserved:
        world.machines.capacity.take(launch.instance_type, launch.zone, launch.market, count)
    if launch.token:
        world.launches[call.region, launch.zone, launch.token] = (launch.digest, tuple(ids))
    world.settle()
    return describe_by_id(world, call, ids)[0]


def _repeated_launch(world: World, call: Call, launch: Launch, digest: str, ids: tuple[str, ...]) -> dict[str, Any]:
    """A token that was used. In another zone it is another request; see "Ensuring idempotency in EC2 API requests"."""
    if digest != launch.digest:
        raise Refused("IdempotentParameterMismatch", "Arguments on this idempotent request are inconsistent.")
    live = [machine for machine in world.machines.live() if machine.id in ids]
    if not live:
        raise Refused("IdempotentInstanceTerminated", "The idempotent launch request was for terminated instances.")
    return describe_by_id(world, call, ids)[0]


# --- whether there is room --------------------------------------------------------------------------------------------


def _launch_capacity(world: World, launch: Launch) -> tuple[Reserved | None, int]:
    capacity, now = world.machines.capacity, world.clock.now()
    reserved = capacity.wanted(launch.reservation_id, launch.instance_type, launch.zone, launch.market, now)
    if reserved and reserved.group_arn and not reserved.group_arn.endswith(f"/{launch.group}"):
        raise Refused("InvalidParameterValue", f"{reserved.id} was made in {reserved.group_arn}: launch into that.")
    if reserved and not reserved.group_arn and launch.group and launch.reservation_id:
        raise Refused("ReservationCapacityExceeded", f"{reserved.id} was made outside of '{launch.group}'.")
    if reserved and not launch.reservation_id and reserved.left < launch.most:
        reserved = None
    if launch.market in (Market.BLOCK, Market.INTERRUPTIBLE) and not reserved:
        raise Refused("InvalidParameterCombination", f"{launch.market} needs a capacity reservation as its target.")
    left = reserved.left if reserved else capacity.left(launch.instance_type, launch.zone, launch.market)
    if left < launch.least and reserved:
        raise Refused("ReservationCapacityExceeded", f"{reserved.id} has {left} of {launch.least} machines left.")
    if left < launch.least:
        raise Refused(
            "InsufficientInstanceCapacity",
            f"We currently do not have sufficient {launch.instance_type} capacity in the Availability Zone you "
            f"requested ({launch.zone}).",
        )
    count = int(min(left, launch.most))
    addresses = count * sum(each.get("InterfaceType") != NO_ADDRESS for each in launch.interfaces)
    if launch.subnet.available_ip_address_count < addresses:
        raise Refused(
            "InsufficientFreeAddressesInSubnet",
            f"There are not enough free addresses in subnet '{launch.subnet.id}' to satisfy the requested number of "
            "instances.",
        )
    return reserved, count


def _check_quota(world: World, region: str, launch: Launch, count: int) -> None:
    spot = launch.market is Market.SPOT
    if not spot and launch.market is not Market.ON_DEMAND:
        return
    name = quota_of(launch.instance_type, spot=spot)
    running = sum(
        each.vcpus
        for each in world.machines.live()
        if each.region == region and quota_of(each.instance_type, spot=each.market is Market.SPOT) == name
    )
    check_quota(world.quotas, launch.instance_type, count * _vcpus(launch.instance_type), running, spot=spot)


def _vcpus(instance_type: str) -> int:
    return int(INSTANCE_TYPES.get(instance_type, {}).get("VCpuInfo", {}).get("DefaultVCpus", 1))


# --- what moto then lacks ---------------------------------------------------------------------------------------------


def _remember(world: World, call: Call, launch: Launch, machine_id: str, reserved: Reserved | None) -> Machine:
    now, delays = world.clock.now(), world.delays
    instance = world.backend("ec2", call.region).get_instance(machine_id)
    instance.launch_time = datetime.fromtimestamp(now, UTC).replace(tzinfo=None)
    machine = Machine(
        instance, call.region, launch.zone, launch.instance_type, _vcpus(launch.instance_type), launch.market, now,
        now + delays.visible_s, now + delays.pending_s, _interfaces(world, call.region, launch, instance),
        launch.group, reserved,
    )  # fmt: skip
    machine.network_nodes = place(world, machine)
    world.machines.add(machine)
    return machine


def _interfaces(world: World, region: str, launch: Launch, instance: Any) -> tuple[Interface, ...]:
    """moto made the first; the others are made here, each in its place."""
    made: list[Interface] = []
    ec2 = world.backend("ec2", region)
    for asked in launch.interfaces:
        card, device = card_and_device(asked)
        moto = instance.nics[0]
        if made:
            moto = ec2.create_network_interface(
                launch.subnet, None, group_ids=list(asked.get("Groups") or ()), device_index=device,
                delete_on_termination=True, description=asked.get("Description", ""),
            )  # fmt: skip
            moto.instance, moto.attachment_id = instance, f"eni-attach-{moto.id[4:]}"
            moto.attach_time, moto.status = instance.launch_time, "in-use"
        moto.interface_type = asked.get("InterfaceType", "interface")
        if moto.interface_type == NO_ADDRESS:
            moto.private_ip_address, moto.private_ip_addresses = None, []
        moto.add_tags(dict(launch.tags.get("network-interface", {})))
        kept = asked.get("DeleteOnTermination") is not None and not is_true(asked["DeleteOnTermination"])
        made.append(Interface(moto, card, device, moto.interface_type, deleted_with_machine=not kept))
    return tuple(made)


def _same_profile(world: World, region: str, machines: Sequence[Machine]) -> None:
    """moto gives the instance profile to the first machine alone."""
    ec2 = world.backend("ec2", region)
    first = ec2.iam_instance_profile_associations.get(machines[0].id)
    for machine in machines[1:] if first else ():
        ec2.associate_iam_instance_profile(
            instance_id=machine.id, iam_instance_profile_arn=first.iam_instance_profile.arn
        )


@handles("ec2", "TerminateInstances")
def terminate_instances(world: World, call: Call) -> dict[str, Any]:
    """They shut down, and are terminated when that is done. All or, where one is unknown, none."""
    ids = call.params["InstanceIds"]
    machines, now = [world.machines.get(each) for each in ids], world.clock.now()
    unknown = [
        machine_id
        for machine_id, machine in zip(ids, machines, strict=True)
        if machine is None or machine.region != call.region or now < machine.visible
    ]
    if unknown:
        raise Refused("InvalidInstanceID.NotFound", f"The instance IDs '{', '.join(unknown)}' do not exist")
    found = [machine for machine in machines if machine]
    if any(machine.zone in world.silent_zones for machine in found):
        raise Refused("Unavailable", "The server is overloaded and can't handle the request.")
    if call.params.get("DryRun"):
        raise Refused("DryRunOperation", "Request would have succeeded, but DryRun flag is set.")
    before = [machine.state(now) for machine in found]
    for machine in found:
        world.machines.end(machine, "Client.UserInitiatedShutdown", "User initiated shutdown")
    world.settle()
    return {
        "TerminatingInstances": [
            {"InstanceId": machine.id, "CurrentState": state_of(machine.state(now)), "PreviousState": state_of(earlier)}
            for machine, earlier in zip(found, before, strict=True)
        ]
    }
