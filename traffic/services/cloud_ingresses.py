"""Ingress machines of regions in a cloud: one in each zone, launched through the provider like any machine.

An ingress has its row first, without an address. Its launch may take several calls, of which each is one step; once it
has a machine, the ingress takes that machine's address. One whose machine was seen to end is removed, and another takes
its place: an id is never used for a second machine.
"""

import logging
import secrets
from datetime import datetime, timedelta

import msgspec
from django.db import transaction

from engine_agent.protocol.states import AgentKind
from fleet.models import CloudRegion, Machine, Region
from fleet.planning.cloud_base import CloudBase
from fleet.planning.snapshot import ProviderStatus
from fleet.planning.states import CloudRegionState, MachineState
from fleet.providers import provider_named
from fleet.providers.base import Later, LaunchSpec, NodeProvider, ProviderError
from kernel import live
from kernel.events import event_record
from kernel.leases import lease_release, lease_take, this_holder
from kernel.tones import Tone
from traffic.models import Ingress, IngressReport
from traffic.planning.ingress import IngressMachine, NewIngress, RemoveIngress, plan_ingress_machines
from traffic.services.ingress_machines import ingress_remove

PORT = 8080
"""Of every ingress machine: nothing else serves there."""
STEP_EVERY_S = 10.0
"""Between two steps of a launch. One that is too early costs no call: its provider says so by its rows."""
STEP_LIMIT_S = 60.0
"""A call of a provider hangs after this, and another controller may try."""

log = logging.getLogger(__name__)


def cloud_ingresses_ensure(*, now: datetime) -> None:
    """Have the ingresses that each region of a cloud needs, as far as its stack has been read."""
    for cloud in CloudRegion.objects.filter(state=CloudRegionState.READY.value).select_related("region"):
        try:
            base = cloud.stated_base()
        except msgspec.ValidationError:
            continue
        holder, lease = this_holder(), f"ingresses:{cloud.pk}"
        if not base.ingress_group or lease_take(name=lease, holder=holder, ttl_s=STEP_LIMIT_S, now=now) is None:
            continue
        try:
            _ensure(cloud.region, base, now)
        finally:
            lease_release(name=lease, holder=holder, now=now)


def _ensure(region: Region, base: CloudBase, now: datetime) -> None:
    provider = provider_named(region.provider)
    ingresses = list(Ingress.objects.filter(region=region).exclude(zone="").select_related("report"))
    statuses = provider.describe([each.id for each in ingresses]) if ingresses else {}
    there = [
        IngressMachine(each.id, each.zone, gone=statuses[each.id] is ProviderStatus.GONE and bool(each.address))
        for each in ingresses
    ]
    by_id = {each.id: each for each in ingresses}
    for decision in plan_ingress_machines(list(base.zones), there):
        match decision:
            case RemoveIngress(id=name, reason=reason):
                ingress_remove(by_id.pop(name), reason, now)
            case NewIngress(zone=zone, reason=reason):
                created = _create(region, zone, reason, now)
                by_id[created.id] = created
    machines = {row.runs: row for row in Machine.objects.filter(runs__in=list(by_id)).exclude(state=MachineState.GONE)}
    for name, ingress in by_id.items():
        machine = machines.get(name)
        if machine is None:
            _launch(provider, ingress, base.zones[ingress.zone].zone_id if ingress.zone in base.zones else "", now)
        elif machine.address and machine.address != ingress.address:
            Ingress.objects.filter(id=name).update(address=machine.address)
            live.push("traffic", region.name)


def _create(region: Region, zone: str, reason: str, now: datetime) -> Ingress:
    with transaction.atomic():
        name = f"i-{region.name}-{secrets.token_hex(2)}"
        ingress = Ingress.objects.create(id=name, region=region, address="", port=PORT, zone=zone, created_at=now)
        event_record(
            kind="ingress.wanted",
            message=f"{name} is launched: {reason}",
            tone=Tone.MOVING,
            now=now,
            region=region.name,
        )
        live.push("traffic", region.name)
    return ingress


def _launch(provider: NodeProvider, ingress: Ingress, zone_id: str, now: datetime) -> None:
    """One step of its launch, if one is due."""
    report: IngressReport | None = getattr(ingress, "report", None)
    if report is not None and report.started_at and now - report.started_at < timedelta(seconds=STEP_EVERY_S):
        return
    IngressReport.objects.update_or_create(ingress=ingress, defaults={"started_at": now})
    spec = LaunchSpec(
        id=ingress.id,
        kind=AgentKind.INGRESS,
        region=ingress.region_id,
        join_token="",
        near=(zone_id,) if zone_id else (),
    )
    try:
        provider.launch([spec])
    except Later as waits:
        _say(ingress, str(waits))
    except ProviderError as error:
        log.warning("ingress %s: %s", ingress.id, error)
        _say(ingress, str(error))
    else:
        _say(ingress, "")


def _say(ingress: Ingress, reason: str) -> None:
    IngressReport.objects.filter(ingress=ingress).update(reason=reason)
