"""Ingress machines: creates rows, launches machines through the region's provider, starts dead ingresses and agents,
and stores reports. An ingress has its row first, without an address; a launch may take several calls, one per step, and
the ingress then takes the machine's address. An ingress whose machine terminated is removed and replaced. An ID is
never used for a second machine."""

import logging
import secrets
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import msgspec
from django.db import connection, transaction
from django.db.models import F, Q

from engine_agent.protocol.machine_messages import VERSION_MOST
from engine_agent.protocol.ports import CLOUD_INGRESS, local_ingress
from engine_agent.protocol.states import AgentKind
from fleet.agents.selectors import is_trusted
from fleet.agents.services.authority import agent_trust_end, authority_ensure
from fleet.agents.services.enrolment import join_token_issue
from fleet.autoscaling.services import AUTOSCALE_TASK
from fleet.clouds.base import Later, LaunchSpec, NodeProvider, ProviderError, provider_named
from fleet.clouds.models import CloudRegion
from fleet.clouds.planning.upkeep import CloudBase
from fleet.faults.services.incidents import cell_sightings_store
from fleet.load.services import refusals_forget, refusals_store
from fleet.machines.models import Machine
from fleet.machines.planner import POOLED
from fleet.machines.services.machines import machine_move
from fleet.machines.services.revocation import host_locked, machine_revoke
from fleet.reconcile.planning.rest import REST_S
from fleet.reconcile.planning.snapshot import ProviderStatus
from fleet.reconcile.planning.states import CloudRegionState, MachineRole, MachineState
from fleet.regions.models import Region
from fleet.releases.services.releases import launch_release
from kernel import live, wake_ups
from kernel.events import event_record
from kernel.leases import lease_during
from kernel.refusals import Conflict
from kernel.sanitize import UNSTORABLE_ERRORS, json_without_nul
from kernel.tones import Tone
from traffic.entry.models import EntryTarget
from traffic.region_shares.planning.load import pools_waiting
from traffic.routing.models import Ingress, IngressReport, RoutingTable
from traffic.routing.planning.ingresses import (
    SILENT_AFTER_S,
    IngressMachine,
    NewIngress,
    RemoveIngress,
    plan_ingress,
    plan_ingress_machines,
)
from traffic.routing.selectors import UnreadableTable, table_message
from traffic.streams.services import streams_forget, streams_store


def ingress_machines_follow(*, now: datetime) -> None:
    """Creates an ingress for each free machine that joined as one. Removes those whose machines leave or are gone."""
    joins, leaves = Q(state=MachineState.POOL, connected=True, leaving=False), Q(state=MachineState.TAKEN, leaving=True)
    moving = Machine.objects.filter(joins | leaves, role=MachineRole.INGRESS.value)
    for machine in moving.select_related("region").order_by("id"):
        if not machine.leaving:
            _become_ingress(machine, now)
        elif not has_targets(machine.runs):
            _remove_of_machine(machine, now)
    running = Machine.objects.filter(role=MachineRole.INGRESS.value, state=MachineState.TAKEN.value)
    for ingress in Ingress.objects.filter(region__provider=POOLED).exclude(id__in=running.values("runs")):
        ingress_remove(ingress, "its machine is gone", now)


def ingress_id(machine: str) -> str:
    """Returns the same ID whenever this machine is an ingress."""
    return f"i-{machine.removeprefix('m-')}"


def _become_ingress(machine: Machine, now: datetime) -> None:
    name = ingress_id(machine.id)
    version = machine.desired_version + 1
    with transaction.atomic():
        if not machine_move(machine, MachineState.TAKEN, f"it is {name}", now=now, runs=name, desired_version=version):
            return
        columns = {"region": machine.region, "address": machine.address, "port": machine.port_base}
        Ingress.objects.update_or_create(id=name, defaults=columns, create_defaults={**columns, "created_at": now})
        url = f"http://{_host_of(machine.address)}:{machine.port_base}"
        Region.objects.filter(name=machine.region_id, ingress_url="").update(ingress_url=url)
        live.push_desired([machine.id])
        live.push("traffic", machine.region_id)


def _remove_of_machine(machine: Machine, now: datetime) -> None:
    with transaction.atomic():
        for ingress in Ingress.objects.filter(id=machine.runs):
            ingress_remove(ingress, machine.reason, now)
        wipes = machine.connected and machine.revoked_at is None
        to = MachineState.WIPING if wipes else MachineState.GONE
        rows = Machine.objects.filter(id=machine.id)
        if machine_move(machine, to, machine.reason, now=now, runs=machine.runs if wipes else ""):
            rows.update(desired_version=F("desired_version") + 1)
            live.push_desired([machine.id])


