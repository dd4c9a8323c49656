"""Ends volumes, network interfaces and requests for spot machines that belong to no machine: a step of `cloud_upkeep`.
The cloud is listed first, rows are read after it."""

import logging
from datetime import datetime

from fleet.models import CloudRegion, LaunchAttempt, Machine
from fleet.planning.cloud_leftovers import Leftover, LeftoverPlan, plan_leftovers
from fleet.planning.states import MachineState
from fleet.providers.aws.attempts import PROVIDER
from fleet.providers.aws.calls import CallFailed
from fleet.providers.aws.install import install_ensure
from fleet.providers.aws.leftovers import leftover_end, leftovers_list
from fleet.services.cloud_sweep import HELD, sweep_install
from fleet.services.incident import incident_open, incidents_close
from kernel import clock
from kernel.events import event_record
from kernel.tones import Tone

log = logging.getLogger(__name__)


def leftovers_plan(cloud: CloudRegion, now: datetime) -> LeftoverPlan:
    """What a look at a region shows. Nothing is changed.

    Raises:
        CallFailed: the region was not listed as a whole.
    """
    found = leftovers_list(cloud.aws_region, install_ensure(now).pk)
    before = CloudRegion.objects.values_list("leftovers", flat=True).get(pk=cloud.pk)
    recorded = Machine.objects.filter(provider=PROVIDER, region_id=cloud.pk).exclude(state=MachineState.GONE)
    return plan_leftovers(
        found,
        frozenset(LaunchAttempt.objects.filter(ended_at=None).values_list("unit_id", flat=True)),
        {name: datetime.fromisoformat(at) for name, at in before.items()},
        clock.now(),
        machines=recorded.count(),
        has_records=LaunchAttempt.objects.exists(),
    )


def cloud_leftovers(cloud: CloudRegion, now: datetime) -> None:
    """End what two whole looks in a row showed to belong to nothing. On an install's first day it is only said. Each is
    ended by a call of its own: that EC2 refuses one, which is used again, says nothing of the others."""
    try:
        plan = leftovers_plan(cloud, now)
    except CallFailed as error:
        log.warning("what is left over in region %s was not listed: %s", cloud.pk, error)
        return
    suspects = {name: at.isoformat() for name, at in plan.suspects.items()}
    CloudRegion.objects.filter(pk=cloud.pk).update(leftovers=suspects)
    subject = f"{cloud.pk}/leftovers"
    if plan.held:
        log.error("region %s: %s", cloud.pk, plan.held)
        evidence = {"leftovers": sorted(plan.suspects)[:100]}
        incident_open(kind=HELD, subject=subject, summary=plan.held, evidence=evidence, now=now, region=cloud.pk)
    else:
        incidents_close(kind=HELD, subject=subject, resolution="few are left over again", now=now)
    names = ", ".join(one.provider_id for one in plan.end)
    if plan.end and sweep_install(cloud, names, now) is not None:
        for one in plan.end:
            _end(cloud, one, now)


def _end(cloud: CloudRegion, one: Leftover, now: datetime) -> None:
    try:
        leftover_end(cloud.aws_region, one)
    except CallFailed as error:
        log.warning("%s %s of region %s: %s", one.kind, one.provider_id, cloud.pk, error)
        return
    event_record(
        kind="leftover.ended",
        message=f"{one.kind} {one.provider_id} of provider {PROVIDER} belonged to no machine; ended it",
        tone=Tone.WARN,
        now=now,
        region=cloud.pk,
    )
