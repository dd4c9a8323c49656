"""What providers have announced about machines, and since when that counts for their cells.

Facts only. What follows is decided in `faults.notices`, `reconcile.scaling` and `reconcile.drains`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property

from fleet.planning.fault_rules import Rule, RuleMode
from fleet.planning.placement.distance import failure_domain
from fleet.planning.settings import FleetSettings
from fleet.planning.snapshot import CellView, FleetView, NoticeView
from fleet.planning.states import CellState, NoticeKind

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

    def must_drain(self, cell: CellView) -> bool:
        """Whether its drain must begin now, to be over before a machine of it ends."""
        end = self.end_of_cell(cell)
        return end is not None and end - self.now <= timedelta(seconds=self.drain_s(cell))

    def drain_s(self, cell: CellView) -> float:
        """How long before its end a cell must begin to drain."""
        chosen = self.settings.notices
        return self.fleet.deployments[cell.deployment].drain_deadline_s + chosen.margin_s + chosen.last_s

    @cached_property
    def going(self) -> frozenset[str]:
        """Cells all of whose machines go: another one is made first, as if they were too many."""
        replaced = {replacement.node for replacement in self.fleet.faults.replacements}
        cells = {cell.id: cell for node in self.by_node if (cell := self.fleet.cell_of(node))}
        return frozenset(
            cell.id
            for cell in cells.values()
            if cell.state in GOING_STATES
            and all(self.goes(member.node) and member.node not in replaced for member in cell.members)
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
