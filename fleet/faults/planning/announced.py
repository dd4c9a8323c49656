"""Provider notices in force at one moment, and what they mean for cells: which machines end, when a cell must drain,
and what to place or buy in advance. Decides nothing; `faults.planning.notices` and `reconcile.planning` do."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import cached_property

from fleet.faults.planning.views import NoticeView, Rule, RuleMode
from fleet.placement.planning.distance import failure_domain
from fleet.placement.planning.planner import Placed, Placement, PlacementRequest
from fleet.reconcile.planning.settings import FleetSettings
from fleet.reconcile.planning.snapshot import CellView, FleetView
from fleet.reconcile.planning.states import CellState, NoticeKind

ENDING = frozenset({NoticeKind.INTERRUPTION, NoticeKind.BLOCK_END, NoticeKind.RETIREMENT, NoticeKind.MAINTENANCE})
"""Kinds that announce the end of the machine."""
LEAVING = ENDING | {NoticeKind.REBALANCE, NoticeKind.IMAGE}
"""Kinds after which no new cell is placed on the machine."""
GOING_STATES = frozenset({CellState.STARTING, CellState.READY})
Zone = tuple[str, str]
"""Region, failure domain."""


def merge(notices: Iterable[NoticeView]) -> tuple[NoticeView, ...]:
    """Keeps the notice with the earliest end per node and kind, sorted by both. Arrival order does not matter."""
    kept: dict[tuple[str, NoticeKind], NoticeView] = {}
    for notice in sorted(notices, key=_urgency):
        kept.setdefault((notice.node, notice.kind), notice)
    return tuple(kept[key] for key in sorted(kept))


def _urgency(notice: NoticeView) -> tuple[bool, float, datetime, str]:
    end = notice.ends_at
    return end is None, end.timestamp() if end else 0.0, notice.at, notice.text


@dataclass(frozen=True)
class Notices:
    fleet: FleetView
    settings: FleetSettings
    now: datetime

    @cached_property
    def by_node(self) -> Mapping[str, tuple[NoticeView, ...]]:
        """Notices to act on. Empty unless the rule is on."""
        return self.in_any_mode if self.fleet.faults.mode(Rule.NOTICE) is RuleMode.ON else {}

    @cached_property
    def in_any_mode(self) -> Mapping[str, tuple[NoticeView, ...]]:
        """Notices of known nodes in every mode of the rule. A Capacity Block's counts only shortly before its end."""
        found: dict[str, tuple[NoticeView, ...]] = {}
        if not self.fleet.notices:
            return found
        for notice in merge(self.fleet.notices):
            if notice.node in self.fleet.nodes and self._is_in_force(notice):
                found[notice.node] = (*found.get(notice.node, ()), notice)
        return found

    def leaving(self, node: str) -> NoticeView | None:
        """The notice with the earliest end that forbids new placements on a node, or None."""
        mine = [notice for notice in self.by_node.get(node, ()) if notice.kind in LEAVING]
        return min(mine, key=_urgency, default=None)

    def end_of(self, node: str) -> datetime | None:
        """When the provider ends the machine, or None if it gave no time."""
        notice = self.leaving(node)
        return notice.ends_at if notice and notice.kind in ENDING else None

    def goes(self, node: str) -> bool:
        """Whether the machine will certainly end: its provider gave a time, or its image is being replaced."""
        has_end = self.end_of(node) is not None
        return has_end or any(notice.kind is NoticeKind.IMAGE for notice in self.by_node.get(node, ()))

    def end_of_cell(self, cell: CellView) -> datetime | None:
        """When the first of the cell's machines ends."""
        if not self.by_node:
            return None
        ends = (self.end_of(member.node) for member in cell.members)
        return min((end for end in ends if end is not None), default=None)

    def must_drain(self, cell: CellView, *, is_awaited: bool = False) -> bool:
        """Whether the drain must begin now to finish before a machine of the cell ends. With `is_awaited`, a successor
        is starting or waits for machines, so a shorter drain is preferred to a gap."""
        end = self.end_of_cell(cell)
        lead_s = self.shortest_drain_s if is_awaited else self.drain_s(cell)
        return end is not None and end - self.now <= timedelta(seconds=lead_s)

    def is_taken_up(self, cell: CellView) -> bool:
        """Whether the cell has been ready long enough for ingresses to know."""
        return self.now - cell.state_since >= timedelta(seconds=self.settings.notices.taken_up_s)

    def drain_s(self, cell: CellView) -> float:
        """Seconds before its machine's end when a cell must begin to drain."""
        return self.fleet.deployments[cell.deployment].drain_deadline_s + self.shortest_drain_s

    @property
    def shortest_drain_s(self) -> float:
        """Seconds before its machine's end when even an awaited successor cannot delay the drain."""
        return self.settings.notices.margin_s + self.settings.notices.last_s

    def stands_alone(self, cell: CellView) -> bool:
        """Whether the ledger would never allow its drain, because too few cells would remain."""
        spec = self.fleet.deployments[cell.deployment]
        is_alone = sum(spec.cells_wanted.values()) <= 1 or self.fleet.policy_of(spec.name).max_unavailable < 1
        return is_alone and not spec.problem

    @cached_property
    def going(self) -> frozenset[str]:
        """Cells that get a successor first, as if they were surplus. Either all of their machines end, or some do, no
        other cell would serve meanwhile, and a whole other cell fits."""
        replaced = {replacement.node for replacement in self.fleet.faults.replacements}
        cells = {cell.id: cell for node in self.by_node if (cell := self.fleet.cell_of(node))}
        untouched = [
            cell
            for cell in cells.values()
            if cell.state in GOING_STATES and not any(member.node in replaced for member in cell.members)
        ]
        whole = {cell.id for cell in untouched if all(self.goes(member.node) for member in cell.members)}
        return frozenset(whole | self._relieved_cells([cell for cell in untouched if cell.id not in whole], whole))

    def _relieved_cells(self, cells: Iterable[CellView], going: Collection[str]) -> set[str]:
        """Of the cells with some ending machines: those that serve alone and get a whole successor, which exists
        already or fits on idle spares. `going`: cells that get a successor in any case."""
        alone = [
            cell
            for cell in cells
            if cell.state is CellState.READY and self.end_of_cell(cell) is not None and self.stands_alone(cell)
        ]
        by_place: dict[tuple[str, str], list[CellView]] = {}
        for cell in sorted(alone, key=lambda cell: (self.end_of_cell(cell), cell.id)):
            by_place.setdefault((cell.deployment, cell.region), []).append(cell)
        relieved: set[str] = set()
        orders: list[PlacementRequest] = []
        for place, ending in by_place.items():
            excess, is_pending = self._surplus(place, going)
            relieved |= {cell.id for cell in ending[:excess]}
            orders += [] if is_pending else [self.order_whole(cell) for cell in ending[excess:]]
        answers = Placement(self.fleet).place(orders) if orders else {}
        return relieved | {cell for cell, answer in answers.items() if isinstance(answer, Placed)}

    def _surplus(self, place: tuple[str, str], going: Collection[str]) -> tuple[int, bool]:
        """Number of cells above the target, including a rollout's surge, and whether one waits for nodes."""
        cells = [one for one in self.fleet.cells.values() if (one.deployment, one.region) == place]
        there = sum(not one.is_leaving and one.id not in going for one in cells)
        wanted = self.fleet.deployments[place[0]].cells_wanted.get(place[1], 0)
        return max(0, there - wanted), any(one.state is CellState.PENDING for one in cells)

    def order_whole(self, cell: CellView) -> PlacementRequest:
        spec = self.fleet.deployments[cell.deployment]
        version = spec.of_cell(cell)
        return PlacementRequest(
            cell=cell.id,
            deployment=cell.deployment,
            region=cell.region,
            instance_type=cell.instance_type,
            count=version.nodes_per_cell,
            within=version.within,
            engine=version.engine,
            markets=spec.markets,
        )

    @cached_property
    def troubled_zones(self) -> Mapping[Zone, tuple[str, ...]]:
        """Zones with so many impaired machines that the zone itself is at fault, with those nodes. Nodes of one machine
        count once."""
        impaired: dict[Zone, list[str]] = {}
        for node, notices in self.by_node.items():
            zone = self.zone_of(node)
            if zone[1] and any(notice.kind is NoticeKind.IMPAIRED for notice in notices):
                impaired.setdefault(zone, []).append(node)
        chosen = self.settings.notices
        count = {zone: len({self.fleet.nodes[node].machine for node in nodes}) for zone, nodes in impaired.items()}
        sizes: dict[Zone, set[str]] = {zone: set() for zone, machines in count.items() if machines >= chosen.zone_nodes}
        for name, view in self.fleet.nodes.items() if sizes else ():
            if (zone := self.zone_of(name)) in sizes:
                sizes[zone].add(view.machine)
        troubled = (zone for zone, there in sizes.items() if count[zone] > chosen.zone_share * len(there))
        return {zone: tuple(impaired[zone]) for zone in troubled}

    def zone_of(self, node: str) -> Zone:
        view = self.fleet.nodes[node]
        return view.region, failure_domain(view.topology)

    def _is_in_force(self, notice: NoticeView) -> bool:
        if notice.kind is not NoticeKind.BLOCK_END or notice.ends_at is None:
            return True
        return notice.ends_at - self.now <= timedelta(seconds=self.settings.notices.block_lead_s)


