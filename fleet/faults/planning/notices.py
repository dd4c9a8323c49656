"""Decides what follows from what providers announce of machines: nothing new on them, and others in their place.

A machine that ends is replaced as soon as another one fits, through the disruption ledger like every repair; that is
overspent only when the end is so near that waiting would lose what still runs. It lets a machine back in only where
all that it was cordoned for was called off, and forces nothing for a mere recommendation. Cells all of whose machines
end are left to `reconcile.scaling`.
"""

from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property

from engine_agent.protocol.states import EngineState
from fleet.faults.planning.announced import Notices, order_ahead
from fleet.faults.planning.liveness import CONDEMNED, Guards, are_all_silent
from fleet.faults.planning.views import NoticeView, Rule, RuleMode
from fleet.placement.planning.planner import Placed, Placement
from fleet.reconcile.planning.decisions import (
    CloseReplacement,
    CordonNode,
    Decision,
    DrainCell,
    ReplaceNode,
    RequestReplacement,
    RetireNode,
    UncordonNode,
)
from fleet.reconcile.planning.settings import FleetSettings
from fleet.reconcile.planning.snapshot import CellView, FleetView, NodeView
from fleet.reconcile.planning.states import CellState, DisruptionCause, NodeState

BROKEN = frozenset({CellState.FAILED, CellState.LOST})
CALLED_OFF = "what its provider announced is called off"
NEVER_JOINED_OR_SPARE = frozenset({NodeState.JOINING, NodeState.READY, NodeState.SUSPECT})


