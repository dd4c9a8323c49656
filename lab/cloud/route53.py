"""Route 53's changes: a batch is all or nothing, a DELETE names exactly what is there, a change is PENDING for a while.

moto compares a DELETE with all that ever was there, deletes by set identifier alone, takes any weight, and is always in
sync.
"""

import secrets
from collections.abc import Mapping
from typing import Any

from lab.cloud.clock import moment
from lab.cloud.wire import Call, Refused
from lab.cloud.world import World, handles

WEIGHTS = range(256)
Key = tuple[str, str, str | None]


@handles("route53", "ChangeResourceRecordSets")
def change_resource_record_sets(world: World, call: Call) -> dict[str, Any]:
    """Carry out a batch, or nothing of it."""
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
    """Whether all of Route 53's servers know it."""
    change_id = f"/change/{call.params['Id'].rpartition('/')[2]}"
    if change_id not in world.changes:
        raise Refused("NoSuchChange", f"A change with id {change_id} does not exist.")
    return {"ChangeInfo": _info(world, change_id)}


def _info(world: World, change_id: str) -> dict[str, Any]:
    at = world.changes[change_id]
    status = "INSYNC" if world.clock.now() >= at + world.delays.insync_s else "PENDING"
    return {"Id": change_id, "Status": status, "SubmittedAt": moment(at)}


def _change(sets: dict[Key, dict[str, Any]], change: Mapping[str, Any]) -> str:
    """Do it to `sets`; why not, or nothing."""
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
    """A set of moto's as a request has it."""
    members = {
        "Name": record.name, "Type": record.type, "TTL": record.ttl, "SetIdentifier": record.set_identifier,
        "Weight": record.weight, "Region": record.region, "HealthCheckId": record.health_check_id,
        "AliasTarget": record.alias_target, "Failover": record.failover, "GeoLocation": record.geo_location,
        "MultiValueAnswer": record.multi_value_answer,
        "ResourceRecords": [{"Value": each} for each in record.records],
    }  # fmt: skip
    return {name: value for name, value in members.items() if value is not None}
