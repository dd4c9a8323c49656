"""Machines: the list with open invitations, the machines of a cell with place, price and usable pools, and the page of
one with its actions."""

from dataclasses import dataclass
from datetime import datetime

from django.db.models import Q, QuerySet
from django.urls import reverse

from controlplane.dashboard.actions import (
    WHY,
    Action,
    Field,
    Submission,
    Target,
    action_menu,
    action_view,
)
from controlplane.dashboard.choices import choose_region, choose_state
from controlplane.dashboard.fragments import Filter, Fragment, Page, PageRequest, deferred, found_or_404
from controlplane.dashboard.lists import Column, List, plain
from fleet.capacity.planning.pools import Market, UnitView, fits, parse_markets
from fleet.capacity.selectors import pool_views
from fleet.cells.pages.data import CellRow, MemberRow
from fleet.clouds.models import CapacityPool
from fleet.deployments.models import Deployment
from fleet.machines.models import Invitation, Machine
from fleet.machines.planner import LOCAL, POOLED, describe
from fleet.machines.selectors import hosts_running, invitations_described, machines_described, notices_of
from fleet.machines.services.layouts import machine_layout_set
from fleet.machines.services.machines import machine_remove, nodes_on
from fleet.machines.services.revocation import machine_revoke
from fleet.machines.services.set_aside import machine_repaired
from fleet.reconcile.planning.states import MachineRole, MachineState
from fleet.releases.pages import AGENTS, RELEASE_LIST


@dataclass(frozen=True, slots=True)
class MachineRow:
    """A machine; `what`: hardware that its agent detected, or ""."""

    machine: Machine
    address: str
    version: str
    what: str
    notices: tuple[str, ...]


def is_removable(machine: Machine) -> bool:
    """Whether users may remove a machine: other providers terminate their own."""
    is_host = machine.provider == POOLED or (machine.provider == LOCAL and bool(machine.layout))
    return is_host and not machine.leaving


def _listed(request: PageRequest) -> "QuerySet[Machine]":
    """Leaves out machines that are gone unless `state` selects them."""
    state, text = request.text("state"), request.text("q")
    machines = machines_described()
    machines = machines.filter(state=state) if state else machines.exclude(state=MachineState.GONE)
    if region := request.text("region"):
        machines = machines.filter(region_id=region)
    if text:
        about = Q(id__icontains=text) | Q(runs__icontains=text) | Q(provider_id__icontains=text)
        machines = machines.filter(about | Q(address__icontains=text) | Q(reason__icontains=text))
    return machines


def machine_row(machine: Machine, now: datetime) -> MachineRow:
    facts = machine.stated_facts()
    return MachineRow(
        machine=machine,
        address=str(getattr(machine, "shown_address", machine.address)),
        version=str(getattr(machine, "shown_version", machine.agent_version)),
        what=describe(facts) if facts else "",
        notices=notices_of(machine, now),
    )


MACHINE_LIST: List[MachineRow] = List(
    name="machines",
    columns=(
        Column("machine", "Machine", lambda row: row.machine.pk, ("id",)),
        Column("state", "State", lambda row: row.machine.state, ("state",)),
        Column("node", "Node", lambda row: row.machine.runs or row.machine.layout, ("runs",)),
        Column("provider", "Provider", lambda row: row.machine.provider, ("provider",), "wide"),
        Column("region", "Region", lambda row: row.machine.region_id, ("region_id",), "wide"),
        Column("address", "Address", lambda row: row.address, ("address",), "wide"),
        Column("type", "Type", lambda row: row.machine.instance_type_id, ("instance_type_id",), "wide"),
        Column("agent", "Agent", lambda row: row.version, ("agent_version",), "wide"),
        Column("since", "In this state", lambda row: row.machine.state_since, ("state_since",), "wide number"),
    ),
    query=_listed,
    rows=lambda machines, now: [machine_row(machine, now) for machine in machines],
    order=("-provider", "region__position", "region_id", "id"),
    filters=("region", "state", "q"),
)


