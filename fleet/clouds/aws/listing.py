"""Lists an install's machines in EC2 with statuses, places and reservations, stores the states of recorded machines,
and lists and deletes unattached volumes, network interfaces and spot requests. A list counts only if all pages arrived.
While a zone does not answer, EC2 rejects lists of the whole region: recorded machines are then listed by ID, zone by
zone, and those of the silent zone keep their state. A machine without an answer keeps its place too and is listed
again. EC2 filters every list, so that lists stay short in large fleets."""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from django.db import transaction

from fleet.clouds.aws import calls
from fleet.clouds.aws.attempts import PROVIDER
from fleet.clouds.aws.launch import TAG_INSTALL, TAG_UNIT
from fleet.clouds.aws.notices import scheduled_kind
from fleet.clouds.models import CapacityPool, CloudRegion
from fleet.clouds.planning.call_budget import PAGE, TOPOLOGY_CALL, PlacedMachine, path_of, topology_batches
from fleet.clouds.planning.upkeep import ResourceKind
from fleet.machines.models import Machine
from fleet.machines.planner import ENDED, KnownMachine, Listed, plan_listed_states
from fleet.nodes.models import Node
from fleet.placement.planning.distance import Path
from fleet.reconcile.planning.states import MachineRole, MachineState, NoticeKind
from kernel import live, wake_ups

__all__ = ["ENDED", "Instance", "Listing", "listing_store", "machines_refresh", "region_list", "states_store"]

BY_FILTER = 200
BY_ID = 500


@dataclass(frozen=True, slots=True)
class Instance:
    """A machine of this install as EC2 lists it. `tags`: only ours."""

    provider_id: str
    state: str
    zone: str
    launched_at: datetime
    tags: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Listing:
    """`complete`: all pages arrived, and every zone answered."""

    instances: tuple[Instance, ...]
    began_at: datetime
    complete: bool
    silent_zones: frozenset[str] = frozenset()


def region_list(cloud: CloudRegion, install: str, now: datetime) -> Listing:
    """Lists every machine of this install in a region, including terminated ones that EC2 still lists. Raises
    CallFailed if no zone answered."""
    filters = [{"Name": f"tag:{TAG_INSTALL}", "Values": [install]}]
    try:
        return Listing(tuple(_describe_instances(cloud.aws_region, Filters=filters, MaxResults=PAGE)), now, True)
    except calls.Unanswered:
        return _zone_by_zone(cloud, now)


def _zone_by_zone(cloud: CloudRegion, now: datetime) -> Listing:
    """Lists recorded machines. A batch with an unknown ID fails as a whole and proves nothing about the others."""
    by_zone: dict[str, list[str]] = defaultdict(list)
    for row in _recorded_machines(cloud.pk):
        by_zone[row.zone].append(row.provider_id)
    instances: list[Instance] = []
    silent = set()
    for zone, ids in sorted(by_zone.items()):
        try:
            for batch in _id_batches(ids, BY_ID):
                instances.extend(_describe_instances(cloud.aws_region, InstanceIds=batch))
        except calls.Unanswered:
            silent.add(zone)
        except calls.Refused:
            continue
    if len(silent) == len(by_zone):
        raise calls.Unanswered("", f"no zone of {cloud.aws_region} answers")
    return Listing(tuple(instances), now, False, frozenset(silent))


def machines_refresh(rows: Sequence[Machine], now: datetime) -> None:
    """Lists single machines and stores their states. Machines that are missing in the answer keep their state. Uses a
    filter, because EC2 rejects requests by ID for machines that are not visible yet."""
    by_region: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        by_region[row.region_id].append(row.provider_id)
    names = dict(CloudRegion.objects.filter(pk__in=by_region).values_list("pk", "aws_region"))
    for region, ids in by_region.items():
        for batch in _id_batches(sorted(ids), BY_FILTER) if region in names else ():
            filters = [{"Name": "instance-id", "Values": batch}]
            try:
                found = list(_describe_instances(names[region], Filters=filters, MaxResults=PAGE))
            except calls.CallFailed:
                break
            states_store({one.provider_id: one.state for one in found}, now)