def has_targets(ingress: str) -> bool:
    """Returns whether a load balancer still sends it connections or drains streams from it."""
    return EntryTarget.objects.filter(ingress=ingress).exists()


def ingress_remove(ingress: Ingress, reason: str, now: datetime) -> None:
    """Removes the ingress and its credential. Peers of its region answer clients that still use its address."""
    with transaction.atomic():
        agent_trust_end(kind=AgentKind.INGRESS, subject=ingress.id, now=now)
        refusals_forget(ingress=ingress.id)
        streams_forget(ingress=ingress.id)
        url = f"http://{_host_of(ingress.address)}:{ingress.port}"
        others = Ingress.objects.filter(region=ingress.region_id).exclude(id=ingress.id).order_by("id")
        other = others.first()
        instead = f"http://{_host_of(other.address)}:{other.port}" if other is not None else ""
        Region.objects.filter(name=ingress.region_id, ingress_url=url).update(ingress_url=instead)
        event_record(
            kind="ingress.removed",
            message=f"{ingress.id} is no longer an ingress of {ingress.region_id}: {reason}",
            tone=Tone.WARN,
            now=now,
            region=ingress.region_id,
        )
        ingress.delete()
        live.push("traffic", ingress.region_id)


def _host_of(address: str) -> str:
    return f"[{address}]" if ":" in address else address


JOIN_TOKEN_TTL = timedelta(minutes=15)
START_LIMIT_S = 30.0
"""Providers limit a boot to 10 s; after this time another worker may try."""

log = logging.getLogger(__name__)


def ingress_create(*, region: Region, address: str, port: int, now: datetime, number: int = 0) -> Ingress:
    """Creates the row of an ingress; `ingresses_ensure` starts it. `number`: among those of its region, from 0.
    Raises Conflict if another region's ingress has its name."""
    taken = Ingress.objects.filter(id=local_ingress(region.name, number)).exclude(region=region).first()
    if taken is not None:
        raise Conflict(f"{taken.id} is an ingress of region {taken.region_id}: rename region {region.name}")
    ingress, _ = Ingress.objects.update_or_create(
        id=local_ingress(region.name, number),
        defaults={"region": region, "address": address, "port": port},
        create_defaults={"region": region, "address": address, "port": port, "created_at": now},
    )
    wake_ups.send(ENSURE_TASK)
    return ingress


ENSURE_TASK = "traffic.ensure_ingresses"
_UNSETTLED = """
SELECT EXISTS (
    SELECT FROM fleet_machine WHERE role = %(role)s AND (state = %(pool)s OR state = %(taken)s AND leaving)
) OR EXISTS (
    SELECT FROM traffic_ingress AS one JOIN fleet_region ON fleet_region.name = one.region_id
    WHERE provider = %(pooled)s
    AND NOT EXISTS (SELECT FROM fleet_machine WHERE role = %(role)s AND state = %(taken)s AND runs = one.id)
) OR EXISTS (
    SELECT FROM traffic_ingress LEFT JOIN traffic_ingressreport ON ingress_id = id
    WHERE zone = '' AND (connected AND last_seen_at > %(fresh)s) IS NOT TRUE
), EXISTS (SELECT FROM fleet_machine WHERE role = %(role)s), (
    SELECT min(last_seen_at) FROM traffic_ingress JOIN traffic_ingressreport ON ingress_id = id WHERE zone = ''
)
"""
"""Whether something is to be done, whether ingresses have machines that join and leave, and the oldest report. One
statement, because three queries cost five times as much."""


def ingresses_ensure(*, now: datetime, rest: Callable[[float], None] = lambda _: None) -> list[str]:
    """Starts every ingress and ingress agent that is not running. Returns what was started. `rest` is called with the
    seconds for which no pass is needed: new ingresses and ended connections wake this loop, silence does not."""
    seen = now - timedelta(seconds=SILENT_AFTER_S)
    values = {"role": MachineRole.INGRESS.value, "pool": MachineState.POOL.value, "taken": MachineState.TAKEN.value}
    with connection.cursor() as cursor:
        cursor.execute(_UNSETTLED, {**values, "pooled": POOLED, "fresh": seen})
        is_unsettled, has_machines, oldest = cursor.fetchone()
    if not is_unsettled:
        if not has_machines:
            rest(min(REST_S, (oldest - seen).total_seconds() if oldest else REST_S))
        return []
    ingress_machines_follow(now=now)
    # A killed web process leaves `connected` set, so only a fresh report proves the connection.
    fresh = Q(report__connected=True, report__last_seen_at__gt=seen)
    silent = Ingress.objects.filter(zone="").exclude(fresh).select_related("region")
    return [ingress.id for ingress in silent if _ensure_alone(ingress, now)]


