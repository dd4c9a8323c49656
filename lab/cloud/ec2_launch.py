"""RunInstances and TerminateInstances as EC2 does them: all or none, once per client token, within capacity and quotas.

moto launches MinCount machines of whatever it is asked, and ignores tokens, placement groups, markets, reservations,
interfaces beyond the first two, their tags, and the profiles of all machines but the first.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from moto.ec2.models.instance_types import INSTANCE_TYPES

from lab.cloud.capacity import Market, Reserved
from lab.cloud.ec2_describe import describe_by_id, state_of
from lab.cloud.ec2_request import Launch, card_and_device, is_true, read_launch
from lab.cloud.ec2_topology import place
from lab.cloud.limits import check_quota, quota_of
from lab.cloud.machines import Interface, Machine
from lab.cloud.wire import Call, Refused
from lab.cloud.world import World, handles

NO_ADDRESS = "efa-only"


@handles("ec2", "RunInstances")
def run_instances(world: World, call: Call) -> dict[str, Any]:
    """Launch `most` machines, or as many as there is capacity for but `least`, or none."""
    launch = read_launch(world, call)
    earlier = world.launches.get((call.region, launch.zone, launch.token)) if launch.token else None
    if earlier:
        return _again(world, call, launch, *earlier)
    if call.params.get("DryRun"):
        return world.moto(call)  # refuses, by saying that it would have done it
    if launch.zone in world.silent_zones:
        raise Refused("Unavailable", "The server is overloaded and can't handle the request.")
    reserved, count = _room(world, launch)
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


def _again(world: World, call: Call, launch: Launch, digest: str, ids: tuple[str, ...]) -> dict[str, Any]:
    """A token that was used. In another zone it is another request; see "Ensuring idempotency in EC2 API requests"."""
    if digest != launch.digest:
        raise Refused("IdempotentParameterMismatch", "Arguments on this idempotent request are inconsistent.")
    live = [machine for machine in world.machines.live() if machine.id in ids]
    if not live:
        raise Refused("IdempotentInstanceTerminated", "The idempotent launch request was for terminated instances.")
    return describe_by_id(world, call, ids)[0]


# --- whether there is room --------------------------------------------------------------------------------------------


def _room(world: World, launch: Launch) -> tuple[Reserved | None, int]:
    """The reservation it goes into, and how many machines.

    Raises:
        Refused: fewer than `least`.
    """
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
