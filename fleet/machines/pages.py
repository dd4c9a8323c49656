"""The page of machines (list, invitation form, removal), and the machines of a cell's page with place, price
and usable pools."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.http import Http404, HttpResponse
from django.shortcuts import render
from django.urls import reverse
from rest_framework import serializers

from controlplane.dashboard.actions import (
    WHY,
    Action,
    ActionPage,
    Field,
    Submission,
    Target,
    action,
    action_page_view,
    page_target,
)
from controlplane.dashboard.choices import choose_region
from controlplane.dashboard.fragments import Context, Filter, Fragment, Page, PageRequest, found_or_404
from fleet.agents.services.enrolment import join_line
from fleet.capacity.planning.pools import Market, UnitView, fits, parse_markets
from fleet.capacity.selectors import pool_views
from fleet.cells.pages.data import CellRow, MemberRow
from fleet.clouds.models import CapacityPool
from fleet.deployments.models import Deployment
from fleet.machines.api import InviteSerializer
from fleet.machines.models import Invitation, Machine
from fleet.machines.planner import LOCAL, POOLED, describe
from fleet.machines.selectors import hosts_running, invitations_described, machines_described, notices_of
from fleet.machines.services.layouts import machine_layout_set
from fleet.machines.services.machines import invitation_create, invitation_withdraw, machine_remove, nodes_on
from fleet.machines.services.set_aside import machine_repaired
from fleet.reconcile.planning.states import MachineRole, MachineState, choices
from fleet.regions.models import Region
from fleet.releases.pages import AGENTS
from models_registry.instance_types.selectors import instance_type_names

MACHINES_SHOWN = 100


@dataclass(frozen=True, slots=True)
class MachineRow:
    """A machine; `what`: hardware that its agent detected, or ""."""

    machine: Machine
    address: str
    version: str
    what: str
    notices: tuple[str, ...]

    @property
    def is_removable(self) -> bool:
        """Whether users may remove it: other providers terminate their own machines."""
        is_host = self.machine.provider == POOLED or (self.machine.provider == LOCAL and bool(self.machine.layout))
        return is_host and not self.machine.leaving

    @property
    def is_divisible(self) -> bool:
        return self.is_removable and self.machine.role == MachineRole.NODE


@dataclass(frozen=True, slots=True)
class MachineList:
    """Machines, open invitations, and the choices for a new one."""

    rows: tuple[MachineRow, ...]
    more: bool
    open: tuple[Invitation, ...]
    regions: tuple[str, ...]
    kinds: tuple[str, ...]
    roles: tuple[tuple[str, str], ...] = tuple(choices(MachineRole))
    filtered: bool = False
    page: int = 0


def machine_list(*, now: datetime, region: str = "") -> MachineList:
    """Machines that are not gone; joined hosts first."""
    live = machines_described().exclude(state=MachineState.GONE)
    live = live.filter(region_id=region) if region else live
    fetched = list(live.order_by("-provider", "region__position", "region_id", "id")[: MACHINES_SHOWN + 1])
    regions = Region.objects.filter(provider=POOLED).values_list("name", flat=True)
    return MachineList(
        rows=tuple(machine_row(machine, now) for machine in fetched[:MACHINES_SHOWN]),
        more=len(fetched) > MACHINES_SHOWN,
        open=tuple(invitations_described().filter(left__gt=0, expires_at__gt=now, withdrawn_at=None)[:20]),
        regions=tuple(regions),
        kinds=tuple(instance_type_names()),
        filtered=bool(region),
    )


def machine_row(machine: Machine, now: datetime) -> MachineRow:
    facts = machine.stated_facts()
    return MachineRow(
        machine=machine,
        address=str(getattr(machine, "shown_address", machine.address)),
        version=str(getattr(machine, "shown_version", machine.agent_version)),
        what=describe(facts) if facts else "",
        notices=notices_of(machine, now),
    )


# The machines of a cell: place, price, and why other pools were not used.


@dataclass(frozen=True, slots=True)
class CellMachine:
    """A member's machine, or None. `network_nodes`: those below its zone, widest first."""

    member: MemberRow
    machine: Machine | None
    zone_id: str
    network_nodes: tuple[str, ...]
    notices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PoolLine:
    """A pool of the cell's machine type. `why_not`: why it is not usable now, or ""."""

    pool: CapacityPool
    name: str
    is_used: bool
    why_not: str