def _ensure_alone(ingress: Ingress, now: datetime) -> bool:
    """One worker at a time, because a boot takes longer than the interval between passes."""
    with lease_during(name=f"ingress:{ingress.id}", ttl_s=START_LIMIT_S, now=now) as is_ours:
        try:
            return is_ours and _ensure_ingress(ingress, now)
        except ProviderError as error:
            log.error("ingress %s: %s", ingress.id, error)
            return False


def _ensure_ingress(ingress: Ingress, now: datetime) -> bool:
    report = IngressReport.objects.filter(ingress=ingress).first()
    provider = provider_named(ingress.region.provider)
    status = provider.describe([ingress.id])[ingress.id]
    action = plan_ingress(
        status,
        known=report is not None,
        disconnected_at=report.connection_changed_at if report else None,
        started_at=report.started_at if report else None,
        now=now,
    )
    if action is None:
        return False
    # Written first, so that a start that fails or is cut short by a crash is also repeated only after its pause.
    started = {"connected": False, "connection_changed_at": now, "started_at": now}
    IngressReport.objects.update_or_create(ingress=ingress, defaults=started)
    if action.start_whole:
        _launch_machine(ingress, now)
    else:
        provider.restart_agent(ingress.id)
    with transaction.atomic():
        event_record(
            kind="ingress.started",
            message=f"{ingress.id}: {action.reason}",
            tone=Tone.MOVING if report is None else Tone.WARN,
            now=now,
            region=ingress.region_id,
            detail={"whole": action.start_whole, "status": ProviderStatus(status).value},
        )
        live.push("traffic", ingress.region_id)
    return True


def ingress_revoke(*, ingress_id: str, actor: str, now: datetime, why: str = "") -> None:
    """Revokes the ingress's credential: its WebSocket closes within 5 s, and cells refuse new connections from it. Once
    its machine is gone, it is started again with a new credential. Its machine is revoked too if it joined the fleet,
    since it could enrol the ingress again. Does nothing if nothing is left to revoke."""
    with transaction.atomic():
        machine = host_locked(ingress_id)
        ingress = Ingress.objects.select_for_update().get(id=ingress_id)
        is_hosted = machine is not None and machine.revoked_at is None
        if not is_hosted and not is_trusted(AgentKind.INGRESS, ingress.id, now):
            return
        if machine is not None:
            machine_revoke(machine_id=machine.id, actor=actor, now=now, why=why)
        agent_trust_end(kind=AgentKind.INGRESS, subject=ingress.id, now=now)
        event_record(
            kind="ingress.revoked",
            message=f"{ingress.id} was revoked by {actor}" + (f": {why}" if why else ""),
            tone=Tone.BAD,
            now=now,
            actor=actor,
            region=ingress.region_id,
        )
        live.push("traffic", ingress.region_id)


def _launch_machine(ingress: Ingress, now: datetime) -> None:
    token = join_token_issue(
        kind=AgentKind.INGRESS, subject=ingress.id, region=ingress.region_id, expires_at=now + JOIN_TOKEN_TTL
    )
    spec = LaunchSpec(
        id=ingress.id,
        kind=AgentKind.INGRESS,
        region=ingress.region_id,
        address=ingress.address,
        port=ingress.port,
        join_token=token,
        bundle=authority_ensure(now).bundle,
        release=launch_release(),
    )
    provider_named(ingress.region.provider).launch([spec])


STEP_EVERY_S = 10.0
"""Interval between two steps of a launch. An early step costs no call, since the provider checks its rows."""
STEP_LIMIT_S = 60.0
"""A provider call counts as hung after this time, and another controller may try."""


def cloud_ingresses_ensure(*, now: datetime) -> None:
    """Creates and launches the ingresses that each cloud region needs, as far as its stack has been read."""
    for cloud in CloudRegion.objects.filter(state=CloudRegionState.READY.value).select_related("region"):
        try:
            base = cloud.stated_base()
        except msgspec.ValidationError:
            continue
        if not (base.ingress_group or base.cluster):
            continue
        with lease_during(name=f"ingresses:{cloud.pk}", ttl_s=STEP_LIMIT_S, now=now) as is_ours:
            if is_ours:
                _ensure_in_zones(cloud.region, base, now)


def _ensure_in_zones(region: Region, base: CloudBase, now: datetime) -> None:
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
                created = _create_ingress(region, zone, reason, now)
                by_id[created.id] = created
    machines = {row.runs: row for row in Machine.objects.filter(runs__in=list(by_id)).exclude(state=MachineState.GONE)}
    for name, ingress in by_id.items():
        machine = machines.get(name)
        if machine is None:
            _launch_in_zone(
                provider, ingress, base.zones[ingress.zone].zone_id if ingress.zone in base.zones else "", now
            )
        elif machine.address and machine.address != ingress.address:
            Ingress.objects.filter(id=name).update(address=machine.address)
            live.push("traffic", region.name)