def _describe_instances(region: str, **params: Any) -> Iterator[Instance]:
    for page in calls.pages("DescribeInstances", region, **params):
        for reservation in page["Reservations"]:
            for instance in reservation["Instances"]:
                yield Instance(
                    provider_id=instance["InstanceId"],
                    state=instance["State"]["Name"],
                    zone=instance.get("Placement", {}).get("AvailabilityZone", ""),
                    launched_at=instance["LaunchTime"],
                    tags={tag["Key"]: tag["Value"] for tag in instance.get("Tags", ())},
                )


def _id_batches(ids: Sequence[str], most: int) -> Iterator[list[str]]:
    for at in range(0, len(ids), most):
        yield list(ids[at : at + most])


def _recorded_machines(region: str) -> "Iterable[Machine]":
    return Machine.objects.filter(provider=PROVIDER, region_id=region).exclude(state=MachineState.GONE)


def states_store(states: Mapping[str, str], now: datetime) -> None:
    for state in set(states.values()):
        ids = [provider_id for provider_id, one in states.items() if one == state]
        rows = Machine.objects.filter(provider=PROVIDER, provider_id__in=ids)
        if state not in ENDED:
            rows = rows.exclude(cloud_state__in=ENDED)
        rows.update(cloud_state=state, cloud_seen_at=now, absent_lists=0)


def listing_store(cloud: CloudRegion, listing: Listing, now: datetime) -> None:
    """Applies a region's list to the machines recorded in it."""
    known = [
        KnownMachine(row.provider_id, row.zone, row.cloud_state, row.created_at, row.absent_lists)
        for row in _recorded_machines(cloud.pk)
    ]
    states = {one.provider_id: one.state for one in listing.instances}
    changes = plan_listed_states(known, Listed(states, listing.began_at, listing.complete, listing.silent_zones))
    alike: dict[tuple[str, int, bool], list[str]] = defaultdict(list)
    for change in changes:
        alike[change.state, change.absent_lists, change.provider_id in states].append(change.provider_id)
    for (state, absent, was_seen), ids in alike.items():
        rows = Machine.objects.filter(provider=PROVIDER, provider_id__in=ids)
        seen = {"cloud_seen_at": now} if was_seen else {}
        rows.update(cloud_state=state, absent_lists=absent, **seen)
    before = {one.provider_id: one.state for one in known}
    if any(before[change.provider_id] != change.state for change in changes):
        live.push("machines")


# DescribeInstanceStatus: state, checks and scheduled events of all machines of an account in a region.
# It has no filter by tag: callers drop the machines of other installs.

OVER = ("[Completed]", "[Canceled]")
"""Prefix of the description of a scheduled event that is over."""
IMPAIRED = "impaired"


@dataclass(frozen=True, slots=True)
class ScheduledEvent:
    id: str
    machine: str
    kind: NoticeKind
    code: str
    text: str
    not_before: datetime


@dataclass(frozen=True, slots=True)
class Statuses:
    """By instance ID. `impaired`: since when; None if EC2 does not state it."""

    states: dict[str, str] = field(default_factory=dict)
    impaired: dict[str, datetime | None] = field(default_factory=dict)
    events: list[ScheduledEvent] = field(default_factory=list)


def region_statuses(region: str) -> Statuses:
    """Reads all pages. Raises CallFailed if a page is missing."""
    found = Statuses()
    for page in calls.pages("DescribeInstanceStatus", region, IncludeAllInstances=True, MaxResults=PAGE):
        for status in page["InstanceStatuses"]:
            _read_statuses(found, status)
    return found


def _read_statuses(found: Statuses, status: Mapping[str, Any]) -> None:
    machine = status["InstanceId"]
    found.states[machine] = status["InstanceState"]["Name"]
    checks = [status.get(name) or {} for name in ("SystemStatus", "InstanceStatus")]
    if any(check.get("Status") == IMPAIRED for check in checks):
        found.impaired[machine] = min(_impaired_since(checks), default=None)
    for event in status.get("Events") or ():
        text = event.get("Description", "")
        if event.get("NotBefore") is not None and not text.startswith(OVER):
            code = event["Code"]
            event_id = event.get("InstanceEventId") or code
            found.events.append(ScheduledEvent(event_id, machine, scheduled_kind(code), code, text, event["NotBefore"]))


