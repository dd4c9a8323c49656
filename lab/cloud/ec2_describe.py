"""DescribeInstances and DescribeInstanceStatus: pages of machines, what moto forgets of them, and what is silent.

moto pages by reservation, shows two interfaces of eight, and knows neither events nor an impaired machine."""

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lab.cloud.machines import CODES, Interface, Machine, Market, Reserved
from lab.cloud.wire import Call, Refused
from lab.cloud.world import WATCHES, World, handles, moment

PAGE = range(5, 1001)
"""Allowed values of MaxResults: DescribeInstances, DescribeInstanceStatus."""
ALL = "1000000"


def state_of(name: str) -> dict[str, Any]:
    return {"Name": name, "Code": CODES[name]}


def page_of(params: Mapping[str, Any], found: Sequence[Any], allowed: range = PAGE) -> tuple[Sequence[Any], str]:
    size = int(params.get("MaxResults") or allowed[-1])
    if size not in allowed:
        raise Refused("InvalidParameterValue", f"Value ( {size} ) for parameter maxResults is invalid.")
    token = str(params.get("NextToken") or "0")
    if not token.isdigit():
        raise Refused("InvalidNextToken", f"The token '{token}' is invalid")
    end = int(token) + size
    return found[int(token) : end], str(end) if end < len(found) else ""


def check_heard(world: World, region: str, ids: Iterable[str]) -> None:
    """While a zone is silent, calls without ids or with ids in it fail; those with ids of other zones work. Raises
    Refused if it is silent."""
    if not any(zone.startswith(region) for zone in world.silent_zones):
        return
    zones = {machine.zone for machine in map(world.machines.get, ids) if machine}
    if not zones or zones & world.silent_zones:
        raise Refused("Unavailable", "The server is overloaded and can't handle the request.")


def check_found(world: World, region: str, ids: Iterable[str]) -> None:
    for machine_id in ids:
        machine = world.machines.get(machine_id)
        if machine is None or machine.region != region or world.clock.now() < machine.visible:
            raise Refused("InvalidInstanceID.NotFound", f"The instance ID '{machine_id}' does not exist")


def fits(params: Mapping[str, Any], one: Mapping[str, str]) -> bool:
    """By `Filters`, of which a value may end in `*`. Raises Refused for an unsupported filter."""
    for wanted in params.get("Filters") or ():
        if wanted["Name"] not in one and not wanted["Name"].startswith("tag:"):
            raise Refused("InvalidParameterValue", f"The filter '{wanted['Name']}' is invalid")
        value = one.get(wanted["Name"], "")
        if not any(each == value or (each[-1:] == "*" and value.startswith(each[:-1])) for each in wanted["Values"]):
            return False
    return True


def check_page_or_ids(params: Mapping[str, Any], ids: object) -> None:
    if ids and params.get("MaxResults"):
        raise Refused(
            "InvalidParameterCombination",
            "The parameter instancesSet cannot be used with the parameter maxResults",
        )


@handles("ec2", "DescribeInstances")
def describe_instances(world: World, call: Call) -> dict[str, Any]:
    ids = call.params.get("InstanceIds") or []
    check_page_or_ids(call.params, ids)
    check_heard(world, call.region, ids)
    check_found(world, call.region, ids)
    found = world.moto(call, {"MaxResults": None if ids else ALL, "NextToken": None})["Reservations"]
    shown = [(r, i) for r in found for i in r["Instances"] if _is_visible(world, i["InstanceId"])]
    page, token = (shown, "") if ids else page_of(call.params, shown)
    return {"Reservations": _grouped(world, page), **({"NextToken": token} if token else {})}


def describe_by_id(world: World, call: Call, ids: Sequence[str]) -> list[dict[str, Any]]:
    """Reservations with these machines, visible or not."""
    fields: dict[str, str | None] = dict.fromkeys(call.form)
    fields |= {f"InstanceId.{at}": each for at, each in enumerate(ids, 1)} | {"Action": "DescribeInstances"}
    found = world.moto(call, {**fields, "Version": call.form["Version"]})["Reservations"]
    return _grouped(world, [(r, i) for r in found for i in r["Instances"]])