@dataclass(frozen=True, slots=True)
class CellMachines:
    """`price_per_hour`: of all, in US dollars; None if one is unknown."""

    rows: tuple[CellMachine, ...]
    pools: tuple[PoolLine, ...]
    price_per_hour: float | None


def cell_machines(row: CellRow, now: datetime) -> CellMachines:
    names = [member.node.pk for member in row.members]
    hosts = {name: host.machine.id for name, host in hosts_running(names).items()}
    described = {machine.id: machine for machine in machines_described().filter(id__in=hosts.values())}
    machines = {name: described[machine] for name, machine in hosts.items()}
    rows = tuple(_cell_machine(member, machines.get(member.node.pk), now) for member in row.members)
    prices = [one.machine.price_per_hour if one.machine else None for one in rows]
    known = [price for price in prices if price is not None]
    return CellMachines(rows, _pool_lines(row, rows, now), sum(known) if rows and len(known) == len(rows) else None)


def _cell_machine(member: MemberRow, machine: Machine | None, now: datetime) -> CellMachine:
    path = tuple(member.node.topology)
    notices = notices_of(machine, now) if machine else ()
    return CellMachine(member, machine, path[0] if path else "", path[1:], notices)


def _pool_lines(row: CellRow, machines: tuple[CellMachine, ...], now: datetime) -> tuple[PoolLine, ...]:
    """In the order of the cell's next launch."""
    if not row.members:
        return ()
    node = row.members[0].node
    pools = {
        pool.pk: pool
        for pool in CapacityPool.objects.filter(region_id=node.region_id, instance_type_id=node.instance_type_id)
    }
    near = tuple(node.topology)
    stated = Deployment.objects.values_list("markets", flat=True).get(pk=row.cell.deployment_id)
    markets = parse_markets(stated) or frozenset(Market)
    unit = UnitView("", node.region_id, node.instance_type_id, 1, markets, near)
    used = {(one.machine.market, one.machine.zone, one.machine.reservation) for one in machines if one.machine}
    return tuple(
        PoolLine(
            pool=pools[fit.pool.id],
            name=fit.pool.name,
            is_used=(fit.pool.market, fit.pool.zone, fit.pool.reservation) in used,
            why_not=fit.reason,
        )
        for fit in fits(unit, pool_views(pools.values(), now), now)
    )


HOURS = "valid_for_hours"


class _Hours(serializers.Serializer[Any]):
    """Validity of an invitation as the form states it; the API takes a duration."""

    valid_for_hours = serializers.IntegerField(min_value=1, max_value=168)


def _machines(request: PageRequest) -> MachineList:
    return machine_list(now=request.now, region=request.text("region"))


def _machine_filter(request: PageRequest) -> Filter:
    return Filter(text_label="", text_name="", text="", choices=(choose_region(request),))


MACHINES = Page(
    section="machines",
    title="Machines",
    fragments=(Fragment("machines", "", ("machines", "nodes"), "fleet/machines/machines.html", _machines), AGENTS),
    narrow=_machine_filter,
)


@action(page_target("machines", "machines"))
def machine_add_action(form: Submission, _: None) -> HttpResponse:
    expires_in = timedelta(hours=form.valid(_Hours, HOURS)[HOURS])
    body = form.valid(InviteSerializer, "region", "count", "role", "instance_type", "layout")
    new = invitation_create(
        region=body["region"],
        count=body["count"],
        expires_in=expires_in,
        role=MachineRole(body["role"]),
        instance_type=body["instance_type"],
        layout=body["layout"],
        actor=form.actor,
        now=form.now,
    )
    line = join_line(new.text)
    context = {"invitation": new.invitation, "line": line.text, "notices": line.notices}
    return render(form.request, "fleet/machines/join_line.html", context)


