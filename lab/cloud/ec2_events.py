"""What AWS announces of machines: events on EventBridge, and scheduled events in DescribeInstanceStatus. moto has none.

Nothing here announces twice or out of order; that is for a test to do, by its own PutEvents.
"""

import json
import secrets
from typing import Any

from lab.cloud.clock import moment
from lab.cloud.machines import Machine
from lab.cloud.world import WATCHES, World

SPOT_LEAD_S = 120.0
"""Between a warning and the end."""
BLOCK_LEAD_S = 2400.0
"""Before the end of a Capacity Block comes its event: ten minutes before its machines are ended."""
SPOT_WARNING = "EC2 Spot Instance Interruption Warning"
REBALANCE = "EC2 Instance Rebalance Recommendation"
RESERVATION_WARNING = "EC2 Capacity Reservation Instance Interruption Warning"
BLOCK_WARNING = "Capacity Block Reservation Expiration Warning"
STATE_CHANGE = "EC2 Instance State-change Notification"


def warn_of_interruption(world: World, machine_id: str, kind: str = SPOT_WARNING) -> None:
    """Two minutes' notice, and the end after them. `kind`: SPOT_WARNING or RESERVATION_WARNING."""
    machine = _known(world, machine_id)
    machine.interrupted = world.clock.now() + SPOT_LEAD_S
    emit(world, machine, kind, {"instance-id": machine_id, "instance-action": "terminate"})


def recommend_rebalance(world: World, machine_id: str) -> None:
    """A higher risk, and no promise of when."""
    machine = _known(world, machine_id)
    machine.rebalance_at = world.clock.now()
    emit(world, machine, REBALANCE, {"instance-id": machine_id})


def schedule(world: World, machine_id: str, code: str, not_before: float) -> None:
    """A scheduled event, such as `instance-retirement`, at `not_before` (seconds since 1970)."""
    _known(world, machine_id).events.append(
        {
            "InstanceEventId": f"instance-event-{secrets.token_hex(9)[:17]}", "Code": code,
            "Description": "The instance is running on degraded hardware", "NotBefore": moment(not_before),
        }
    )  # fmt: skip


def announce(world: World) -> None:
    """Changes of state and Capacity Blocks that end, since the last time."""
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
            _put(world, reserved.region, BLOCK_WARNING, detail, [])


def emit(world: World, machine: Machine, kind: str, detail: dict[str, Any]) -> None:
    """An event of EC2 about a machine."""
    arn = f"arn:aws:ec2:{machine.region}:{world.account}:instance/{machine.id}"
    _put(world, machine.region, kind, detail, [arn])


def _put(world: World, region: str, kind: str, detail: dict[str, Any], resources: list[str]) -> None:
    event = {
        "Source": "aws.ec2", "DetailType": kind, "Detail": json.dumps(detail), "Resources": resources,
        "Time": world.clock.now(),
    }  # fmt: skip
    world.backend("events", region).put_events([event])


def _known(world: World, machine_id: str) -> Machine:
    machine = world.machines.get(machine_id)
    if machine is None:
        raise KeyError(machine_id)
    return machine


WATCHES.append(announce)
