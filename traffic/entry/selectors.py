"""Reads the DNS entry's records, regions, and which regions respond. It never writes."""

from collections import defaultdict
from dataclasses import dataclass, field
from datetime import datetime, timedelta

import msgspec
from django.db.models import Prefetch, QuerySet

from fleet.clouds.models import CloudRegion
from fleet.reconcile.planning.states import CloudRegionState
from fleet.reconcile.selectors.snapshot import LISTENING_LEASE
from kernel.leases import lease_held_since
from traffic.entry.models import Entry, EntryRevision
from traffic.entry.planner import EntryRegion, EntryTargetName, RevisionState
from traffic.region_shares.planning.policy import EvacuationMode, OverrideKind
from traffic.region_shares.selectors.traffic import overrides_in_force
from traffic.routing.models import Ingress, IngressReport
from traffic.routing.planning.ingresses import SILENT_AFTER_S

PUBLISHED_STATES = (RevisionState.SENDING, RevisionState.PENDING, RevisionState.IN_FORCE)
"""States of attempts that are or may be published."""


@dataclass(frozen=True, slots=True)
class EntrySpec:
    """The entry according to the stacks of regions. `targets` maps a region to its load balancer. `problem`: the stacks
    contradict each other."""

    name: str
    zone: str
    targets: dict[str, EntryTargetName] = field(default_factory=dict)
    problem: str = ""


def entry_spec() -> EntrySpec | None:
    """Returns the entry, or None if no region's stack has one."""
    stated: EntrySpec | None = None
    for row in CloudRegion.objects.filter(state=CloudRegionState.READY.value).order_by("region__position", "region_id"):
        try:
            base = row.stated_base()
        except msgspec.ValidationError:
            continue
        name = base.entry_name.lower().rstrip(".")
        if not name or not base.hosted_zone:
            continue
        if stated is None:
            stated = EntrySpec(name, base.hosted_zone)
        elif (name, base.hosted_zone) != (stated.name, stated.zone):
            problem = (
                f"the stack of {row.region_id} names {name} in zone {base.hosted_zone} as the entry, those before it"
                f" name {stated.name} in {stated.zone}: correct its stack"
            )
            return EntrySpec(stated.name, stated.zone, problem=problem)
        if base.load_balancer and base.load_balancer_zone:
            stated.targets[row.region_id] = EntryTargetName(base.load_balancer, base.load_balancer_zone)
    return stated


def entry_regions(entry: Entry, stated: EntrySpec, newest: EntryRevision | None, now: datetime) -> list[EntryRegion]:
    evacuated = {
        order.region
        for order in overrides_in_force(now)
        if order.kind is OverrideKind.EVACUATION and order.mode is EvacuationMode.REAL and not order.deployment
    }
    ingresses: dict[str, list[Ingress]] = defaultdict(list)
    for ingress in Ingress.objects.filter(region__in=list(stated.targets)).select_related("report"):
        ingresses[ingress.region_id].append(ingress)
    listening_since = lease_held_since(name=LISTENING_LEASE, now=now)
    published = {each["SetIdentifier"]: each["AliasTarget"] for each in (newest.records if newest else ())}
    return [
        _entry_region(
            region,
            ingresses[region],
            float(entry.shares.get(region, 1.0)),
            evacuated=region in evacuated,
            moved=region in published and EntryTargetName(
                published[region]["DNSName"], published[region]["HostedZoneId"]
            ) != target,
            listening_since=listening_since,
            now=now,
        )
        for region, target in sorted(stated.targets.items())
    ]  # fmt: skip


def _entry_region(
    name: str,
    ingresses: list[Ingress],
    share: float,
    *,
    evacuated: bool,
    moved: bool,
    listening_since: datetime | None,
    now: datetime,
) -> EntryRegion:
    reports = [report for each in ingresses if (report := getattr(each, "report", None)) is not None]
    alive = [report for report in reports if _is_answering(report, now)]
    if alive:
        since = min(report.connection_changed_at or now for report in alive)
        return EntryRegion(name, share, alive_since=since, evacuated=evacuated, moved=moved)
    if listening_since is None:  # no controller could have received reports
        return EntryRegion(name, share, alive_since=now, evacuated=evacuated, moved=moved)
    heard = [report.last_seen_at for report in reports if report.last_seen_at is not None]
    since = max([*heard, listening_since])
    return EntryRegion(name, share, dead_since=since, evacuated=evacuated, moved=moved)


def _is_answering(report: IngressReport, now: datetime) -> bool:
    """Whether it is connected and has a table; without one HAProxy answers no request."""
    if not report.connected or report.last_seen_at is None or not report.revision:
        return False
    return now - report.last_seen_at < timedelta(seconds=SILENT_AFTER_S)


def entries_described() -> QuerySet[Entry]:
    return Entry.objects.prefetch_related(Prefetch("revisions", EntryRevision.objects.defer("records")))


def published_attempt(entry: Entry) -> EntryRevision | None:
    """Returns the published attempt as far as known; None before the first."""
    known = (RevisionState.PENDING.value, RevisionState.IN_FORCE.value)
    return entry.revisions.filter(state__in=known).order_by("-revision").first()
