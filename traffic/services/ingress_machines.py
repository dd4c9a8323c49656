"""Machines that joined as ingresses: each is an ingress of its region, from when it is free until it leaves."""

from datetime import datetime

from django.db import transaction
from django.db.models import F

from engine_agent.protocol.states import AgentKind
from fleet.models import Machine, Region
from fleet.planning.machines import POOLED
from fleet.planning.states import MachineRole, MachineState
from fleet.services.certificate import agent_trust_end
from fleet.services.machine import machine_move
from fleet.services.refusals import refusals_forget
from kernel import live
from kernel.events import event_record
from kernel.tones import Tone
from traffic.models import EntryTarget, Ingress


def ingress_machines_follow(*, now: datetime) -> None:
    """Make an ingress of each free machine for one; take those away whose machines leave or are gone."""
    machines = Machine.objects.filter(role=MachineRole.INGRESS.value).exclude(state=MachineState.GONE)
    there = list(machines.select_related("region").order_by("id"))
    for machine in there:
        if machine.state == MachineState.POOL and machine.connected and not machine.leaving:
            _become_ingress(machine, now)
        elif machine.state == MachineState.TAKEN and machine.leaving and not has_targets(machine.runs):
            _leave(machine, now)
    running = Machine.objects.filter(role=MachineRole.INGRESS.value, state=MachineState.TAKEN.value)
    for ingress in Ingress.objects.filter(region__provider=POOLED).exclude(id__in=running.values("runs")):
        ingress_remove(ingress, "its machine is gone", now)


def ingress_id(machine: str) -> str:
    """The ingress that a machine is: the same whenever it is one."""
    return f"i-{machine.removeprefix('m-')}"


def _become_ingress(machine: Machine, now: datetime) -> None:
    name = ingress_id(machine.id)
    version = machine.desired_version + 1
    with transaction.atomic():
        if not machine_move(machine, MachineState.TAKEN, f"it is {name}", now=now, runs=name, desired_version=version):
            return
        columns = {"region": machine.region, "address": machine.address, "port": machine.port_base}
        Ingress.objects.update_or_create(id=name, defaults=columns, create_defaults={**columns, "created_at": now})
        url = f"http://{_host(machine.address)}:{machine.port_base}"
        Region.objects.filter(name=machine.region_id, ingress_url="").update(ingress_url=url)
        live.push_desired([machine.id])
        live.push("traffic", machine.region_id)


def _leave(machine: Machine, now: datetime) -> None:
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
    """Whether a load balancer still sends connections to it, or lets streams end there."""
    return EntryTarget.objects.filter(ingress=ingress).exists()


def ingress_remove(ingress: Ingress, reason: str, now: datetime) -> None:
    """Nobody waits for it or trusts it any more. Who sends requests to its address learns from the region's others."""
    with transaction.atomic():
        agent_trust_end(kind=AgentKind.INGRESS, subject=ingress.id, now=now)
        refusals_forget(ingress=ingress.id)
        url = f"http://{_host(ingress.address)}:{ingress.port}"
        others = Ingress.objects.filter(region=ingress.region_id).exclude(id=ingress.id).order_by("id")
        other = others.first()
        instead = f"http://{_host(other.address)}:{other.port}" if other is not None else ""
        Region.objects.filter(name=ingress.region_id, ingress_url=url).update(ingress_url=instead)
        event_record(
            kind="ingress.removed",
            message=f"{ingress.id} is no ingress of {ingress.region_id} any more: {reason}",
            tone=Tone.WARN,
            now=now,
            region=ingress.region_id,
        )
        ingress.delete()
        live.push("traffic", ingress.region_id)


def _host(address: str) -> str:
    return f"[{address}]" if ":" in address else address
