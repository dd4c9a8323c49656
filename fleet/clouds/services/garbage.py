"""Garbage collection: lists what providers and clouds hold for this fleet and deletes what no row references, as
`fleet.clouds.planning.upkeep` decides. Each source is listed before its rows are read, so that a launch in between is
known. Also lists the machines of cloud regions and stores their states."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any

from fleet.clouds.aws.attempts import PROVIDER
from fleet.clouds.aws.calls import CallFailed
from fleet.clouds.aws.identity import install_ensure, install_that_may_change
from fleet.clouds.aws.launch import TAG_UNIT
from fleet.clouds.aws.listing import (
    Listing,
    listing_store,
    machines_terminate,
    region_list,
    unattached_delete,
    unattached_list,
)
from fleet.clouds.base import Later, ProviderError, provider_named
from fleet.clouds.models import CloudRegion, LaunchAttempt
from fleet.clouds.planning.upkeep import (
    CLOUD_RESOURCES,
    PROVIDER_MACHINES,
    GarbagePlan,
    GarbagePolicy,
    Resource,
    ResourceKind,
    plan_garbage_collection,
)
from fleet.faults.services.incidents import incident_open, incidents_close
from fleet.machines.models import Machine
from fleet.machines.planner import ENDED
from fleet.nodes.models import Node
from fleet.reconcile.planning.snapshot import ProviderStatus
from fleet.reconcile.planning.states import MachineState
from kernel import clock
from kernel.events import event_record
from kernel.tones import Tone

HELD = "garbage-held"
"""Kind of the incident while too many resources have no record."""
EVIDENCE_MOST = 100

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GarbageSource:
    """One complete list. `delete` returns what it deleted, and logs what it could not. `place`: region or provider of
    the incident and events."""

    subject: str
    policy: GarbagePolicy
    found: Sequence[Resource]
    delete: Callable[[Sequence[Resource]], Iterable[Resource]]
    before: Mapping[str, datetime] = field(default_factory=dict)
    machines: int = 0
    has_records: bool = True
    provider: str = ""
    region: str = ""

    def plan(self, now: datetime) -> GarbagePlan:
        return plan_garbage_collection(
            self.found, self.before, now, self.policy, machines=self.machines, has_records=self.has_records
        )


def garbage_collect(source: GarbageSource, now: datetime) -> GarbagePlan:
    """Deletes the garbage of a source, and opens or closes its incident."""
    plan = source.plan(now)
    if plan.held:
        log.error("garbage collection of %s is held: %s", source.subject, plan.held)
        evidence = {"suspects": sorted(plan.suspects)[:EVIDENCE_MOST]}
        place: dict[str, Any] = {"region": source.region} if source.region else {}
        incident_open(kind=HELD, subject=source.subject, summary=plan.held, evidence=evidence, now=now, **place)
    elif source.policy.unknown_least is not None:
        incidents_close(kind=HELD, subject=source.subject, resolution="few resources are without a record", now=now)
    for one in source.delete(plan.delete) if plan.delete else ():
        if source.provider:
            _deleted_record(source, one, now)
    return plan


def _deleted_record(source: GarbageSource, one: Resource, now: datetime) -> None:
    place: dict[str, Any] = {"region": source.region} if source.region else {"node": one.id}
    event_record(
        kind="garbage.deleted",
        message=f"Deleted {one.kind} {one.id} of provider {source.provider}: nothing referred to it",
        tone=Tone.WARN,
        now=now,
        **place,
    )


# --- machines of a provider -------------------------------------------------------------------------------------------


def provider_garbage(provider: str, before: Mapping[str, datetime]) -> GarbageSource:
    """Returns the machines of a provider. A machine is referenced while its node may run; a retired node may run until
    its provider has confirmed the end. Raises ProviderError if the list failed."""
    statuses = provider_named(provider).describe_all()
    running = [node for node, status in statuses.items() if status is not ProviderStatus.GONE]
    known = dict(Node.objects.filter(id__in=running).values_list("id", "terminated_at"))
    found = [
        Resource(ResourceKind.MACHINE, node, node in known and known[node] is None, is_recorded=node in known)
        for node in running
    ]
    delete = partial(_provider_terminate, provider)
    return GarbageSource(
        f"provider {provider}", PROVIDER_MACHINES, found, delete, before, machines=len(running), provider=provider
    )


def provider_garbage_collect(provider: str, before: Mapping[str, datetime], *, now: datetime) -> Mapping[str, datetime]:
    """Lists a provider's machines, terminates unreferenced ones, and returns the suspects. Blocks as long as the
    provider does; a failed list keeps the suspects."""
    try:
        source = provider_garbage(provider, before)
    except ProviderError as error:
        log.warning("provider %s did not list its machines: %s", provider, error)
        return before
    return garbage_collect(source, now).suspects


def _provider_terminate(provider: str, garbage: Sequence[Resource]) -> Iterable[Resource]:
    for one in garbage:
        try:
            provider_named(provider).terminate(one.id)
        except ProviderError as error:
            log.warning("machine %s of provider %s is garbage and was not terminated: %s", one.id, provider, error)
            continue
        yield one


# --- regions of a cloud -----------------------------------------------------------------------------------------------


def cloud_machine_garbage(cloud: CloudRegion, listing: Listing) -> GarbageSource:
    """Returns the machines of a complete list. One is referenced if a row has its ID, or if the launch in its tags is
    open."""
    running = [one for one in listing.instances if one.state not in ENDED]
    recorded = Machine.objects.filter(provider=PROVIDER).exclude(state=MachineState.GONE)
    ids = [one.provider_id for one in running]
    known = frozenset(recorded.filter(provider_id__in=ids).values_list("provider_id", flat=True))
    open_units = _open_units()
    found = [
        Resource(
            ResourceKind.MACHINE,
            one.provider_id,
            one.provider_id in known or one.tags.get(TAG_UNIT, "") in open_units,
            created_at=one.launched_at,
        )
        for one in running
    ]
    return cloud_source(cloud, "machines", found, _machines_delete, len(running))


def cloud_resource_garbage(cloud: CloudRegion, now: datetime) -> GarbageSource:
    """Returns unattached volumes, network interfaces and spot requests. One is referenced while the launch in its tags
    is open. Raises CallFailed if the list is not complete."""
    listed = unattached_list(cloud.aws_region, install_ensure(now).pk)
    open_units = _open_units()
    found = [Resource(one.kind, one.id, one.unit in open_units, created_at=one.created_at) for one in listed]
    recorded = Machine.objects.filter(provider=PROVIDER, region_id=cloud.pk).exclude(state=MachineState.GONE)
    return cloud_source(cloud, "resources", found, _resources_delete, recorded.count())


def cloud_garbage_collect(cloud: CloudRegion, now: datetime) -> None:
    """Deletes unreferenced volumes, network interfaces and spot requests."""
    try:
        source = cloud_resource_garbage(cloud, now)
    except CallFailed as error:
        log.warning("unattached resources of region %s were not listed: %s", cloud.pk, error)
        return
    cloud_source_collect(cloud, source, clock.now())


def cloud_source_collect(cloud: CloudRegion, source: GarbageSource, now: datetime) -> None:
    """Collects a source of a region. Suspects are kept in the region's row, so that two lists may span a restart."""
    plan = garbage_collect(source, now)
    suspects = CloudRegion.objects.values_list("suspects", flat=True).get(pk=cloud.pk)
    suspects[source.subject] = {name: at.isoformat() for name, at in plan.suspects.items()}
    CloudRegion.objects.filter(pk=cloud.pk).update(suspects=suspects)