def _is_visible(world: World, machine_id: str) -> bool:
    machine = world.machines.get(machine_id)
    return machine is None or world.clock.now() >= machine.visible


def _grouped(world: World, pairs: Iterable[tuple[dict[str, Any], dict[str, Any]]]) -> list[dict[str, Any]]:
    grouped: dict[str, dict[str, Any]] = {}
    for reservation, instance in pairs:
        into = grouped.setdefault(reservation["ReservationId"], {**reservation, "Instances": []})
        machine = world.machines.get(instance["InstanceId"])
        into["Instances"].append(_amended(world, machine, instance) if machine else instance)
    return list(grouped.values())


def _amended(world: World, machine: Machine, instance: dict[str, Any]) -> dict[str, Any]:
    amended = {**instance, "LaunchTime": moment(machine.launched)}
    amended["Placement"] = {**instance["Placement"], "GroupName": machine.group}
    if machine.market is not Market.ON_DEMAND:
        amended["InstanceLifecycle"] = str(machine.market)
    if machine.reserved:
        amended["CapacityReservationId"] = machine.reserved.id
    amended["NetworkInterfaces"] = [_interface(machine, each) for each in machine.interfaces]
    if machine.state(world.clock.now()) == "terminated":
        for gone in ("PrivateIpAddress", "PublicIpAddress", "SubnetId", "VpcId"):
            amended.pop(gone, None)
        amended |= {"NetworkInterfaces": [], "BlockDeviceMappings": [], "SecurityGroups": [], "PrivateDnsName": ""}
    return amended


def _interface(machine: Machine, interface: Interface) -> dict[str, Any]:
    moto = interface.moto
    address = {} if interface.kind == "efa-only" else {"PrivateIpAddress": moto.private_ip_address}
    return {
        "NetworkInterfaceId": moto.id, "InterfaceType": interface.kind, "SubnetId": moto.subnet.id, **address,
        "VpcId": moto.subnet.vpc_id, "MacAddress": moto.mac_address, "Status": "in-use",
        "Groups": [{"GroupId": group.id, "GroupName": group.name} for group in moto.group_set],
        "Attachment": {
            "AttachmentId": moto.attachment_id, "AttachTime": moment(machine.launched), "Status": "attached",
            "DeviceIndex": interface.device, "NetworkCardIndex": interface.card,
            "DeleteOnTermination": interface.deleted_with_machine,
        },
    }  # fmt: skip


@handles("ec2", "DescribeInstanceStatus")
def describe_instance_status(world: World, call: Call) -> dict[str, Any]:
    """State, checks and scheduled events, also of machines that other people launched in this account."""
    ids = call.params.get("InstanceIds") or []
    check_page_or_ids(call.params, ids)
    check_heard(world, call.region, ids)
    check_found(world, call.region, ids)
    found = world.moto(call, {"MaxResults": None, "NextToken": None})["InstanceStatuses"]
    shown = [each for each in found if _is_visible(world, each["InstanceId"])]
    page, token = (shown, "") if ids else page_of(call.params, shown)
    statuses = [_status(world, each) for each in page]
    return {"InstanceStatuses": statuses, **({"NextToken": token} if token else {})}


def _status(world: World, status: dict[str, Any]) -> dict[str, Any]:
    machine = world.machines.get(status["InstanceId"])
    if machine is None:
        return status
    checks = {"Status": "not-applicable"}
    if machine.state(world.clock.now()) == "running":
        checks = {"Status": "ok", "Details": [{"Name": "reachability", "Status": "passed"}]}  # type: ignore[dict-item]
        if machine.impaired_since is not None:
            since = {"Name": "reachability", "Status": "failed", "ImpairedSince": moment(machine.impaired_since)}
            checks = {"Status": "impaired", "Details": [since]}  # type: ignore[dict-item]
    state = state_of(machine.state(world.clock.now()))
    events = {"Events": machine.events} if machine.events else {}
    return {**status, "InstanceState": state, "InstanceStatus": checks, "SystemStatus": checks, **events}