@dataclass
class _Pass:
    """Working memory of one plan. `waiting`: cells of which a machine will be replaced once they are drained;
    `fitting`: for which spares were looked for, and whether there are some."""

    fleet: FleetView
    settings: FleetSettings
    now: datetime
    decisions: list[Decision] = field(default_factory=list)
    fitting: dict[str, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.notices = Notices(self.fleet, self.settings, self.now)
        self.waiting = {one.cell for one in self.fleet.faults.replacements if one.cell and not one.begun}

    @cached_property
    def placement(self) -> Placement:
        """What this pass gives to one cell it does not give to another."""
        return Placement(self.fleet)

    @cached_property
    def guards(self) -> Guards:
        return Guards(self.fleet, self.settings, self.now)

    def left_s(self, notice: NoticeView) -> float:
        """Seconds until the machine ends; infinite: nobody said when."""
        end = self.notices.end_of(notice.node)
        return (end - self.now).total_seconds() if end else float("inf")


def plan_notices(fleet: FleetView, settings: FleetSettings, now: datetime) -> tuple[Decision, ...]:
    """Nodes to cordon, to replace and to give back because of what was announced, the most urgent first."""
    work = _Pass(fleet, settings, now)
    called_off = _called_off(work)
    if (
        not (work.notices.by_node or called_off)
        or fleet.listening_since is None
        or are_all_silent(fleet, settings, now)
    ):
        return ()
    leaving = [notice for node in work.notices.by_node if (notice := work.notices.leaving(node))]
    for notice in sorted(leaving, key=lambda notice: (work.left_s(notice), notice.node)):
        _act_on(work, notice, fleet.nodes[notice.node])
    for node in called_off:
        _let_back(work, node)
    return tuple(work.decisions)


def _called_off(work: _Pass) -> list[NodeView]:
    if work.fleet.faults.mode(Rule.NOTICE) is not RuleMode.ON:
        return []
    cordoned = (node for node in work.fleet.nodes.values() if node.cordoned_for_notice)
    return [
        node
        for node in cordoned
        if node.state not in CONDEMNED and node.state is not NodeState.RETIRED and not work.notices.leaving(node.id)
    ]


def _let_back(work: _Pass, node: NodeView) -> None:
    """Unless it is to be replaced for another reason, or its replacement has begun."""
    mine = [one for one in work.fleet.faults.replacements if one.node == node.id]
    if all(one.rule is Rule.NOTICE and not one.begun for one in mine):
        work.decisions += [CloseReplacement(one.id, CALLED_OFF) for one in mine]
        work.decisions.append(UncordonNode(node.id, CALLED_OFF))


def _act_on(work: _Pass, notice: NoticeView, node: NodeView) -> None:
    if node.state in CONDEMNED or node.state is NodeState.RETIRED:
        return
    if not node.cordoned:
        work.decisions.append(CordonNode(node.id, _reason(notice), for_notice=True))
    cell = work.fleet.cell_of(node.id)
    if cell is None:
        _give_back(work, notice, node)
    elif cell.id in work.waiting:
        _hurry(work, notice, cell)
    elif cell.id not in work.notices.going and not cell.is_leaving:
        _replace(work, notice, node, cell)


def _give_back(work: _Pass, notice: NoticeView, node: NodeView) -> None:
    """A spare goes once others are there in its place, or when its time is over."""
    if not node.cordoned or node.state not in NEVER_JOINED_OR_SPARE:
        return
    is_over = work.left_s(notice) <= work.settings.notices.last_s
    if is_over or (node.report.state is EngineState.IDLE and _has_substitute(work, node)):
        work.decisions.append(RetireNode(node.id, node.state, _reason(notice)))


def _has_substitute(work: _Pass, node: NodeView) -> bool:
    warm = work.fleet.regions[node.region].spares.get(node.instance_type, 0)
    return work.placement.spares.count((node.region, node.instance_type)) >= warm


def _hurry(work: _Pass, notice: NoticeView, cell: CellView) -> None:
    """The replacement waits for leave, and the machine does not wait."""
    if cell.state is CellState.READY and work.notices.must_drain(cell) and cell.id not in _drained(work):
        reason = f"{_reason(notice)}; no leave of the ledger is waited for any longer"
        work.decisions.append(
            DrainCell(cell.id, cell.generation, DisruptionCause.REPAIR, f"{notice.node}: {reason}", forced=True)
        )


def _drained(work: _Pass) -> set[str]:
    return {decision.cell for decision in work.decisions if isinstance(decision, DrainCell)}


def _replace(work: _Pass, notice: NoticeView, node: NodeView, cell: CellView) -> None:
    """A cell that serves is drained first; of one that does not, the node is taken at once, all that leave together."""
    if cell.state in BROKEN or _is_vain(work, notice, cell):
        if cell.state in BROKEN and not _is_soon(work, notice, cell) and not _fits(work, cell):
            return
        work.decisions.append(ReplaceNode(node.id, node.state, node.state_since, cell.id, Rule.NOTICE, _reason(notice)))
        return
    if cell.state not in {CellState.READY, CellState.DRAINING} or _may_be_succeeded(work, cell):
        return
    if _is_soon(work, notice, cell) or (not _why_later(work, node) and _fits(work, cell)):
        work.waiting.add(cell.id)
        work.decisions.append(RequestReplacement(node.id, cell.id, Rule.NOTICE, _reason(notice)))


def _may_be_succeeded(work: _Pass, cell: CellView) -> bool:
    """Whether the ledger would refuse in any case, and there is time: spares for another whole cell may come. While not
    even a repair has one, a drain would only begin what nothing can end yet."""
    notices = work.notices
    stands = cell.state is CellState.READY and notices.stands_alone(cell)
    if not stands or notices.end_of_cell(cell) is None:
        return False
    return not notices.must_drain(cell, is_awaited=not _fits(work, cell))


def _is_soon(work: _Pass, notice: NoticeView, cell: CellView) -> bool:
    """Whether another machine would come too late to wait for it: the cell drains now, while there is time."""
    boot_s = work.fleet.regions[cell.region].limits.boot_s
    return work.left_s(notice) <= work.notices.drain_s(cell) + boot_s


def _is_vain(work: _Pass, notice: NoticeView, cell: CellView) -> bool:
    """Whether a cell that starts would hardly serve before it has to drain."""
    ready_s = work.fleet.deployments[cell.deployment].of_cell(cell).ready_timeout_s
    is_late = work.left_s(notice) <= ready_s + work.notices.drain_s(cell)
    return cell.state is CellState.STARTING and is_late


def _why_later(work: _Pass, node: NodeView) -> str:
    """Why a cell is not touched for this before it must be; empty: it may be."""
    if work.notices.zone_of(node.id) in work.notices.troubled_zones:
        return "its zone is in trouble"
    return work.guards.frozen(node)


def _fits(work: _Pass, cell: CellView) -> bool:
    """Whether idle spares fit in the place of all that leave the cell."""
    if cell.id not in work.fitting:
        order = order_ahead(cell, work.fleet, work.notices)
        work.fitting[cell.id] = order is not None and isinstance(work.placement.place([order])[cell.id], Placed)
    return work.fitting[cell.id]


def _reason(notice: NoticeView) -> str:
    until = f", ends at {notice.ends_at:%Y-%m-%d %H:%M:%S} UTC" if notice.ends_at else ""
    said = f": {notice.text}" if notice.text else ""
    return f"notice of its provider, {notice.kind}{until}{said}"
