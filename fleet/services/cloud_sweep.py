"""Ends machines of a cloud that belong to nobody. A list comes first, rows are read after it."""

import logging
from datetime import datetime

from fleet.models import CloudRegion, Install, LaunchAttempt, Machine
from fleet.planning.cloud_sweep import ListedMachine, SweepPlan, plan_sweep
from fleet.planning.states import MachineState
from fleet.providers.aws import calls
from fleet.providers.aws.attempts import PROVIDER
from fleet.providers.aws.install import install_that_may_change
from fleet.providers.aws.launch import TAG_UNIT
from fleet.providers.aws.listing import Listing
from fleet.providers.base import Later
from fleet.services.incident import incident_open, incidents_close
from kernel.events import event_record
from kernel.tones import Tone

HELD = "orphans-held"

log = logging.getLogger(__name__)


def sweep_plan(cloud: CloudRegion, listing: Listing, now: datetime) -> SweepPlan:
    """What a whole list of a region shows to be nobody's. Nothing is changed."""
    listed = [
        ListedMachine(one.provider_id, one.tags.get(TAG_UNIT, ""), one.state, one.launched_at)
        for one in listing.instances
    ]
    recorded = Machine.objects.filter(provider=PROVIDER).exclude(state=MachineState.GONE)
    ids = [one.provider_id for one in listed]
    return plan_sweep(
        listed,
        frozenset(recorded.filter(provider_id__in=ids).values_list("provider_id", flat=True)),
        frozenset(LaunchAttempt.objects.filter(ended_at=None).values_list("unit_id", flat=True)),
        cloud.suspects,
        now,
        has_records=LaunchAttempt.objects.exists(),
    )


def cloud_sweep(cloud: CloudRegion, listing: Listing, now: datetime) -> SweepPlan:
    """End what two whole lists in a row showed to be nobody's. On an install's first day it is only said."""
    plan = sweep_plan(cloud, listing, now)
    CloudRegion.objects.filter(pk=cloud.pk).update(suspects=sorted(plan.suspects))
    if plan.held:
        log.error("region %s: %s", cloud.pk, plan.held)
        evidence = {"machines": sorted(plan.suspects)[:100]}
        incident_open(kind=HELD, subject=cloud.pk, summary=plan.held, evidence=evidence, now=now, region=cloud.pk)
    else:
        incidents_close(kind=HELD, subject=cloud.pk, resolution="what runs is known again", now=now)
    if plan.end:
        _end(cloud, plan, now)
    return plan


def sweep_install(cloud: CloudRegion, names: str, now: datetime) -> Install | None:
    """The install that may end what these name; None, and the log says why, if it may not now."""
    try:
        install = install_that_may_change(now)
    except Later as error:
        log.warning("%s of region %s stay: %s", names, cloud.pk, error)
        return None
    if install.dry_run_until > now:
        said = f"they would be ended after {install.dry_run_until:%Y-%m-%d %H:%M} UTC"
        log.warning("region %s: %s belong to nobody; %s", cloud.pk, names, said)
        return None
    return install


def _end(cloud: CloudRegion, plan: SweepPlan, now: datetime) -> None:
    if sweep_install(cloud, ", ".join(plan.end), now) is None:
        return
    try:
        calls.call("ec2", "TerminateInstances", cloud.aws_region, machines=len(plan.end), InstanceIds=list(plan.end))
    except calls.CallFailed as error:
        log.warning("orphans of region %s: %s", cloud.pk, error)
        return
    for machine in plan.end:
        event_record(
            kind="machine.orphan_ended",
            message=f"{machine} of provider {PROVIDER} belonged to nobody; ended it",
            tone=Tone.WARN,
            now=now,
            region=cloud.pk,
        )
