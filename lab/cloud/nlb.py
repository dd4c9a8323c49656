"""Targets of load balancers: they begin, are checked, and drain for as long as their group says.

moto's are healthy as soon as they are named, and gone as soon as they are not. Which of them fail their checks a test
says: `world.failing_targets`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any

from lab.cloud.wire import Call, Refused
from lab.cloud.world import World, handles

SERVICE = "elbv2"
TargetKey = tuple[str, int]


@dataclass
class Target:
    """Times are seconds since 1970 of the cloud's clock. `leaves`: when it has drained; None: it is registered."""

    registered: float
    checked: float
    leaves: float | None = None


@handles(SERVICE, "RegisterTargets")
def register_targets(world: World, call: Call) -> dict[str, Any]:
    """They are `initial` first; one that drains comes back; one that is there already stays as it is."""
    group, targets, now = _group(world, call), _targets(world, call), world.clock.now()
    for key in [_checked(group, each) for each in call.params["Targets"]]:
        if key not in targets or targets[key].leaves is not None:
            checks = float(group.healthy_threshold_count) * float(group.health_check_interval_seconds)
            registered = now + world.delays.target_registered_s
            targets[key] = Target(registered, registered + checks)
    return {}


@handles(SERVICE, "DeregisterTargets")
def deregister_targets(world: World, call: Call) -> dict[str, Any]:
    """They drain. What is not registered is no error."""
    group, targets, now = _group(world, call), _targets(world, call), world.clock.now()
    for key in [_key(group, each) for each in call.params["Targets"]]:
        if key in targets and targets[key].leaves is None:
            targets[key].leaves = now + float(group.attributes["deregistration_delay.timeout_seconds"])
    return {}


@handles(SERVICE, "DescribeTargetHealth")
def describe_target_health(world: World, call: Call) -> dict[str, Any]:
    """All that are registered or drain, or those that are asked for."""
    group, targets, now = _group(world, call), _targets(world, call), world.clock.now()
    asked = [_key(group, each) for each in call.params.get("Targets") or ()] or list(targets)
    port = group.health_check_port
    return {
        "TargetHealthDescriptions": [
            {
                "Target": {"Id": key[0], "Port": key[1]},
                "HealthCheckPort": str(key[1] if port == "traffic-port" else port),
                "TargetHealth": _health(world, group, key, targets.get(key), now),
            }
            for key in asked
        ]
    }


def healthy_targets(world: World, region: str, port: int) -> list[str]:
    """Addresses that load balancers of a region send connections of this port to, in a steady order."""
    with world.settled():
        now, found = world.clock.now(), set[str]()
        for arn, group in world.backend(SERVICE, region).target_groups.items():
            for key, target in world.targets.get(arn, {}).items():
                if key[1] == port and _health(world, group, key, target, now)["State"] == "healthy":
                    found.add(key[0])
        return sorted(found)


def _health(world: World, group: Any, key: TargetKey, target: Target | None, now: float) -> dict[str, str]:
    if target is None:
        return _state("unused", "Target.NotRegistered", "Target is not registered to the target group")
    if target.leaves is not None:
        return _state("draining", "Target.DeregistrationInProgress", "Target deregistration is in progress")
    if not group.load_balancer_arns:
        text = "Target group is not configured to receive traffic from the load balancer"
        return _state("unused", "Target.NotInUse", text)
    if now < target.registered:
        return _state("initial", "Elb.RegistrationInProgress", "Target registration is in progress")
    if now < target.checked:
        return _state("initial", "Elb.InitialHealthChecking", "Initial health checks in progress")
    if key[0] in world.failing_targets:
        return _state("unhealthy", "Target.FailedHealthChecks", "Health checks failed")
    return {"State": "healthy"}


def _state(state: str, reason: str, description: str) -> dict[str, str]:
    return {"State": state, "Reason": reason, "Description": description}


def _group(world: World, call: Call) -> Any:
    arn = call.params["TargetGroupArn"]
    group = world.backend(SERVICE, call.region).target_groups.get(arn)
    if group is None:
        raise Refused("TargetGroupNotFound", f"Target groups '{arn}' not found")
    return group


def _targets(world: World, call: Call) -> dict[TargetKey, Target]:
    """Of a group, without those that have drained."""
    now, targets = world.clock.now(), world.targets.setdefault(call.params["TargetGroupArn"], {})
    for key, target in list(targets.items()):
        if target.leaves is not None and now >= target.leaves:
            del targets[key]
    return targets


def _key(group: Any, target: Mapping[str, Any]) -> TargetKey:
    return target["Id"], int(target.get("Port") or group.port)


def _checked(group: Any, target: Mapping[str, Any]) -> TargetKey:
    """Of a group of addresses, those of a private network."""
    if group.target_type == "ip":
        try:
            is_private = ip_address(target["Id"]).is_private
        except ValueError:
            is_private = False
        if not is_private:
            raise Refused("InvalidTarget", f"The IP address '{target['Id']}' is not a valid target.")
    return _key(group, target)
