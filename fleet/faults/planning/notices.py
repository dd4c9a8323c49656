"""Decides what follows from provider notices: cordons machines that end and replaces them as soon as others fit,
through the disruption ledger like every repair. It overspends the ledger only when the end is so near that waiting
would lose running requests. It uncordons only nodes whose notices were all withdrawn, and forces nothing for a
recommendation. Cells whose machines all end are left to `reconcile.planning.planner`."""

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
CALLED_OFF = "its provider withdrew the notice"
NEVER_JOINED_OR_SPARE = frozenset({NodeState.JOINING, NodeState.READY, NodeState.SUSPECT})


@dataclass
class _Pass:
    """Working memory of one plan. `waiting`: cells that are drained before a machine is replaced; `fitting`: cell ->
    whether spares fit."""

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
        """Shared by the pass, so that no machine is placed twice."""
        return Placement(self.fleet)

    @cached_property
    def guards(self) -> Guards:
        return Guards(self.fleet, self.settings, self.now)

    def left_s(self, notice: NoticeView) -> float:
        """Seconds until the machine ends; infinite if the provider gave no time."""
        end = self.notices.end_of(notice.node)
        return (end - self.now).total_seconds() if end else float("inf")


def plan_notices(fleet: FleetView, settings: FleetSettings, now: datetime) -> tuple[Decision, ...]:
    """Nodes to cordon, replace and return because of notices, the most urgent first."""
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
        _act_on_notice(work, notice, fleet.nodes[notice.node])
    for node in called_off:
        _uncordon(work, node)
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


def _uncordon(work: _Pass, node: NodeView) -> None:
    """Uncordons the node unless it is replaced for another reason or its replacement has begun."""
    mine = [one for one in work.fleet.faults.replacements if one.node == node.id]
    if all(one.rule is Rule.NOTICE and not one.begun for one in mine):
        work.decisions += [CloseReplacement(one.id, CALLED_OFF) for one in mine]
        work.decisions.append(UncordonNode(node.id, CALLED_OFF))


def _act_on_notice(work: _Pass, notice: NoticeView, node: NodeView) -> None:
    if node.state in CONDEMNED or node.state is NodeState.RETIRED:
        return
    if not node.cordoned:
        work.decisions.append(CordonNode(node.id, _notice_reason(notice), for_notice=True))
    cell = work.fleet.cell_of(node.id)
    if cell is None:
        _retire_spare(work, notice, node)
    elif cell.id in work.waiting:
        _force_drain(work, notice, cell)
    elif cell.id not in work.notices.going and not cell.is_leaving:
        _replace_member(work, notice, node, cell)


def _retire_spare(work: _Pass, notice: NoticeView, node: NodeView) -> None:
    """Retires a spare once others have taken its place, or shortly before its end."""
    if not node.cordoned or node.state not in NEVER_JOINED_OR_SPARE:
        return
    is_over = work.left_s(notice) <= work.settings.notices.last_s
    if is_over or (node.report.state is EngineState.IDLE and _has_substitute(work, node)):
        work.decisions.append(RetireNode(node.id, node.state, _notice_reason(notice)))


def _has_substitute(work: _Pass, node: NodeView) -> bool:
    warm = work.fleet.regions[node.region].spares.get(node.instance_type, 0)
    return work.placement.spares.count((node.region, node.instance_type)) >= warm


def _force_drain(work: _Pass, notice: NoticeView, cell: CellView) -> None:
    """Forces the drain, because the machine ends before the ledger may allow it."""
    if cell.state is CellState.READY and work.notices.must_drain(cell) and cell.id not in _cells_draining(work):
        reason = f"{_notice_reason(notice)}; the ledger is overspent because the end is near"
        work.decisions.append(
            DrainCell(cell.id, cell.generation, DisruptionCause.REPAIR, f"{notice.node}: {reason}", forced=True)
        )


def _cells_draining(work: _Pass) -> set[str]:
    return {decision.cell for decision in work.decisions if isinstance(decision, DrainCell)}


def _replace_member(work: _Pass, notice: NoticeView, node: NodeView, cell: CellView) -> None:
    """Drains a serving cell first. From any other cell, takes all leaving nodes immediately and together."""
    if cell.state in BROKEN or _starts_too_late(work, notice, cell):
        if cell.state in BROKEN and not _is_soon(work, notice, cell) and not _fits(work, cell):
            return
        work.decisions.append(
            ReplaceNode(node.id, node.state, node.state_since, cell.id, Rule.NOTICE, _notice_reason(notice))
        )
        return
    if cell.state not in {CellState.READY, CellState.DRAINING} or _may_be_succeeded(work, cell):
        return
    if _is_soon(work, notice, cell) or (not _why_later(work, node) and _fits(work, cell)):
        work.waiting.add(cell.id)
        work.decisions.append(RequestReplacement(node.id, cell.id, Rule.NOTICE, _notice_reason(notice)))


def _may_be_succeeded(work: _Pass, cell: CellView) -> bool:
    """Whether the ledger would refuse anyway and there is time for spares for a whole successor. Without spares for a
    repair, draining now would only lose capacity."""
    notices = work.notices
    stands = cell.state is CellState.READY and notices.stands_alone(cell)
    if not stands or notices.end_of_cell(cell) is None:
        return False
    return not notices.must_drain(cell, is_awaited=not _fits(work, cell))


def _is_soon(work: _Pass, notice: NoticeView, cell: CellView) -> bool:
    """Whether another machine would come too late, so that the cell must drain now."""
    boot_s = work.fleet.regions[cell.region].limits.boot_s
    return work.left_s(notice) <= work.notices.drain_s(cell) + boot_s


def _starts_too_late(work: _Pass, notice: NoticeView, cell: CellView) -> bool:
    """Whether a starting cell would have to drain soon after it is ready."""
    ready_s = work.fleet.deployments[cell.deployment].of_cell(cell).ready_timeout_s
    is_late = work.left_s(notice) <= ready_s + work.notices.drain_s(cell)
    return cell.state is CellState.STARTING and is_late


def _why_later(work: _Pass, node: NodeView) -> str:
    """Why the cell is left alone until it must drain, or ""."""
    if work.notices.zone_of(node.id) in work.notices.troubled_zones:
        return "its zone is in trouble"
    return work.guards.frozen(node)


def _fits(work: _Pass, cell: CellView) -> bool:
    """Whether idle spares can replace all leaving members of the cell."""
    if cell.id not in work.fitting:
        order = order_ahead(cell, work.fleet, work.notices)
        work.fitting[cell.id] = order is not None and isinstance(work.placement.place([order])[cell.id], Placed)
    return work.fitting[cell.id]


def _notice_reason(notice: NoticeView) -> str:
    until = f", ends at {notice.ends_at:%Y-%m-%d %H:%M:%S} UTC" if notice.ends_at else ""
    text = f": {notice.text}" if notice.text else ""
    return f"provider notice, {notice.kind}{until}{text}"
