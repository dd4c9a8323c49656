"""Where machines are: placement groups, and the network nodes above each. moto knows none of it."""

import re
import secrets
from collections.abc import Mapping
from typing import Any

from lab.cloud.ec2_describe import check_found, check_heard, fits, page_of
from lab.cloud.machines import Machine
from lab.cloud.wire import Call, Refused
from lab.cloud.world import World, handles

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
    """Those of this region, or the named ones."""
    groups, names = world.groups.get(call.region, {}), call.params.get("GroupNames") or []
    for name in names:
        _check_known(name, groups)
    found = [group for name, group in groups.items() if not names or name in names]
    return {"PlacementGroups": [each for each in found if fits(call.params, _filters_of(each))]}


@handles("ec2", "DeletePlacementGroup")
def delete_placement_group(world: World, call: Call) -> dict[str, Any]:
    """Refused while a machine is in it."""
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
