"""Machines for the page of nodes, those that need a look first."""

from dataclasses import dataclass
from datetime import datetime

from fleet.models import InstanceType, Invitation, Machine, Region
from fleet.planning.machines import POOLED, describe
from fleet.planning.states import MachineRole, MachineState, choices
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
