"""What providers have announced about machines, and since when that counts for their cells.

Facts only. What follows is decided in `faults.notices`, `reconcile.scaling` and `reconcile.drains`.

What a cell that serves will ask for because machines of it end. Decides nothing.
"""

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
"""Kinds that say that the machine ends."""
LEAVING = ENDING | {NoticeKind.REBALANCE, NoticeKind.IMAGE}
"""Kinds after which nothing new is placed on the machine."""
GOING_STATES = frozenset({CellState.STARTING, CellState.READY})
Zone = tuple[str, str]
"""Region, failure domain."""


def merge(notices: Iterable[NoticeView]) -> tuple[NoticeView, ...]:
    """One of each kind for a node, ordered by both: the one with the earliest end, however often and in whatever order
    they came. When it was first heard counts, too."""
    kept: dict[tuple[str, NoticeKind], NoticeView] = {}
    for notice in sorted(notices, key=_urgency):
        kept.setdefault((notice.node, notice.kind), notice)
    return tuple(kept[key] for key in sorted(kept))


def _urgency(notice: NoticeView) -> tuple[bool, float, datetime, str]:
    end = notice.ends_at
    return end is None, end.timestamp() if end else 0.0, notice.at, notice.text


@dataclass(frozen=True)
class Notices:
    """Those that count at one moment."""

    fleet: FleetView
    settings: FleetSettings
    now: datetime

    @cached_property
    def by_node(self) -> Mapping[str, tuple[NoticeView, ...]]:
        """What to act upon: nothing unless the rule is in force."""
        return self.heard if self.fleet.faults.mode(Rule.NOTICE) is RuleMode.ON else {}

    @cached_property
    def heard(self) -> Mapping[str, tuple[NoticeView, ...]]:
        """Those of nodes that there are, whatever the rule's mode; a Capacity Block's not before its end is near."""
        found: dict[str, tuple[NoticeView, ...]] = {}
        if not self.fleet.notices:
            return found
        for notice in merge(self.fleet.notices):
            if notice.node in self.fleet.nodes and self._counts(notice):
                found[notice.node] = (*found.get(notice.node, ()), notice)
        return found

    def leaving(self, node: str) -> NoticeView | None:
        """Why nothing new may be placed on a node: the notice with the earliest end."""
        mine = [notice for notice in self.by_node.get(node, ()) if notice.kind in LEAVING]
        return min(mine, key=_urgency, default=None)

    def end_of(self, node: str) -> datetime | None:
        """When its provider ends the machine; None: nobody said so."""
        notice = self.leaving(node)
        return notice.ends_at if notice and notice.kind in ENDING else None

    def goes(self, node: str) -> bool:
        """Whether the machine goes for certain: its provider said when, or we want it to."""
        has_end = self.end_of(node) is not None
        return has_end or any(notice.kind is NoticeKind.IMAGE for notice in self.by_node.get(node, ()))

    def end_of_cell(self, cell: CellView) -> datetime | None:
        """When the first of its machines ends."""
        if not self.by_node:
            return None
        ends = (self.end_of(member.node) for member in cell.members)
        return min((end for end in ends if end is not None), default=None)

    def must_drain(self, cell: CellView, *, is_awaited: bool = False) -> bool:
        """Whether its drain must begin now, to be over before a machine of it ends. `is_awaited`: what would serve
        instead still starts, or waits for a machine; until then a shorter drain is the lesser harm."""
        end = self.end_of_cell(cell)
        lead_s = self.shortest_drain_s if is_awaited else self.drain_s(cell)
        return end is not None and end - self.now <= timedelta(seconds=lead_s)

    def is_taken_up(self, cell: CellView) -> bool:
        """Whether ingresses know by now that the cell is ready."""
        return self.now - cell.state_since >= timedelta(seconds=self.settings.notices.taken_up_s)

    def drain_s(self, cell: CellView) -> float:
        """How long before its end a cell must begin to drain."""
        return self.fleet.deployments[cell.deployment].drain_deadline_s + self.shortest_drain_s

    @property
    def shortest_drain_s(self) -> float:
        """How long before its end a cell begins to drain at the latest."""
        return self.settings.notices.margin_s + self.settings.notices.last_s

    def stands_alone(self, cell: CellView) -> bool:
        """Whether the ledger never lets it go by itself: nothing would serve, or less than may."""
        spec = self.fleet.deployments[cell.deployment]
        is_alone = sum(spec.cells_wanted.values()) <= 1 or self.fleet.policy_of(spec.name).max_unavailable < 1
        return is_alone and not spec.problem

    @cached_property
    def going(self) -> frozenset[str]:
        """Cells in whose place another one is made first, as if they were too many: all of their machines go, or some
        do, nothing else would serve meanwhile, and there is room for another whole one."""
        replaced = {replacement.node for replacement in self.fleet.faults.replacements}
        cells = {cell.id: cell for node in self.by_node if (cell := self.fleet.cell_of(node))}
        untouched = [
            cell
            for cell in cells.values()
            if cell.state in GOING_STATES and not any(member.node in replaced for member in cell.members)
        ]
        whole = {cell.id for cell in untouched if all(self.goes(member.node) for member in cell.members)}
        return frozenset(whole | self._relieved([cell for cell in untouched if cell.id not in whole], whole))

    def _relieved(self, cells: Iterable[CellView], going: Collection[str]) -> set[str]:
        """Of cells of which some machines end, those that stand alone and are succeeded by a whole other cell: it is
        there already, or idle spares make one. `going`: those that are succeeded in any case."""
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
            excess, is_pending = self._beyond(place, going)
            relieved |= {cell.id for cell in ending[:excess]}
            orders += [] if is_pending else [self.order_whole(cell) for cell in ending[excess:]]
        answers = Placement(self.fleet).place(orders) if orders else {}
        return relieved | {cell for cell, answer in answers.items() if isinstance(answer, Placed)}

    def _beyond(self, place: tuple[str, str], going: Collection[str]) -> tuple[int, bool]:
        """How many cells there are beyond those wanted, a rollout's surge included, and whether one waits for nodes."""
        cells = [one for one in self.fleet.cells.values() if (one.deployment, one.region) == place]
        there = sum(not one.is_leaving and one.id not in going for one in cells)
        wanted = self.fleet.deployments[place[0]].cells_wanted.get(place[1], 0)
        return max(0, there - wanted), any(one.state is CellState.PENDING for one in cells)

    def order_whole(self, cell: CellView) -> PlacementRequest:
        """What another cell in its place would ask for."""
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
        """Zones of which so many machines are impaired that it is the zone; with their impaired nodes."""
        impaired: dict[Zone, list[str]] = {}
        for node, notices in self.by_node.items():
            zone = self.zone_of(node)
            if zone[1] and any(notice.kind is NoticeKind.IMPAIRED for notice in notices):
                impaired.setdefault(zone, []).append(node)
        chosen = self.settings.notices
        many = {zone: nodes for zone, nodes in impaired.items() if len(nodes) >= chosen.zone_nodes}
        sizes = dict.fromkeys(many, 0)
        for node in self.fleet.nodes if many else ():
            if (zone := self.zone_of(node)) in sizes:
                sizes[zone] += 1
        return {zone: tuple(nodes) for zone, nodes in many.items() if len(nodes) > chosen.zone_share * sizes[zone]}

    def zone_of(self, node: str) -> Zone:
        view = self.fleet.nodes[node]
        return view.region, failure_domain(view.topology)

    def _counts(self, notice: NoticeView) -> bool:
        if notice.kind is not NoticeKind.BLOCK_END or notice.ends_at is None:
            return True
        return notice.ends_at - self.now <= timedelta(seconds=self.settings.notices.block_lead_s)


