"""Lists machines of EC2, in a whole region or single ones, with their statuses and the region's capacity reservations.
Stores the states of recorded machines.

A list counts only if all its pages came. While a zone is silent EC2 refuses a list of the whole region: then the
machines that are recorded are asked for by their ids, zone by zone, and nothing is said of those of the silent one.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from fleet.models import CloudRegion, Machine
from fleet.planning.call_budget import PAGE
from fleet.planning.presence import ENDED, KnownMachine, Listed, plan_presence
from fleet.planning.states import MachineState, NoticeKind
from fleet.providers.aws import calls
from fleet.providers.aws.attempts import PROVIDER
from fleet.providers.aws.launch import TAG_INSTALL
from fleet.providers.aws.notices import scheduled_kind
from kernel import live

__all__ = ["ENDED", "Instance", "Listing", "machines_look", "presence_store", "region_list", "seen_store"]

BY_FILTER = 200
"""Values of one filter, at most."""
BY_ID = 500


@dataclass(frozen=True, slots=True)
class Instance:
    """One machine of this install, as EC2 lists it. `tags`: of ours."""

    provider_id: str
    state: str
    zone: str
    launched_at: datetime
    tags: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Listing:
    """`complete`: all pages came, and every zone answered."""

    instances: tuple[Instance, ...]
    began_at: datetime
    complete: bool
    silent_zones: frozenset[str] = frozenset()


def region_list(cloud: CloudRegion, install: str, now: datetime) -> Listing:
    """Every machine of this install in a region, ended ones for as long as EC2 remembers them.

    Raises:
        CallFailed: nothing at all can be said.
    """
    filters = [{"Name": f"tag:{TAG_INSTALL}", "Values": [install]}]
    try:
        return Listing(tuple(_described(cloud.aws_region, Filters=filters, MaxResults=PAGE)), now, True)
    except calls.Unanswered:
        return _zone_by_zone(cloud, now)


def _zone_by_zone(cloud: CloudRegion, now: datetime) -> Listing:
    """Those that are recorded. A batch with one that is not found fails as a whole, and says nothing of the others."""
    by_zone: dict[str, list[str]] = defaultdict(list)
    for row in _recorded(cloud.pk):
        by_zone[row.zone].append(row.provider_id)
    instances: list[Instance] = []
    silent = set()
    for zone, ids in sorted(by_zone.items()):
        try:
            for batch in _batches(ids, BY_ID):
                instances.extend(_described(cloud.aws_region, InstanceIds=batch))
        except calls.Unanswered:
            silent.add(zone)
        except calls.Refused:
            continue
    if len(silent) == len(by_zone):
        raise calls.Unanswered("", f"no zone of {cloud.aws_region} answers")
    return Listing(tuple(instances), now, False, frozenset(silent))


def machines_look(rows: Sequence[Machine], now: datetime) -> None:
    """Ask about single machines, and store what EC2 says. What it does not show, or does not answer, stays as it was:
    a filter is never refused for one that is not visible yet."""
    by_region: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        by_region[row.region_id].append(row.provider_id)
    names = dict(CloudRegion.objects.filter(pk__in=by_region).values_list("pk", "aws_region"))
    for region, ids in by_region.items():
        for batch in _batches(sorted(ids), BY_FILTER) if region in names else ():
            filters = [{"Name": "instance-id", "Values": batch}]
            try:
                found = list(_described(names[region], Filters=filters, MaxResults=PAGE))
            except calls.CallFailed:
                break
            seen_store({one.provider_id: one.state for one in found}, now)


def _described(region: str, **params: Any) -> Iterator[Instance]:
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


def _batches(ids: Sequence[str], most: int) -> Iterator[list[str]]:
    for at in range(0, len(ids), most):
        yield list(ids[at : at + most])


def _recorded(region: str) -> "Iterable[Machine]":
    return Machine.objects.filter(provider=PROVIDER, region_id=region).exclude(state=MachineState.GONE)


def seen_store(states: Mapping[str, str], now: datetime) -> None:
    """What was seen of machines by their ids, ended or not."""
    for state in set(states.values()):
        ids = [provider_id for provider_id, one in states.items() if one == state]
        rows = Machine.objects.filter(provider=PROVIDER, provider_id__in=ids)
        if state not in ENDED:
            rows = rows.exclude(cloud_state__in=ENDED)
        rows.update(cloud_state=state, cloud_seen_at=now, absent_lists=0)


def presence_store(cloud: CloudRegion, listing: Listing, now: datetime) -> None:
    """What a list of a region says of the machines that are recorded in it."""
    known = [
        KnownMachine(row.provider_id, row.zone, row.cloud_state, row.created_at, row.absent_lists)
        for row in _recorded(cloud.pk)
    ]
    states = {one.provider_id: one.state for one in listing.instances}
    changes = plan_presence(known, Listed(states, listing.began_at, listing.complete, listing.silent_zones))
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


# What DescribeInstanceStatus says: state, checks and scheduled events of all machines of an account in a region,
# ours and others'. It has no filter by tag: who asks drops the others.

OVER = ("[Completed]", "[Canceled]")
"""How the description of an event begins that is still listed for a while."""
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
    """By id of the instance. `impaired`: since when; None: not said."""

    states: dict[str, str] = field(default_factory=dict)
    impaired: dict[str, datetime | None] = field(default_factory=dict)
    events: list[ScheduledEvent] = field(default_factory=list)


def region_statuses(region: str) -> Statuses:
    """All pages, or nothing.

    Raises:
        CallFailed: some page did not come.
    """
    found = Statuses()
    for page in calls.pages("DescribeInstanceStatus", region, IncludeAllInstances=True, MaxResults=PAGE):
        for status in page["InstanceStatuses"]:
            _read(found, status)
    return found


def _read(found: Statuses, status: Mapping[str, Any]) -> None:
    machine = status["InstanceId"]
    found.states[machine] = status["InstanceState"]["Name"]
    checks = [status.get(name) or {} for name in ("SystemStatus", "InstanceStatus")]
    if any(check.get("Status") == IMPAIRED for check in checks):
        found.impaired[machine] = min(_since(checks), default=None)
    for event in status.get("Events") or ():
        text = event.get("Description", "")
        if event.get("NotBefore") is not None and not text.startswith(OVER):
            code = event["Code"]
            event_id = event.get("InstanceEventId") or code
            found.events.append(ScheduledEvent(event_id, machine, scheduled_kind(code), code, text, event["NotBefore"]))


def _since(checks: Iterable[Mapping[str, Any]]) -> list[datetime]:
    details = (detail for check in checks for detail in check.get("Details") or ())
    return [detail["ImpairedSince"] for detail in details if detail.get("ImpairedSince") is not None]


# What EC2 says of capacity reservations: how much is left in them, and when Capacity Blocks end.


@dataclass(frozen=True, slots=True)
class Reservation:
    """`free`: machines that may still be launched in it; none once it is over."""

    id: str
    free: int
    is_block: bool
    ends_at: datetime | None


def reservations_read(region: str, ids: Collection[str]) -> tuple[Reservation, ...]:
    """Those of these ids that there are. All of the account are listed: one that is unknown would have a call by ids
    refused as a whole.

    Raises:
        CallFailed: not all were said.
    """
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
