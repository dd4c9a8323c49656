"""Decides which machines get another layout, because a cell waits for nodes of another size: only machines whose nodes
are all spare and that no waiting cell can use, within the disruption ledger. Neither the cell's wait nor the spares may
be recent, nor the machine's own layout. A layout that an operator pinned stays: such machines are not in the view.

A machine is divided for the waiting cells in their order, and the rest of its devices for further nodes of the same
sizes, the largest first."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from fleet.machines.layouts import layout_text
from fleet.placement.planning.packing import PoolKey, Spares
from fleet.placement.planning.planner import Placed, PlacementRequest, PlacementResult
from fleet.placement.planning.supply import is_coming
from fleet.reconcile.planning.decisions import ChangeLayout
from fleet.reconcile.planning.settings import FleetSettings, Ledger
from fleet.reconcile.planning.snapshot import FleetView, MachineView, NodeView
from fleet.reconcile.planning.states import ProviderAction
from kernel.ages import age_text


@dataclass(frozen=True, slots=True)
class WaitingCell:
    """A cell that has waited `waited_s` for `short` more nodes."""

    order: PlacementRequest
    short: int
    waited_s: float


@dataclass(eq=False, slots=True)
class _Draft:
    """The next layout of a machine: (devices, instance type) of each node, and the cells that get them."""

    machine: MachineView
    parts: list[tuple[int, str]] = field(default_factory=list)
    cells: list[WaitingCell] = field(default_factory=list)

    def room(self, kind: str) -> int:
        """How many more nodes of a type it could have."""
        size = self.machine.sizes.get(kind)
        return (self.machine.devices - sum(used for used, _ in self.parts)) // size if size else 0


def waiting_cells(
    fleet: FleetView, orders: Iterable[PlacementRequest], answers: dict[str, PlacementResult], now: datetime
) -> list[WaitingCell]:
    """The cells that lack nodes, in the order of their requests."""
    found = []
    for order in orders:
        answer = answers[order.cell]
        if not isinstance(answer, Placed) and answer.short:
            waited_s = (now - fleet.cells[order.cell].state_since).total_seconds()
            found.append(WaitingCell(order, answer.short, waited_s))
    return found


def plan_layouts(
    fleet: FleetView,
    settings: FleetSettings,
    now: datetime,
    spares: Spares,
    waiting: Sequence[WaitingCell],
    ledger: Ledger,
) -> list[ChangeLayout]:
    """Layouts for waiting cells. A cell of several nodes counts only if all of them can be had."""
    if not waiting or not fleet.machines:
        return []
    coming = _coming(fleet, settings, now)
    drafts = list(_drafts(fleet, settings, now, spares))
    for cell in waiting:
        pool = cell.order.pool
        soon = min(cell.short, coming[pool])
        coming[pool] -= soon
        lacking = cell.short - soon
        if lacking and cell.waited_s >= settings.layout_after_s and not _is_stock_enough(fleet, spares, cell):
            for draft, count in _cut(drafts, cell, lacking):
                draft.parts += [(draft.machine.sizes[pool[1]], pool[1])] * count
                draft.cells.append(cell)
    return [_change(draft) for draft in drafts if draft.parts and _is_charged(draft, ledger)]


def _coming(fleet: FleetView, settings: FleetSettings, now: datetime) -> Counter[PoolKey]:
    """Nodes that will be spare soon: launched ones, free places, and the next nodes of changing machines."""
    members = {member.node for cell in fleet.cells.values() for member in cell.members}
    nodes = (node for node in fleet.nodes.values() if node.id not in members and is_coming(node, settings, now))
    found = Counter((node.region, node.instance_type) for node in nodes)
    for region in fleet.regions.values():
        found.update({(region.name, kind): count for kind, count in (region.free or {}).items()})
    found.update((machine.region, kind) for machine in fleet.machines for kind in machine.coming or ())
    return found


def _drafts(fleet: FleetView, settings: FleetSettings, now: datetime, spares: Spares) -> Iterator[_Draft]:
    """Machines that may be divided, unless launches will take their free places. Nodes that a region keeps warm or for
    repairs remain spare."""
    left: Counter[PoolKey] = Counter()
    launching = {node.region for node in fleet.nodes.values() if node.ordered is ProviderAction.LAUNCH}
    for machine in sorted(fleet.machines, key=lambda one: (one.layout_since, one.id)):
        is_filling = machine.region in launching or machine.types & (fleet.regions[machine.region].free or {}).keys()
        if machine.coming is not None or (machine.free_places and is_filling):
            continue
        if (now - machine.layout_since).total_seconds() < settings.layout_kept_s:
            continue
        nodes = [node for name in machine.nodes if (node := _free_node(fleet, spares, name))]
        spare_s = min((_spare_s(node, now) for node in nodes), default=settings.layout_after_s)
        if len(nodes) < len(machine.nodes) or spare_s < settings.layout_after_s:
            continue
        own = Counter((node.region, node.instance_type) for node in nodes)
        if all(spares.count(pool) - left[pool] - count >= _kept(fleet, pool) for pool, count in own.items()):
            left += own
            yield _Draft(machine)


def _free_node(fleet: FleetView, spares: Spares, name: str) -> NodeView | None:
    """A node that no cell has, gets or waits for, and for which its provider has no order."""
    node = fleet.nodes.get(name)
    if node is None or node.ordered is not None or not spares.is_free(node):
        return None
    return node


def _spare_s(node: NodeView, now: datetime) -> float:
    return 0.0 if node.spare_since is None else (now - node.spare_since).total_seconds()


def _kept(fleet: FleetView, pool: PoolKey) -> int:
    region = fleet.regions[pool[0]]
    return max(region.spares.get(pool[1], 0), region.repair_only.get(pool[1], 0))


def _is_stock_enough(fleet: FleetView, spares: Spares, cell: WaitingCell) -> bool:
    """Whether there are spares that the cell cannot use, as of other software: more of them would not help."""
    region, kind = cell.order.pool
    reserved = 0 if cell.order.is_repair else fleet.regions[region].repair_only.get(kind, 0)
    return spares.count(cell.order.pool) - reserved >= cell.short


def _cut(drafts: Sequence[_Draft], cell: WaitingCell, count: int) -> list[tuple[_Draft, int]]:
    """Machines and numbers of nodes for a cell: divided ones first, then the smallest that suffices. Empty if it would
    lack nodes, or its nodes must be near each other and no machine has room for all."""
    region, kind = cell.order.pool
    fitting = [one for one in drafts if one.machine.region == region and one.room(kind) and _is_other(one, kind)]
    fitting.sort(key=lambda one: (not one.parts, -min(count, one.room(kind)), one.machine.devices, one.machine.id))
    if cell.order.within:
        whole = next((one for one in fitting if one.room(kind) >= count and not cell.order.staying), None)
        return [(whole, count)] if whole else []
    found = []
    for draft in fitting:
        found.append((draft, min(count, draft.room(kind))))
        count -= found[-1][1]
        if not count:
            return found
    return []


def _is_other(draft: _Draft, kind: str) -> bool:
    """Whether it has no node of the type yet: those that it has do not serve the cell, and further ones would not."""
    return kind not in draft.machine.types


def _is_charged(draft: _Draft, ledger: Ledger) -> bool:
    region = draft.machine.region
    if ledger.layout_refusal(region) is not None:
        return False
    ledger.charge_layout(region)
    return True


def _change(draft: _Draft) -> ChangeLayout:
    machine, parts = draft.machine, sorted(draft.parts, reverse=True)
    for size, kind in dict.fromkeys(parts):
        parts += [(size, kind)] * ((machine.devices - sum(used for used, _ in parts)) // size)
    parts.sort(reverse=True)
    sizes = [size for size, _ in parts]
    if machine.are_shares:
        sizes[-1] += machine.devices - sum(sizes)
    layout = layout_text(sizes)
    return ChangeLayout(
        machine=machine.id,
        seen=machine.layout,
        nodes=machine.nodes,
        layout=layout,
        types=tuple(kind for _, kind in parts),
        reason=_reason(draft, layout),
    )


def _reason(draft: _Draft, layout: str) -> str:
    machine, first = draft.machine, draft.cells[0]
    more = len({cell.order.cell for cell in draft.cells}) - 1
    others = f" and {more} more cell{'s' * (more > 1)} wait" if more else " waits"
    waited = age_text(first.waited_s)
    wants = f"{first.order.cell}{others} for nodes, the first for {waited} for {first.order.instance_type}"
    spare = f"its {len(machine.nodes)} nodes are spare" if machine.nodes else "it has no node"
    return f"{wants}; {spare} and become {layout} instead of {machine.layout or 'one node'}"
