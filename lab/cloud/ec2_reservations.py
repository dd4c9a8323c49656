"""Capacity reservations and Capacity Blocks as they are described. They are made by `world.machines.capacity.reserve`,
for a person buys them and no code of ours does. moto knows none."""

from collections.abc import Mapping, Sequence
from typing import Any

from lab.cloud.capacity import Market, Reserved
from lab.cloud.clock import moment
from lab.cloud.ec2_describe import fits, page_of
from lab.cloud.wire import Call, Refused
from lab.cloud.world import World, handles

TOPOLOGY_PAGE = range(1, 11)


@handles("ec2", "DescribeCapacityReservations")
def describe_capacity_reservations(world: World, call: Call) -> dict[str, Any]:
    """How many machines are left in each, and when it ends."""
    found = [each for each in _asked(world, call) if fits(call.params, _filters_of(world, each))]
    page, token = page_of(call.params, found, range(1, 1001))
    described = [_described(world, each) for each in page]
    return {"CapacityReservations": described, **({"NextToken": token} if token else {})}


@handles("ec2", "DescribeCapacityReservationTopology")
def describe_capacity_reservation_topology(world: World, call: Call) -> dict[str, Any]:
    """Network nodes of what is reserved, also while nothing runs in it."""
    ids = call.params.get("CapacityReservationIds") or []
    if len(ids) > TOPOLOGY_PAGE[-1] or (ids and call.params.get("MaxResults")):
        raise Refused("InvalidParameterValue", f"Give up to {TOPOLOGY_PAGE[-1]} ids, or pages.")
    asked = [each for each in _asked(world, call) if each.network_nodes]
    found = [each for each in asked if fits(call.params, _filters_of(world, each))]
    page, token = page_of(call.params, found, TOPOLOGY_PAGE)
    placed = [
        {
            "CapacityReservationId": each.id, "State": each.state(world.clock.now()), "AvailabilityZone": each.zone,
            "InstanceType": each.instance_type, "NetworkNodes": list(each.network_nodes),
        }
        for each in page
    ]  # fmt: skip
    return {"CapacityReservations": placed, **({"NextToken": token} if token else {})}


def _asked(world: World, call: Call) -> Sequence[Reserved]:
    here = {each.id: each for each in world.machines.capacity.reserved.values() if each.zone.startswith(call.region)}
    ids = call.params.get("CapacityReservationIds") or list(here)
    for each in ids:
        if each not in here:
            code = "InvalidCapacityReservationId.NotFound"
            raise Refused(code, f"The capacity reservation ID '{each}' does not exist")
    return [here[each] for each in ids]


def _filters_of(world: World, reserved: Reserved) -> Mapping[str, str]:
    return {
        "availability-zone": reserved.zone, "instance-type": reserved.instance_type,
        "state": reserved.state(world.clock.now()), **{f"tag:{key}": value for key, value in reserved.tags.items()},
    }  # fmt: skip


def _described(world: World, reserved: Reserved) -> dict[str, Any]:
    end = {"EndDate": moment(reserved.ends)} if reserved.ends is not None else {}
    group = {"PlacementGroupArn": reserved.group_arn} if reserved.group_arn else {}
    return {
        "CapacityReservationId": reserved.id, "OwnerId": world.account, "InstanceType": reserved.instance_type,
        "AvailabilityZone": reserved.zone, "TotalInstanceCount": reserved.total,
        "AvailableInstanceCount": reserved.left, "State": reserved.state(world.clock.now()),
        "StartDate": moment(reserved.starts), **end, "EndDateType": "limited" if end else "unlimited",
        "InstanceMatchCriteria": "open" if reserved.is_open else "targeted", **group,
        "ReservationType": "capacity-block" if reserved.market is Market.BLOCK else "default",
        "Interruptible": reserved.market is Market.INTERRUPTIBLE,
    }  # fmt: skip