def cloud_source(
    cloud: CloudRegion,
    name: str,
    found: Sequence[Resource],
    delete: Callable[[CloudRegion, Sequence[Resource]], Iterable[Resource]],
    machines: int,
) -> GarbageSource:
    """Returns a complete list of a region as a source whose suspects are kept in the region's row."""
    subject = f"{cloud.pk}/{name}"
    before = CloudRegion.objects.values_list("suspects", flat=True).get(pk=cloud.pk).get(subject, {})
    return GarbageSource(
        subject,
        CLOUD_RESOURCES,
        found,
        partial(_delete_if_allowed, cloud, delete),
        {one: datetime.fromisoformat(at) for one, at in before.items()},
        machines=machines,
        has_records=LaunchAttempt.objects.exists(),
        provider=cloud.region.provider,
        region=cloud.pk,
    )


def _open_units() -> frozenset[str]:
    return frozenset(LaunchAttempt.objects.filter(ended_at=None).values_list("unit_id", flat=True))


def _delete_if_allowed(
    cloud: CloudRegion,
    delete: Callable[[CloudRegion, Sequence[Resource]], Iterable[Resource]],
    garbage: Sequence[Resource],
) -> Iterable[Resource]:
    """Deletes nothing on an install's first day or while it is read-only."""
    now, names = clock.now(), ", ".join(one.id for one in garbage)
    try:
        install = install_that_may_change(now)
    except Later as error:
        log.warning("garbage of region %s stays (%s): %s", cloud.pk, names, error)
        return ()
    if install.dry_run_until > now:
        until = f"{install.dry_run_until:%Y-%m-%d %H:%M} UTC"
        log.warning("region %s: no row references %s; garbage is deleted after %s", cloud.pk, names, until)
        return ()
    return delete(cloud, garbage)


def _machines_delete(cloud: CloudRegion, garbage: Sequence[Resource]) -> Iterable[Resource]:
    try:
        machines_terminate(cloud.aws_region, [one.id for one in garbage])
    except CallFailed as error:
        log.warning("machines of region %s are garbage and were not terminated: %s", cloud.pk, error)
        return ()
    return garbage


def _resources_delete(cloud: CloudRegion, garbage: Sequence[Resource]) -> Iterable[Resource]:
    """One call each: EC2 rejects only those in use again."""
    for one in garbage:
        try:
            unattached_delete(cloud.aws_region, one.kind, one.id)
        except CallFailed as error:
            log.warning("%s %s of region %s was not deleted: %s", one.kind, one.id, cloud.pk, error)
            continue
        yield one


def cloud_list(cloud: CloudRegion, now: datetime) -> None:
    """Lists a region and stores which zones did not answer. Blocks as long as the cloud does."""
    try:
        listing = region_list(cloud, install_ensure(now).id, now)
    except CallFailed as error:
        log.warning("region %s was not listed: %s", cloud.pk, error)
        return
    listing_store(cloud, listing, clock.now())
    columns = {"listed_at": now} if listing.complete else {}
    CloudRegion.objects.filter(pk=cloud.pk).update(silent_zones=sorted(listing.silent_zones), **columns)
    if listing.complete:
        cloud_source_collect(cloud, cloud_machine_garbage(cloud, listing), clock.now())
