"""Keeps the ingresses of a region in the target groups of its load balancer.

Both calls may be repeated, so a row is written after its call: one that was cut short is made again. What leaves stays
in its row until its group's delay has passed, and its machine waits for that.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime

import msgspec
from django.db.models import QuerySet

from engine_agent.protocol.ports import tls_port
from fleet.models import CloudRegion, Machine
from fleet.planning.states import CloudRegionState, MachineState
from fleet.providers.aws.calls import CallFailed
from fleet.providers.aws.calls import call as aws_call
from kernel import live
from kernel.events import event_record
from kernel.leases import lease_release, lease_take, this_holder
from kernel.tones import Tone
from traffic.models import EntryTarget, Ingress, IngressReport
from traffic.planning.entry_targets import Target, TargetIngress, plan_targets
from traffic.services.entry_route53 import AwsCall

PASS_LIMIT_S = 120.0
TLS = "tls"
"""Name of the group for applications that speak TLS, among those of a region's stack."""
DRAINED = frozenset({"unused", ""})
"""States of a target that has no streams any more; "": the group does not know it."""

log = logging.getLogger(__name__)


def entry_targets_follow(*, now: datetime, call: AwsCall = aws_call) -> None:
    """One pass over all regions that have target groups."""
    for cloud in CloudRegion.objects.filter(state=CloudRegionState.READY.value):
        try:
            groups = cloud.stated_base().target_groups
        except msgspec.ValidationError:
            continue
        holder, lease = this_holder(), f"targets:{cloud.pk}"
        if not groups or lease_take(name=lease, holder=holder, ttl_s=PASS_LIMIT_S, now=now) is None:
            continue
        try:
            EntryTarget.objects.filter(region=cloud.region_id).exclude(group__in=list(groups.values())).delete()
            ingresses = _ingresses(cloud.region_id)
            for name, group in sorted(groups.items()):
                _follow(cloud, group, _at_port_of(name, ingresses), call, now)
        except CallFailed as error:
            log.warning("targets of %s are left as they are: %s", cloud.pk, error)
        finally:
            lease_release(name=lease, holder=holder, now=now)


def _at_port_of(name: str, ingresses: Sequence[TargetIngress]) -> list[TargetIngress]:
    """As the group of this name reaches them: that of TLS has a port of its own."""
    return [replace(each, port=tls_port(each.port)) if name == TLS else each for each in ingresses]


def _follow(cloud: CloudRegion, group: str, ingresses: Sequence[TargetIngress], call: AwsCall, now: datetime) -> None:
    rows = list(EntryTarget.objects.filter(region=cloud.region_id, group=group))
    plan = plan_targets([group], ingresses, [row.view() for row in rows])
    for target in plan.forget:
        _rows(target).delete()
    for target in plan.register:
        call("elbv2", "RegisterTargets", cloud.aws_region, TargetGroupArn=target.group, Targets=[_said(target)])
        stated = {"address": target.address, "port": target.port, "registered_at": now, "deregistered_at": None}
        EntryTarget.objects.update_or_create(
            ingress=target.ingress, group=target.group, defaults={"region_id": cloud.region_id, **stated}
        )
        _tell(cloud, f"{target.ingress} gets clients of the load balancer at port {target.port}", Tone.OK, now)
    for target in plan.deregister:
        call("elbv2", "DeregisterTargets", cloud.aws_region, TargetGroupArn=target.group, Targets=[_said(target)])
        _rows(target).update(deregistered_at=now)
        _tell(
            cloud, f"{target.ingress} gets no more clients of the load balancer at port {target.port}", Tone.MOVING, now
        )
    for row in rows:
        if row.deregistered_at is not None and _is_drained(row, cloud, call):
            row.delete()


def _ingresses(region: str) -> list[TargetIngress]:
    leaving = set(
        Machine.objects.filter(region_id=region, leaving=True)
        .exclude(state=MachineState.GONE)
        .exclude(runs="")
        .values_list("runs", flat=True)
    )
    found = []
    for ingress in Ingress.objects.filter(region_id=region).select_related("report"):
        report: IngressReport | None = getattr(ingress, "report", None)
        ready = report is not None and report.connected and report.revision > 0
        found.append(TargetIngress(ingress.id, ingress.address, ingress.port, ready, ingress.id in leaving))
    return found


def _is_drained(row: EntryTarget, cloud: CloudRegion, call: AwsCall) -> bool:
    """A group that forgot the target, or says that it is not used, has no streams to it."""
    answer = call(
        "elbv2", "DescribeTargetHealth", cloud.aws_region, TargetGroupArn=row.group, Targets=[_said(row.view())]
    )
    states = [each["TargetHealth"]["State"] for each in answer["TargetHealthDescriptions"]]
    return all(state in DRAINED for state in states)


def _said(target: Target) -> dict[str, object]:
    return {"Id": target.address, "Port": target.port}


def _rows(target: Target) -> QuerySet[EntryTarget]:
    return EntryTarget.objects.filter(ingress=target.ingress, group=target.group)


def _tell(cloud: CloudRegion, message: str, tone: Tone, now: datetime) -> None:
    event_record(kind="ingress.target", message=message, tone=tone, now=now, region=cloud.region_id)
    live.push("traffic", cloud.region_id)
