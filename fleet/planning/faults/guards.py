"""Decides how much may be replaced at once: one node of a cell, few of a pool, and none while too many are unhealthy,
because then it is more likely our view of them that is broken. It suspects no node itself."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property

from engine_agent.protocol.signatures import is_hard
from fleet.planning.fault_rules import NEEDS_OPERATOR, Rule
from fleet.planning.notices import Notices
from fleet.planning.placement.distance import failure_domain
from fleet.planning.settings import FaultSettings, FleetSettings
from fleet.planning.snapshot import FleetView, NodeView
from fleet.planning.states import NodeState

COUNTED = frozenset({NodeState.READY, NodeState.SUSPECT, NodeState.FAULTY, NodeState.LOST})
CONDEMNED = frozenset({NodeState.FAULTY, NodeState.LOST})


@dataclass(frozen=True, slots=True)
class Freeze:
    """A pool or zone of which so much is unhealthy that nothing of it is replaced."""

    scope: str
    region: str
    unhealthy: tuple[str, ...]
    size: int

    @property
    def reason(self) -> str:
        return f"{len(self.unhealthy)} of {self.size} nodes of {self.scope} are unhealthy"


@dataclass(frozen=True, slots=True)
class ReplacementBudget:
    """What bounds one more replacement: how many of the node's pool are open, how many machines the pool has, and
    which other node of the same cell is being replaced. Those of machines that their provider takes away are no choice
    of ours, and do not count."""

    pool: tuple[str, str]
    open: int
    pool_size: int
    cell: str = ""
    peer: str = ""


def over_budget(underway: ReplacementBudget, settings: FaultSettings) -> str:
    """Why one more replacement would be too many; empty: it would not."""
    if underway.peer:
        return f"{underway.peer} of its cell {underway.cell} is being replaced"
    limit = max(1, int(settings.replaced_share * underway.pool_size))
    if underway.open >= limit:
        return f"{underway.open} of {limit} replacements of its pool {_pool_name(*underway.pool)} are under way"
    return ""


class Guards:
    """The guards of one pass. `take` notes what the pass itself decides, so that two decisions share one budget."""

    def __init__(self, fleet: FleetView, settings: FleetSettings, now: datetime) -> None:
        self._fleet = fleet
        self._settings: FaultSettings = settings.faults
        self._silent_after_s = settings.suspect_after_s
        self._now = now
        self._taken: Counter[tuple[str, str]] = Counter()
        self._busy: dict[str, str] = {}
        self._notices = Notices(fleet, settings, now)
        for open_one in fleet.faults.replacements:
            self._taken[open_one.region, open_one.instance_type] += open_one.rule is not Rule.NOTICE
            if open_one.cell:
                self._busy[open_one.cell] = open_one.node

    @cached_property
    def freezes(self) -> tuple[Freeze, ...]:
        """Every pool and zone in which nothing is replaced, in a stable order."""
        counted = (node for node in self._fleet.nodes.values() if node.state in COUNTED)
        if sum(self._is_unhealthy(node) for node in counted) <= self._settings.frozen_above_nodes:
            return ()
        scopes: dict[tuple[str, str], list[NodeView]] = defaultdict(list)
        for node in self._fleet.nodes.values():
            if node.state in COUNTED:
                for scope in _scopes(node):
                    scopes[scope].append(node)
        freezes = (self._freeze(region, scope, nodes) for (region, scope), nodes in sorted(scopes.items()))
        return tuple(freeze for freeze in freezes if freeze is not None)

    def frozen(self, node: NodeView) -> str:
        """Why nothing is replaced where this node is; empty if nothing is frozen there."""
        mine = _scopes(node)
        return next((freeze.reason for freeze in self.freezes if (freeze.region, freeze.scope) in mine), "")

    def refusal(self, node: NodeView) -> str:
        """Why this node may not be replaced now; empty: it may."""
        if reason := self.frozen(node):
            return f"frozen: {reason}"
        return self.crowded(node)

    def crowded(self, node: NodeView) -> str:
        """Whether too much else is being replaced already; empty: it is not."""
        cell, pool = self._cells.get(node.id, ""), _pool(node)
        busy = self._busy.get(cell, "")
        if busy == node.id:
            return ""
        return over_budget(ReplacementBudget(pool, self._taken[pool], self._sizes[pool], cell, busy), self._settings)

    def take(self, node: NodeView) -> None:
        """Count a replacement that this pass decides."""
        self._taken[_pool(node)] += 1
        if cell := self._cells.get(node.id):
            self._busy[cell] = node.id

    @cached_property
    def _cells(self) -> Mapping[str, str]:
        return {member.node: cell.id for cell in self._fleet.cells.values() for member in cell.members}

    @cached_property
    def _sizes(self) -> Counter[tuple[str, str]]:
        return Counter(_pool(node) for node in self._fleet.nodes.values() if node.state in COUNTED)

    @cached_property
    def _with_hard_signal(self) -> frozenset[str]:
        return frozenset(
            signal.node for signal in self._fleet.faults.signals if not signal.settled and is_hard(signal.signature)
        )

    def _freeze(self, region: str, scope: str, nodes: list[NodeView]) -> Freeze | None:
        counted = [node for node in nodes if not self._is_handled(node)]
        unhealthy = tuple(sorted(node.id for node in counted if self._is_unhealthy(node)))
        bound = max(self._settings.frozen_above_nodes, self._settings.frozen_above_share * len(counted))
        return Freeze(scope, region, unhealthy, len(counted)) if len(unhealthy) > bound else None

    def _is_unhealthy(self, node: NodeView) -> bool:
        return node.state is not NodeState.READY or node.id in self._with_hard_signal

    def _is_handled(self, node: NodeView) -> bool:
        """Condemned and in no cell: what it needed was done, or waits for an operator. Or its provider takes it away,
        which says nothing of our view."""
        if node.state not in CONDEMNED:
            return False
        if self._notices.leaving(node.id) is not None:
            return True
        return node.id not in self._cells or self._fleet.faults.is_held(node.id, NEEDS_OPERATOR)


def _pool(node: NodeView) -> tuple[str, str]:
    return node.region, node.instance_type


def _pool_name(region: str, instance_type: str) -> str:
    return f"{instance_type} in {region}"


def _scopes(node: NodeView) -> tuple[tuple[str, str], ...]:
    """The pool and the zone (what fails together) of a node."""
    pool = (node.region, f"pool {_pool_name(*_pool(node))}")
    zone = failure_domain(node.topology)
    return (pool, (node.region, f"zone {zone} in {node.region}")) if zone else (pool,)
