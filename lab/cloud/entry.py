"""Targets of load balancers: they begin, are checked, and drain for as long as their group says.

moto's are healthy as soon as they are named, and gone as soon as they are not. Which of them fail their checks a test
says: `world.failing_targets`."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any

from lab.cloud.wire import Call, Refused
from lab.cloud.world import World, handles, moment

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
    for key in [_private_target(group, each) for each in call.params["Targets"]]:
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
    now, targets = world.clock.now(), world.targets.setdefault(call.params["TargetGroupArn"], {})
    for key, target in list(targets.items()):
        if target.leaves is not None and now >= target.leaves:
            del targets[key]
    return targets


def _key(group: Any, target: Mapping[str, Any]) -> TargetKey:
    return target["Id"], int(target.get("Port") or group.port)


def _private_target(group: Any, target: Mapping[str, Any]) -> TargetKey:
    if group.target_type == "ip":
        try:
            is_private = ip_address(target["Id"]).is_private
        except ValueError:
            is_private = False
        if not is_private:
            raise Refused("InvalidTarget", f"The IP address '{target['Id']}' is not a valid target.")
    return _key(group, target)


WEIGHTS = range(256)
Key = tuple[str, str, str | None]


@handles("route53", "ChangeResourceRecordSets")
def change_resource_record_sets(world: World, call: Call) -> dict[str, Any]:
    zone = world.backend("route53", "aws").get_hosted_zone(call.params["HostedZoneId"].rpartition("/")[2])
    sets = {(each.name, each.type, each.set_identifier): _of_moto(each) for each in zone.rrsets}
    troubles = [trouble for change in call.params["ChangeBatch"]["Changes"] if (trouble := _change(sets, change))]
    if troubles:
        raise Refused("InvalidChangeBatch", f"[{', '.join(troubles)}]")
    zone.rrsets = []
    for each in sets.values():
        records = [one["Value"] for one in each.get("ResourceRecords") or ()]
        zone.add_rrset({**each, "ResourceRecords": records})
    change_id = f"/change/C{secrets.token_hex(7).upper()}"
    world.changes[change_id] = world.clock.now()
    return {"ChangeInfo": _info(world, change_id)}


@handles("route53", "GetChange")
def get_change(world: World, call: Call) -> dict[str, Any]:
    change_id = f"/change/{call.params['Id'].rpartition('/')[2]}"
    if change_id not in world.changes:
        raise Refused("NoSuchChange", f"A change with id {change_id} does not exist.")
    return {"ChangeInfo": _info(world, change_id)}


def _info(world: World, change_id: str) -> dict[str, Any]:
    at = world.changes[change_id]
    status = "INSYNC" if world.clock.now() >= at + world.delays.insync_s else "PENDING"
    return {"Id": change_id, "Status": status, "SubmittedAt": moment(at)}


def _change(sets: dict[Key, dict[str, Any]], change: Mapping[str, Any]) -> str:
    record = dict(change["ResourceRecordSet"])
    record["Name"] = record["Name"].rstrip(".") + "."
    key = (record["Name"], record["Type"], record.get("SetIdentifier"))
    what = f"[name='{record['Name']}', type='{record['Type']}', set identifier='{record.get('SetIdentifier', '')}']"
    if change["Action"] == "DELETE":
        if key not in sets:
            return f"Tried to delete resource record set {what} but it was not found"
        if _values(sets[key]) != _values(record):
            return f"Tried to delete resource record set {what} but the values provided do not match the current values"
        del sets[key]
        return ""
    if change["Action"] == "CREATE" and key in sets:
        return f"Tried to create resource record set {what} but it already exists"
    if record.get("Weight") is not None and int(record["Weight"]) not in WEIGHTS:
        return f"Weight of {what} is not from 0 to 255"
    sets[key] = record
    return ""


def _values(record: Mapping[str, Any]) -> tuple[object, ...]:
    alias = record.get("AliasTarget") or {}
    target = (alias.get("HostedZoneId"), (alias.get("DNSName") or "").rstrip("."))
    records = sorted(each["Value"] for each in record.get("ResourceRecords") or ())
    weight, ttl = record.get("Weight"), record.get("TTL")
    return target, records, None if weight is None else int(weight), None if ttl is None else int(ttl)


def _of_moto(record: Any) -> dict[str, Any]:
    members = {
        "Name": record.name, "Type": record.type, "TTL": record.ttl, "SetIdentifier": record.set_identifier,
        "Weight": record.weight, "Region": record.region, "HealthCheckId": record.health_check_id,
        "AliasTarget": record.alias_target, "Failover": record.failover, "GeoLocation": record.geo_location,
        "MultiValueAnswer": record.multi_value_answer,
        "ResourceRecords": [{"Value": each} for each in record.records],
    }  # fmt: skip
    return {name: value for name, value in members.items() if value is not None}