INVITATION_LIST: List[Invitation] = List(
    name="invitations",
    prefix="invitations-",
    columns=(
        Column("invitation", "Invitation", lambda row: f"sw_{row.prefix}_…", ("prefix",)),
        plain("left", "Left", "number"),
        plain("role", "Role", choices=MachineRole),
        plain("region_id", "Region", name="region"),
        plain("instance_type_id", "Type", "wide", name="type"),
        plain("created_by", "By", "wide"),
        plain("expires_at", "Until", "number"),
    ),
    query=lambda request: invitations_described().filter(left__gt=0, expires_at__gt=request.now, withdrawn_at=None),
    order=("-id",),
    find=("prefix", "region__name", "created_by"),
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


def _machine_filter(request: PageRequest) -> Filter:
    choices = (choose_region(request), choose_state(request, MachineState, "every live state"))
    return Filter(text_label="Find by name, node or address", text_name="q", text=request.text("q"), choices=choices)


MACHINES = Page(
    section="machines",
    title="Machines",
    fragments=(
        Fragment("machines", "", ("machines", "nodes"), "fleet/machines/machines.html", MACHINE_LIST.page),
        *deferred(
            Fragment(
                "machine-invitations",
                "Open invitations",
                ("machines",),
                "fleet/machines/invitations.html",
                INVITATION_LIST.page,
            ),
            AGENTS,
        ),
    ),
    narrow=_machine_filter,
    lists=(MACHINE_LIST, INVITATION_LIST, RELEASE_LIST),
)


def _machine_or_404(key: str) -> Machine:
    return found_or_404(Machine.objects.filter(id=key).first(), f"machine {key!r}")


def _remove(form: Submission, machine: Machine) -> None:
    machine_remove(machine_id=machine.id, actor=form.actor, now=form.now, why=form.text("why"))


def _removal_effect(machine: Machine, now: datetime) -> str:
    if not machine.connected:
        return "Its agent is not connected: its credential is revoked, and the host is not wiped."
    if names := nodes_on(machine):
        cells = f"The cell on {names[0]} gets" if len(names) == 1 else f"The cells on {', '.join(names)} get"
        return f"{cells} another node first. Then the host is wiped and uninstalled."
    return "It has no node or ingress. The host is wiped and uninstalled."


def _repaired(form: Submission, machine: Machine) -> None:
    machine_repaired(machine_id=machine.id, actor=form.actor, now=form.now, why=form.text("why"))


def _repaired_effect(machine: Machine, now: datetime) -> str:
    out = "; ".join(f"{what}: {why}" for what, why in sorted(machine.broken.items()))
    return f"Nodes get again what is out of use: {out}." if out else "Nothing of it is out of use."


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


def _divide_effect(machine: Machine, now: datetime) -> str:
    facts, names = machine.stated_facts(), nodes_on(machine)
    has = f"It has {describe(facts)}. " if facts else ""
    spares = f"Its nodes ({', '.join(names)}) must be spare: they are retired and wiped first." if names else ""
    return has + spares


def _divide_fields(machine: Machine) -> tuple[Field, ...]:
    return (
        Field("layout", "Layout: nodes x devices, as 4x2; empty: one node", value=machine.layout),
        Field("instance_type", "Instance type of each node; empty: detected"),
        Field("pinned", PINNED, "checkbox", "yes", checked=machine.layout_pinned),
        WHY,
    )


def _revoke(form: Submission, machine: Machine) -> None:
    machine_revoke(machine_id=machine.id, actor=form.actor, now=form.now, why=form.text("why"))


def _revoke_effect(machine: Machine, now: datetime) -> str:
    names = ", ".join(nodes_on(machine))
    moves = f" So are those of {names}, whose cells are lost and start again on other nodes." if names else ""
    return f"Its credentials and certificates are revoked.{moves} It never returns as this machine."


def _why_not_remove(machine: Machine) -> str:
    if is_removable(machine):
        return ""
    return "It is leaving." if machine.leaving else f"Its provider {machine.provider} terminates its own machines."


def _why_not_divide(machine: Machine) -> str:
    is_divisible = is_removable(machine) and machine.role == MachineRole.NODE
    return "" if is_divisible else "Only joined hosts that run nodes can be divided."


def _why_not_repaired(machine: Machine) -> str:
    return "" if machine.broken else "Nothing of it is out of use."


def _why_not_revoke(machine: Machine) -> str:
    return "It is gone." if machine.state == MachineState.GONE else ""


PINNED = "keep this layout, even if cells wait for nodes of another size"
TARGET = Target(
    noun="machine",
    find=_machine_or_404,
    name=lambda machine: machine.id,
    url=lambda machine: reverse("machine", args=(machine.id,)),
    action_url=lambda machine, name: reverse("machine-action", args=(machine.id, name)),
)
MACHINE_ACTIONS = (
    Action(
        target=TARGET,
        name="layout",
        label="Divide",
        run=_divide,
        fields=_divide_fields,
        effect=_divide_effect,
        why_not=_why_not_divide,
        words=("layout",),
    ),
    Action(
        target=TARGET,
        name="repaired",
        label="Return to use",
        run=_repaired,
        fields=(WHY,),
        effect=_repaired_effect,
        why_not=_why_not_repaired,
        words=("repaired",),
    ),
    Action(
        target=TARGET,
        name="remove",
        label="Remove",
        run=_remove,
        typed=TARGET.name,
        fields=(WHY,),
        effect=_removal_effect,
        why_not=_why_not_remove,
    ),
    Action(
        target=TARGET,
        name="revoke",
        label="Revoke certificate",
        run=_revoke,
        typed=TARGET.name,
        fields=(WHY,),
        effect=_revoke_effect,
        why_not=_why_not_revoke,
    ),
)
machine_action = action_view(*MACHINE_ACTIONS)


def _machine(request: PageRequest) -> MachineRow:
    machine = machines_described().filter(id=request.key).first()
    return machine_row(found_or_404(machine, f"machine {request.key!r}"), request.now)


MACHINE = Page(
    section="machines",
    title="",
    fragments=(Fragment("machine", "", ("machines", "nodes"), "fleet/machines/machine.html", _machine),),
    actions=lambda request: action_menu(request.once(_machine).machine, request.caller.access, *MACHINE_ACTIONS),
)