def order_ahead(cell: CellView, fleet: FleetView, notices: Notices) -> PlacementRequest | None:
    """The request that the cell will make, as a repair beside the nodes that stay; None: nothing of it leaves."""
    leaving = {member.node for member in cell.members if notices.leaving(member.node)}
    if not leaving:
        return None
    staying = tuple(fleet.nodes[member.node] for member in cell.members if member.node not in leaving)
    return replace(notices.order_whole(cell), count=len(leaving), staying=staying, is_repair=True)


def supply_ahead(cell: CellView, fleet: FleetView, notices: Notices) -> PlacementRequest | None:
    """What is bought for it meanwhile: machines for another whole cell, if it stands alone and there is time for one.
    They come singly and near those that stay, so that the cell is repaired with them if only some do."""
    order = order_ahead(cell, fleet, notices)
    if order is None or not notices.stands_alone(cell) or not _has_time(cell, fleet, notices):
        return order
    return replace(order, count=notices.order_whole(cell).count)


def _has_time(cell: CellView, fleet: FleetView, notices: Notices) -> bool:
    """Whether machines that are bought now serve in another cell before this one must drain."""
    end = notices.end_of_cell(cell)
    ready_s = fleet.deployments[cell.deployment].of_cell(cell).ready_timeout_s
    needed_s = fleet.regions[cell.region].limits.boot_s + ready_s + notices.drain_s(cell)
    return end is not None and (end - notices.now).total_seconds() > needed_s
