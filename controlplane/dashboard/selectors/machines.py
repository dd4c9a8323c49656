"""Machines for the page of nodes, those that need attention first, and the machines that a cell waits for."""

from dataclasses import dataclass
from datetime import datetime

from controlplane.dashboard.selectors.cells import CellRow, MemberRow
from fleet.models import CapacityPool, Deployment, InstanceType, Invitation, Machine, Region
from fleet.planning.machines import POOLED, describe
from fleet.planning.markets import Market, parse_markets
from fleet.planning.pools import UnitView, fits
from fleet.planning.states import MachineRole, MachineState, choices
from fleet.selectors.capacity_pool import pool_views
from fleet.selectors.machine import invitations_described, machines_described, notices_of

MACHINES_SHOWN = 100


@dataclass(frozen=True, slots=True)
class MachineRow:
    """A machine; `what` is what its agent found, "" where its provider has no agent of its own."""

    machine: Machine
    address: str
    version: str
    what: str
    notices: tuple[str, ...]

    @property
    def is_removable(self) -> bool:
        """Whether a person may have it leave: other providers end theirs by themselves."""
        return self.machine.provider == POOLED and not self.machine.leaving


@dataclass(frozen=True, slots=True)
class MachineList:
    """Machines, the invitations that are still open, and what a new one may name."""

    rows: tuple[MachineRow, ...]
    more: bool
    open: tuple[Invitation, ...]
    regions: tuple[str, ...]
    kinds: tuple[str, ...]
    roles: tuple[tuple[str, str], ...] = tuple(choices(MachineRole))
    filtered: bool = False
    page: int = 0


def machine_list(*, now: datetime, region: str = "") -> MachineList:
    """Machines that are not gone, those of pools first: other providers make and end theirs by themselves."""
    live = machines_described().exclude(state=MachineState.GONE)
    live = live.filter(region_id=region) if region else live
    fetched = list(live.order_by("-provider", "region__position", "region_id", "id")[: MACHINES_SHOWN + 1])
    regions = Region.objects.filter(provider=POOLED).values_list("name", flat=True)
    return MachineList(
        rows=tuple(machine_row(machine, now) for machine in fetched[:MACHINES_SHOWN]),
        more=len(fetched) > MACHINES_SHOWN,
        open=tuple(invitations_described().filter(left__gt=0, expires_at__gt=now, withdrawn_at=None)[:20]),
        regions=tuple(regions),
        kinds=tuple(InstanceType.objects.values_list("name", flat=True)),
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


# The machines under a cell: where its cloud has them, what they cost, and why another pool was not taken.


@dataclass(frozen=True, slots=True)
class CellMachine:
    """The machine of a member; None: its provider has none. `network_nodes` are those below its zone, widest first."""

    member: MemberRow
    machine: Machine | None
    zone_id: str
    network_nodes: tuple[str, ...]
    notices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PoolLine:
    """A pool of the cell's machine type. `why_not`: why nothing more would be launched from it now; "": it may be."""

    pool: CapacityPool
    name: str
    is_used: bool
    why_not: str


@dataclass(frozen=True, slots=True)
class CellMachines:
    """`price_per_hour`: of all, in US dollars; None: of some it is not known."""

    rows: tuple[CellMachine, ...]
    pools: tuple[PoolLine, ...]
    price_per_hour: float | None


def cell_machines(row: CellRow, now: datetime) -> CellMachines:
    names = [member.node.pk for member in row.members]
    machines = {machine.runs: machine for machine in machines_described().filter(runs__in=names)}
    rows = tuple(_machine(member, machines.get(member.node.pk), now) for member in row.members)
    prices = [one.machine.price_per_hour if one.machine else None for one in rows]
    known = [price for price in prices if price is not None]
    return CellMachines(rows, _pools(row, rows, now), sum(known) if rows and len(known) == len(rows) else None)


def _machine(member: MemberRow, machine: Machine | None, now: datetime) -> CellMachine:
    path = tuple(member.node.topology)
    notices = notices_of(machine, now) if machine else ()
    return CellMachine(member, machine, path[0] if path else "", path[1:], notices)


def _pools(row: CellRow, machines: tuple[CellMachine, ...], now: datetime) -> tuple[PoolLine, ...]:
    """As they would be tried for the cell's next machine, beside those that it has."""
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