@handles("ec2", "RebootInstances")
def reboot_instances(world: World, call: Call) -> dict[str, Any]:
    """They stay `running` meanwhile, as on EC2. All or, where one has ended or is unknown, none."""
    ids = call.params["InstanceIds"]
    check_found(world, call.region, ids)
    machines, now = [machine for machine in map(world.machines.get, ids) if machine], world.clock.now()
    for machine in machines:
        if (state := machine.state(now)) != "running":
            raise Refused(
                "IncorrectState",
                f"The instance '{machine.id}' is not in a state from which it can be rebooted: {state}.",
            )
    for machine in machines:
        machine.reboots += 1
    return {}


TOPOLOGY_PAGE = range(1, 11)


@handles("ec2", "DescribeCapacityReservations")
def describe_capacity_reservations(world: World, call: Call) -> dict[str, Any]:
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


SPOT_LEAD_S = 120.0
"""Between a warning and the end."""
BLOCK_LEAD_S = 2400.0
"""Before the end of a Capacity Block comes its event: ten minutes before its machines are ended."""
SPOT_WARNING = "EC2 Spot Instance Interruption Warning"
REBALANCE = "EC2 Instance Rebalance Recommendation"
BLOCK_WARNING = "Capacity Block Reservation Expiration Warning"
STATE_CHANGE = "EC2 Instance State-change Notification"


def warn_of_interruption(world: World, machine_id: str) -> None:
    """Two minutes' notice, and the end after them."""
    machine = _require_machine(world, machine_id)
    machine.interrupted = world.clock.now() + SPOT_LEAD_S
    emit(world, machine, SPOT_WARNING, {"instance-id": machine_id, "instance-action": "terminate"})


def recommend_rebalance(world: World, machine_id: str) -> None:
    machine = _require_machine(world, machine_id)
    machine.rebalance_at = world.clock.now()
    emit(world, machine, REBALANCE, {"instance-id": machine_id})


def schedule(world: World, machine_id: str, code: str, not_before: float) -> None:
    """A scheduled event, such as `instance-retirement`, at `not_before` (seconds since 1970)."""
    _require_machine(world, machine_id).events.append(
        {
            "InstanceEventId": f"instance-event-{secrets.token_hex(9)[:17]}", "Code": code,
            "Description": "The instance is running on degraded hardware", "NotBefore": moment(not_before),
        }
    )  # fmt: skip


def announce(world: World) -> None:
    now = world.clock.now()
    for machine in world.machines:
        state = machine.state(now)
        if state != machine.announced:
            machine.announced = state
            emit(world, machine, STATE_CHANGE, {"instance-id": machine.id, "state": state})
    for reserved in world.machines.capacity.reserved.values():
        if reserved.is_block and not reserved.announced and reserved.ends and now >= reserved.ends - BLOCK_LEAD_S:
            reserved.announced = True
            detail = {"capacity-reservation-id": reserved.id, "end-date": moment(reserved.ends).isoformat()}
            _put_event(world, reserved.region, BLOCK_WARNING, detail, [])


def emit(world: World, machine: Machine, kind: str, detail: dict[str, Any]) -> None:
    arn = f"arn:aws:ec2:{machine.region}:{world.account}:instance/{machine.id}"
    _put_event(world, machine.region, kind, detail, [arn])


def _put_event(world: World, region: str, kind: str, detail: dict[str, Any], resources: list[str]) -> None:
    event = {
        "Source": "aws.ec2", "DetailType": kind, "Detail": json.dumps(detail), "Resources": resources,
        "Time": world.clock.now(),
    }  # fmt: skip
    world.backend("events", region).put_events([event])


def _require_machine(world: World, machine_id: str) -> Machine:
    machine = world.machines.get(machine_id)
    if machine is None:
        raise KeyError(machine_id)
    return machine


WATCHES.append(announce)
