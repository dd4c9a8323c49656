"""Which machines are to be warm before the cells that the plan of the day wants: a machine boots before its cell loads,
so it is ordered a boot earlier than the autoscaler orders the cell, and one that is needed again soon is not given
back. Pure; no numpy, for the reconciler.

It launches nothing: what it says stands beside the spares that an operator keeps, and the reconciler launches and gives
back by that as ever, within the caps of its provider and the limits of a pass.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from fleet.planning.capacity.need import FRESH_S
from fleet.planning.snapshot import FleetView
from fleet.planning.states import CellState

LEAVING = frozenset({CellState.DRAINING, CellState.STOPPED})
NAMED_MOST = 3
Group = tuple[str, str]
"""Region, instance type."""
CellGroup = tuple[str, str, str]
"""Deployment, region, instance type."""


@dataclass(frozen=True, slots=True)
class PlannedSpares:
    """Idle nodes to have warm for cells that the plan of the day wants soon, and for which. `cells`: how many nodes
    each of these takes, which are to be near each other."""

    count: int
    reason: str
    cells: tuple[int, ...] = ()


def cells_there(fleet: FleetView) -> Counter[CellGroup]:
    """How many cells places have that stay, by type."""
    staying = (cell for cell in fleet.cells.values() if cell.state not in LEAVING)
    return Counter((cell.deployment, cell.region, cell.instance_type) for cell in staying)


def planned_spares(fleet: FleetView, there: Mapping[CellGroup, int], now: datetime) -> dict[Group, PlannedSpares]:
    """Machines beside those of the cells that there are: the most of any slot until a machine that is ordered now has
    booted, and a cell on it has served for a slot. Cells that are wanted and not there yet count, or the machines that
    were ready for them would be given back in the pass that makes them; not where they may be of one type or another,
    which is decided as they come. What another deployment will need less is
    counted off. What is planned is all of one plan; one that is too old, or whose deployment may have no more cells for
    want of machines, counts for nothing."""
    more: dict[Group, dict[datetime, dict[str, int]]] = defaultdict(lambda: defaultdict(dict))
    sizes: dict[tuple[str, str], int] = {}
    for place in fleet.planned:
        spec, region = fleet.deployments.get(place.deployment), fleet.regions.get(place.region)
        age_s = (now - place.at).total_seconds()
        if spec is None or spec.problem or region is None or not 0 <= age_s < FRESH_S:
            continue
        if spec.claim(place.region).granted is not None:
            continue
        kind = place.instance_type or spec.instance_type
        size, have = spec.of(spec.version, kind).nodes_per_cell, there.get((spec.name, place.region, kind), 0)
        wanted = have if spec.further else spec.cells_wanted.get(place.region, 0)
        ahead_s = place.start_up_s + place.slot_s + region.limits.boot_s
        for slot in range(int(age_s // place.slot_s), int((age_s + ahead_s) // place.slot_s) + 1):
            if slot < len(place.cells):
                begins_at = place.at + timedelta(seconds=slot * place.slot_s)
                planned = place.cells[slot] if wanted <= have else max(place.cells[slot], wanted)
                more[place.region, kind][begins_at][spec.name] = (planned - have) * size
                sizes[kind, spec.name] = size
    found = {
        group: _most(slots, {name: size for (kind, name), size in sizes.items() if kind == group[1]})
        for group, slots in sorted(more.items())
    }
    return {group: spares for group, spares in found.items() if spares.count > 0}


def _most(slots: Mapping[datetime, Mapping[str, int]], sizes: Mapping[str, int]) -> PlannedSpares:
    begins_at = max(slots, key=lambda at: (sum(slots[at].values()), -at.timestamp()))
    changes = sorted(slots[begins_at].items(), key=lambda one: (-abs(one[1]), one[0]))
    named = ", ".join(f"{nodes:+d} of {deployment}" for deployment, nodes in changes[:NAMED_MOST] if nodes)
    count = sum(slots[begins_at].values())
    reason = f"from {begins_at:%H:%M} UTC on its cells take {count} machine{'' if count == 1 else 's'} more ({named})"
    cells = [sizes[name] for name, nodes in changes for _ in range(nodes // sizes[name])]
    return PlannedSpares(count, reason, tuple(cells))