def _create_ingress(region: Region, zone: str, reason: str, now: datetime) -> Ingress:
    with transaction.atomic():
        name = f"i-{region.name}-{secrets.token_hex(2)}"
        ingress = Ingress.objects.create(
            id=name, region=region, address="", port=CLOUD_INGRESS, zone=zone, created_at=now
        )
        event_record(
            kind="ingress.wanted",
            message=f"launching {name}: {reason}",
            tone=Tone.MOVING,
            now=now,
            region=region.name,
        )
        live.push("traffic", region.name)
    return ingress


def _launch_in_zone(provider: NodeProvider, ingress: Ingress, zone_id: str, now: datetime) -> None:
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
        _ingress_event(ingress, str(waits))
    except ProviderError as error:
        log.warning("ingress %s: %s", ingress.id, error)
        _ingress_event(ingress, str(error))
    else:
        _ingress_event(ingress, "")


def _ingress_event(ingress: Ingress, reason: str) -> None:
    IngressReport.objects.filter(ingress=ingress).update(reason=reason)


DOWN = "down"


class IngressRow(msgspec.Struct, frozen=True):
    ingress: str
    connection: str
    connected: bool
    changed_at: datetime
    seen_at: datetime
    agent_version: str = ""
    revision: int = 0
    haproxy_pid: int | None = None
    reason: str = ""
    cells: Any = {}
    telemetry: Any = {}
    begins: bool = False
    """The first requests after a report without any."""


_KNOWN = ("region_id", "report__connected", "report__revision", "report__cells")


def ingress_reports_store(rows: list[IngressRow]) -> None:
    """Writes the rows. A row that ends a connection applies only to that connection. A row that PostgreSQL refuses is
    logged and dropped."""
    for row in rows:
        try:
            with transaction.atomic():
                _store_report(msgspec.json.decode(json_without_nul(msgspec.json.encode(row)), type=IngressRow))
        except UNSTORABLE_ERRORS as refusal:
            log.warning("dropped the report of %s: %s", row.ingress, refusal)


def _store_report(row: IngressRow) -> None:
    reports = IngressReport.objects.filter(ingress_id=row.ingress)
    if not row.connected:
        ended = reports.filter(connection=row.connection, connected=True)
        changed = ended.update(connected=False, connection_changed_at=row.changed_at) > 0
        wake_ups.send(ENSURE_TASK)
    elif known := Ingress.objects.filter(id=row.ingress).values_list(*_KNOWN).first():
        region, *before = known
        columns = _report_columns(row)
        # One statement; Django's `update_or_create` takes five, and each report of each ingress makes it.
        IngressReport.objects.bulk_create(
            [IngressReport(ingress_id=row.ingress, **columns)],
            update_conflicts=True,
            unique_fields=["ingress"],
            update_fields=list(columns),
        )
        cell_sightings_store(witness=row.ingress, down=_unreachable_cells(row), now=row.seen_at)
        refusals_store(ingress=row.ingress, region=region, refusals=row.telemetry.get("refusals"), now=row.seen_at)
        if streams := row.telemetry.get("streams"):
            streams_store(ingress=row.ingress, region=region, streams=streams, now=row.seen_at)
        changed = before != [True, row.revision, row.cells]
    else:
        return
    is_waiting = bool(pools_waiting(row.telemetry))
    if is_waiting or row.begins:
        wake_ups.send("traffic.autopilot")
    if is_waiting:
        wake_ups.send(AUTOSCALE_TASK)
    if changed:
        live.push("traffic")
        wake_ups.send("traffic.publish")
        wake_ups.send("traffic.autopilot")


def _unreachable_cells(row: IngressRow) -> dict[str, int]:
    """Returns cells that the ingress routes to but cannot reach, with the generation in its table."""
    down = {cell for cell, state in row.cells.items() if state == DOWN}
    if not down:
        return {}
    table = RoutingTable.objects.filter(region__ingresses=row.ingress, revision=row.revision).first()
    try:
        pools = table_message(table).pools if table else ()
    except UnreadableTable:
        return {}
    return {cell.cell: cell.generation for pool in pools for cell in pool.cells if cell.cell in down and not cell.drain}


def _report_columns(row: IngressRow) -> dict[str, Any]:
    return {
        "connection": row.connection,
        "connected": True,
        "connection_changed_at": row.changed_at,
        "last_seen_at": row.seen_at,
        "agent_version": row.agent_version[:VERSION_MOST],
        "revision": row.revision,
        "haproxy_pid": row.haproxy_pid,
        "reason": row.reason,
        "cells": row.cells,
        "telemetry": row.telemetry,
    }