def _impaired_since(checks: Iterable[Mapping[str, Any]]) -> list[datetime]:
    details = (detail for check in checks for detail in check.get("Details") or ())
    return [detail["ImpairedSince"] for detail in details if detail.get("ImpairedSince") is not None]


# Capacity reservations: free machines, and when Capacity Blocks end.


@dataclass(frozen=True, slots=True)
class Reservation:
    """`free`: machines that can still be launched in it; 0 once it is over."""

    id: str
    free: int
    is_block: bool
    ends_at: datetime | None


def reservations_read(region: str, ids: Collection[str]) -> tuple[Reservation, ...]:
    """Returns the reservations with these IDs that exist. Lists all of the account, because EC2 rejects a request by
    IDs if one is unknown. Raises CallFailed if the list is not complete."""
    return tuple(
        Reservation(
            id=one["CapacityReservationId"],
            free=one["AvailableInstanceCount"] if one["State"] == "active" else 0,
            is_block=one.get("ReservationType") == "capacity-block",
            ends_at=one.get("EndDate"),
        )
        for page in calls.pages("DescribeCapacityReservations", region, MaxResults=PAGE)
        for one in page["CapacityReservations"]
        if one["CapacityReservationId"] in ids
    )


_INSTANCE = re.compile(r"i-[0-9a-f]{8,17}")
RESERVATIONS = 10


def region_places(cloud: CloudRegion, now: datetime) -> int:
    """Requests the places of the next due batch, if any. Returns the number of machines in it. Raises CallFailed if
    nothing was read, or the call budget is used up."""
    nodes = dict(Node.objects.filter(region_id=cloud.pk).values_list("id", "topology"))
    rows = Machine.objects.filter(
        provider=PROVIDER, region_id=cloud.pk, role=MachineRole.NODE, state=MachineState.TAKEN
    ).exclude(cloud_state__in=ENDED)
    known = [
        PlacedMachine(row.provider_id, row.created_at, row.topology_at, tuple(nodes.get(row.runs, ()))) for row in rows
    ]
    due = topology_batches(known, now)
    if not due:
        return 0
    try:
        answer = calls.call("ec2", TOPOLOGY_CALL, cloud.aws_region, InstanceIds=list(due[0]))
    except calls.Refused as refused:
        # A machine that is not visible yet fails its whole batch: it is retried later, the others with the next call.
        strangers = set(_INSTANCE.findall(refused.text)) & set(due[0])
        if strangers:
            Machine.objects.filter(provider=PROVIDER, provider_id__in=strangers).update(topology_at=now)
        raise
    places_store(due[0], {one["InstanceId"]: _network_path(one, cloud) for one in answer["Instances"]}, now)
    return len(due[0])


def _network_path(instance: Mapping[str, Any], cloud: CloudRegion) -> Path:
    """Uses the zone IDs of the region's stack, as pools do."""
    zone = cloud.base["zones"].get(instance["AvailabilityZone"], {})
    zone_id = zone.get("zone_id") or instance.get("ZoneId") or instance["AvailabilityZone"]
    return path_of(zone_id, instance.get("NetworkNodes") or (), instance.get("CapacityBlockId") or "")


def places_store(asked: Sequence[str], paths: Mapping[str, Path], now: datetime) -> None:
    """Stores the places of the requested machines, by provider ID."""
    with transaction.atomic():
        rows = Machine.objects.filter(provider=PROVIDER, provider_id__in=asked)
        rows.update(topology_at=now)
        nodes = {runs: paths[name] for name, runs in rows.values_list("provider_id", "runs") if name in paths}
        changed = [
            node
            for node in Node.objects.select_for_update().filter(id__in=nodes).order_by("id")
            if tuple(node.topology) != nodes[node.id]
        ]
        for node in changed:
            node.topology = list(nodes[node.id])
        Node.objects.bulk_update(changed, ["topology"])
        for node in changed:
            live.push("nodes", node.id)
    if changed:
        wake_ups.send("fleet.reconcile")