@action(page_target("machines", "the invitation"))
def invitation_withdraw_action(form: Submission, prefix: str) -> None:
    if not Invitation.objects.filter(prefix=prefix).exists():
        raise Http404(f"There is no invitation {prefix!r}.")
    invitation_withdraw(prefix=prefix, actor=form.actor, now=form.now)


def _machine_or_404(key: str) -> Machine:
    return found_or_404(Machine.objects.filter(id=key).first(), f"machine {key!r}")


def _remove(form: Submission, machine: Machine) -> None:
    machine_remove(machine_id=machine.id, actor=form.actor, now=form.now, why=form.text("why"))


def _removal_effect(machine: Machine) -> str:
    if not machine.connected:
        return "Its agent is not connected: its credential is revoked, and the host is not wiped."
    if names := nodes_on(machine):
        cells = f"The cell on {names[0]} gets" if len(names) == 1 else f"The cells on {', '.join(names)} get"
        return f"{cells} another node first. Then the host is wiped and uninstalled."
    return "It has no node or ingress. The host is wiped and uninstalled."


TARGET = Target(
    noun="machine", find=_machine_or_404, name=lambda machine: machine.id, url=lambda _: reverse("machines")
)
REMOVE = Action(target=TARGET, name="remove", label="Remove", run=_remove, typed=TARGET.name, fields=(WHY,))


def _removal_context(form: Submission, machine: Machine) -> Context:
    url = reverse("machine-remove", args=(machine.id,))
    return {"machine": machine, "confirmation": REMOVE.confirmation(machine, url, _removal_effect(machine))}


machine_remove_page = action_page_view(
    ActionPage(action=REMOVE, template="fleet/machines/machine_action.html", context=_removal_context)
)


def _repaired(form: Submission, machine: Machine) -> None:
    machine_repaired(machine_id=machine.id, actor=form.actor, now=form.now, why=form.text("why"))


REPAIRED = Action(target=TARGET, name="repaired", label="Return to use", run=_repaired, fields=(WHY,))


def _repaired_context(form: Submission, machine: Machine) -> Context:
    url = reverse("machine-repaired", args=(machine.id,))
    out = "; ".join(f"{what}: {why}" for what, why in sorted(machine.broken.items()))
    effect = f"Nodes get again what is out of use: {out}." if out else "Nothing of it is out of use."
    return {"machine": machine, "confirmation": REPAIRED.confirmation(machine, url, effect)}


machine_repaired_page = action_page_view(
    ActionPage(action=REPAIRED, template="fleet/machines/machine_action.html", context=_repaired_context)
)


def _divide(form: Submission, machine: Machine) -> None:
    machine_layout_set(
        machine_id=machine.id,
        layout=form.text("layout"),
        instance_type=form.text("instance_type"),
        pinned=form.text("pinned") == "yes",
        actor=form.actor,
        now=form.now,
        why=form.text("why"),
    )


PINNED = "keep this layout, even if cells wait for nodes of another size"
DIVIDE = Action(target=TARGET, name="layout", label="Divide", run=_divide)


def _layout_context(form: Submission, machine: Machine) -> Context:
    facts, names = machine.stated_facts(), nodes_on(machine)
    has = f"It has {describe(facts)}. " if facts else ""
    spares = f"Its nodes ({', '.join(names)}) must be spare: they are retired and wiped first." if names else ""
    fields = (
        Field(
            "layout", "Layout: nodes x devices, as 4x2; empty: one node", value=form.text("layout") or machine.layout
        ),
        Field("instance_type", "Instance type of each node; empty: detected", value=form.text("instance_type")),
        Field("pinned", PINNED, "checkbox", "yes", checked=form.text("pinned") == "yes" or machine.layout_pinned),
        WHY,
    )
    url = reverse("machine-layout", args=(machine.id,))
    return {"machine": machine, "confirmation": DIVIDE.confirmation(machine, url, has + spares, fields)}


machine_layout_page = action_page_view(
    ActionPage(action=DIVIDE, template="fleet/machines/machine_action.html", context=_layout_context)
)
