"""RebootInstances. moto's brings a terminated instance back to life, and leaves no trace on another one."""

from typing import Any

from lab.cloud.ec2_describe import check_found
from lab.cloud.wire import Call, Refused
from lab.cloud.world import World, handles


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