def reservation_places(cloud: CloudRegion) -> None:
    """Stores where the machines of reservations will be, so that launches can pick the one nearest to a cell. Raises
    CallFailed if a later one fails; earlier results are stored."""
    pools = list(CapacityPool.objects.filter(region_id=cloud.pk).exclude(reservation=""))
    ids = sorted({pool.reservation for pool in pools})
    for at in range(0, len(ids), RESERVATIONS):
        answer = calls.call(
            "ec2",
            "DescribeCapacityReservationTopology",
            cloud.aws_region,
            CapacityReservationIds=ids[at : at + RESERVATIONS],
        )
        for one in answer["CapacityReservations"]:
            rows = CapacityPool.objects.filter(region_id=cloud.pk, reservation=one["CapacityReservationId"])
            rows.update(network_nodes=one.get("NetworkNodes") or [])


GARBAGE_PAGE = 500


@dataclass(frozen=True, slots=True)
class Unattached:
    """`unit`: from the tags, or "". `created_at` is None for network interfaces: EC2 does not state it."""

    kind: ResourceKind
    id: str
    unit: str
    created_at: datetime | None


def unattached_list(region: str, install: str) -> list[Unattached]:
    """Lists unattached resources of an AWS region. A spot request counts while it is open and has no machine. Raises
    CallFailed if the list is not complete."""
    return [
        *(
            _unattached_from(ResourceKind.VOLUME, one["VolumeId"], one.get("Tags"), one.get("CreateTime"))
            for one in _list_resources(region, install, "DescribeVolumes", "Volumes", status="available")
        ),
        *(
            _unattached_from(ResourceKind.INTERFACE, one["NetworkInterfaceId"], one.get("TagSet"), None)
            for one in _list_resources(
                region, install, "DescribeNetworkInterfaces", "NetworkInterfaces", status="available"
            )
        ),
        *(
            _unattached_from(
                ResourceKind.SPOT_REQUEST, one["SpotInstanceRequestId"], one.get("Tags"), one.get("CreateTime")
            )
            for one in _list_resources(
                region, install, "DescribeSpotInstanceRequests", "SpotInstanceRequests", state="open"
            )
            if not one.get("InstanceId")
        ),
    ]


def unattached_delete(region: str, kind: ResourceKind, name: str) -> None:
    """EC2 rejects the call if the resource was attached in the meantime. Raises CallFailed if it may still exist."""
    match kind:
        case ResourceKind.VOLUME:
            calls.call("ec2", "DeleteVolume", region, VolumeId=name)
        case ResourceKind.INTERFACE:
            calls.call("ec2", "DeleteNetworkInterface", region, NetworkInterfaceId=name)
        case ResourceKind.SPOT_REQUEST:
            calls.call("ec2", "CancelSpotInstanceRequests", region, SpotInstanceRequestIds=[name])


def machines_terminate(region: str, names: Sequence[str]) -> None:
    """Terminates machines with one call. Raises CallFailed if they may still run."""
    calls.call("ec2", "TerminateInstances", region, machines=len(names), InstanceIds=list(names))


def _list_resources(region: str, install: str, operation: str, member: str, **filters: str) -> Iterator[dict[str, Any]]:
    wanted = {f"tag:{TAG_INSTALL}": install, **filters}
    asked = [{"Name": name, "Values": [value]} for name, value in wanted.items()]
    for page in calls.pages(operation, region, Filters=asked, MaxResults=GARBAGE_PAGE):
        yield from page[member]


def _unattached_from(kind: ResourceKind, name: str, tags: Any, created_at: Any) -> Unattached:
    unit = next((tag["Value"] for tag in tags or () if tag["Key"] == TAG_UNIT), "")
    return Unattached(kind, name, unit, created_at)