def order_ahead(cell: CellView, fleet: FleetView, notices: Notices) -> PlacementRequest | None:
    """The request for a repair next to the nodes that stay, or None if no member leaves."""
    leaving = {member.node for member in cell.members if notices.leaving(member.node)}
    if not leaving:
        return None
    staying = tuple(fleet.nodes[member.node] for member in cell.members if member.node not in leaving)
    return replace(notices.order_whole(cell), count=len(leaving), staying=staying, is_repair=True)


def supply_ahead(cell: CellView, fleet: FleetView, notices: Notices) -> PlacementRequest | None:
    """The request to buy machines for. If the cell serves alone and there is time, it covers a whole other cell. The
    machines still come one by one and near the nodes that stay, so that they can also repair the cell."""
    order = order_ahead(cell, fleet, notices)
    if order is None or not notices.stands_alone(cell) or not _has_time(cell, fleet, notices):
        return order
    return replace(order, count=notices.order_whole(cell).count)


def _has_time(cell: CellView, fleet: FleetView, notices: Notices) -> bool:
    """Whether machines bought now would serve in another cell before this one must drain."""
    end = notices.end_of_cell(cell)
    ready_s = fleet.deployments[cell.deployment].of_cell(cell).ready_timeout_s
    needed_s = fleet.regions[cell.region].limits.boot_s + ready_s + notices.drain_s(cell)
    return end is not None and (end - notices.now).total_seconds() > needed_s
