"""Says why: what a decision is about, its rule, the inputs that mattered and the limits that they were compared with.
Stored with each decision, so it stays readable when the inputs of its round are gone. Also the other choices that a
recorded placement or drain had, which are computed when someone asks. Decides nothing. Declares the reconciler as a
recorded loop."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from datetime import datetime
from functools import cached_property
from itertools import islice
from typing import Any, get_args

import msgspec

from fleet.capacity.planning.pools import Markets, may_use
from fleet.placement.planning.distance import depth_of, distance
from fleet.placement.planning.packing import is_idle
from fleet.reconcile.planning.decisions import (
    ChangeRollout,
    CloseIncident,
    CordonNode,
    CreateCell,
    Decision,
    DrainCell,
    ExplainCell,
    LaunchNodes,
    MoveCell,
    MoveNode,
    NoteIncident,
    OpenIncident,
    ReplaceNode,
    RequestReplacement,
    StartCell,
    TryRepair,
)
from fleet.reconcile.planning.planner import PLANNERS
from fleet.reconcile.planning.settings import FleetSettings
from fleet.reconcile.planning.snapshot import CellView, FleetView, NodeView
from fleet.reconcile.planning.states import CellState, NodeState
from fleet.recorder.planning.changes import names_of_settings, settings_changed
from fleet.recorder.planning.loops import RecordedLoop, Round
from fleet.recorder.planning.reasons import (
    ALTERNATIVES_MOST,
    Alternative,
    Reason,
    Subject,
    Value,
    subjects_bounded,
    text_bounded,
    values_bounded,
)

WITH_CHOICES = frozenset({StartCell.__name__, DrainCell.__name__})
"""Decisions that `alternatives` explains."""


class Facts:
    """One round's inputs, counted once for all of its decisions."""

    def __init__(self, view: FleetView, settings: FleetSettings, now: datetime) -> None:
        self.view = view
        self.settings = settings
        self.now = now

    @cached_property
    def spares(self) -> Counter[tuple[str, str]]:
        """Idle nodes in no cell, by region and instance type."""
        cell_of = self.view.cell_of
        return Counter(
            _pool_of(node) for node in self.view.nodes.values() if is_idle(node) and cell_of(node.id) is None
        )

    @cached_property
    def pool_sizes(self) -> Counter[tuple[str, str]]:
        return Counter(map(_pool_of, self.view.nodes.values()))

    @cached_property
    def cells_of(self) -> Mapping[str, list[CellView]]:
        found: dict[str, list[CellView]] = defaultdict(list)
        for cell in self.view.cells.values():
            found[cell.deployment].append(cell)
        return found

    def wanted_in(self, region: str) -> int:
        return sum(one.cells_wanted.get(region, 0) for one in self.view.deployments.values())


def _pool_of(node: NodeView) -> tuple[str, str]:
    return node.region, node.instance_type


def is_told(decision: Decision) -> bool:
    """An open incident is noted every few seconds, which explains nothing."""
    return not isinstance(decision, NoteIncident)


_PLACES = tuple(Subject)
_NOT_INPUTS = frozenset({"reason", "summary", "result", "evidence", *(place.value for place in _PLACES)})


def reason_of(decision: Decision, planner: str, at: Facts) -> Reason:
    """`at`: the facts of its round."""
    kind = type(decision)
    inputs = {one.name: getattr(decision, one.name) for one in fields(decision) if one.name not in _NOT_INPUTS}
    seen, limits = _DETAILS[kind](decision, at) if kind in _DETAILS else ({}, {})
    text = next(
        (str(getattr(decision, name)) for name in ("reason", "summary", "result") if hasattr(decision, name)), ""
    )
    return Reason(
        kind.__name__,
        planner,
        subjects_bounded(_subjects(decision, at.view)),
        _rule(decision, planner),
        text_bounded(text),
        values_bounded({**inputs, **seen}),
        values_bounded(limits),
    )


def _rule(decision: Decision, planner: str) -> str:
    stated = next((str(getattr(decision, name)) for name in ("rule", "cause", "kind") if hasattr(decision, name)), "")
    return stated or planner.removeprefix("plan_")


def _subjects(decision: Decision, view: FleetView) -> Iterator[str]:
    for place in _PLACES:
        if name := getattr(decision, place.value, None):
            yield place.named(name)
    if isinstance(decision, OpenIncident):
        yield Subject.INCIDENT.named(f"{decision.kind}/{decision.subject}")
    if isinstance(decision, StartCell):
        yield from map(Subject.NODE.named, decision.nodes)
    if isinstance(decision, CloseIncident):
        about = next((one for one in view.faults.incidents if one.id == decision.incident), None)
        yield from (place.named(name) for place, name in _places_of_incident(about) if name)
    if (cell := view.cells.get(getattr(decision, "cell", ""))) is not None:
        yield Subject.DEPLOYMENT.named(cell.deployment)
    if isinstance(decision, ChangeRollout):
        about_rollouts = (name for name, one in view.rollouts.items() if one.id == decision.rollout)
        yield from map(Subject.DEPLOYMENT.named, about_rollouts)
    if isinstance(decision, MoveNode) and (cell := view.cell_of(decision.node)) is not None:
        yield Subject.CELL.named(cell.id)
        yield Subject.DEPLOYMENT.named(cell.deployment)


def _places_of_incident(about: Any) -> list[tuple[Subject, str]]:
    return [(Subject.CELL, about.cell), (Subject.NODE, about.node)] if about else []


# --- inputs that mattered --------------------------------------------------------------------------------------------

_Details = tuple[dict[str, Any], dict[str, Any]]


def _of_node(decision: MoveNode, at: Facts) -> _Details:
    node = at.view.nodes.get(decision.node)
    if node is None:
        return {}, {}
    seen = {
        "silence_s": at.view.silence_s(node, at.now),
        "connected": node.report.connected,
        "provider": node.provider,
        "unreachable_from": at.view.faults.down.get(cell.id, "") if (cell := at.view.cell_of(node.id)) else "",
    }
    limits = {"suspect_after_s": at.settings.suspect_after_s, "lost_after_s": at.settings.lost_after_s}
    return seen, limits if decision.to in {NodeState.SUSPECT, NodeState.LOST} else {}


def _of_cell_state(decision: MoveCell, at: Facts) -> _Details:
    cell = at.view.cells[decision.cell]
    members = [at.view.nodes[member.node] for member in cell.members]
    seen = {
        "in_state_s": (at.now - cell.state_since).total_seconds(),
        "ranks_ready": sum(one.report.is_about(cell) and one.report.state == "ready" for one in members),
        "ranks": len(members),
    }
    if decision.seen is CellState.STARTING:
        timeout_s = at.view.deployments[cell.deployment].of_cell(cell).ready_timeout_s
        return seen, {"ready_timeout_s": timeout_s, "start_grace_s": at.settings.start_grace_s}
    return seen, {"unhealthy_after_s": at.settings.unhealthy_after_s} if decision.failed_by else {}


def _of_start(decision: StartCell, at: Facts) -> _Details:
    cell = at.view.cells[decision.cell]
    seen = {
        "nodes": ", ".join(decision.nodes),
        "staying": sum(member.node in decision.nodes for member in cell.members),
        "restarts": cell.restarts,
        "in_state_s": (at.now - cell.state_since).total_seconds(),
        "spares": at.spares[cell.region, cell.instance_type],
    }
    broken = cell.state in {CellState.FAILED, CellState.LOST}
    return seen, {"restart_backoff_s": at.settings.restart_backoff_s} if broken else {}


def _of_drain(decision: DrainCell, at: Facts) -> _Details:
    cell = at.view.cells[decision.cell]
    mine = at.cells_of[cell.deployment]
    seen = {
        "cells_wanted": sum(at.view.deployments[cell.deployment].cells_wanted.values()),
        "cells_ready": sum(one.state is CellState.READY for one in mine),
        "down_on_purpose": sum(one.disruption is not None for one in mine),
    }
    limits = {
        "max_unavailable": at.view.policy_of(cell.deployment).max_unavailable,
        "region_budget_cells": at.settings.ledger.region(at.wanted_in(cell.region)),
    }
    return seen, limits


def _of_creation(decision: CreateCell, at: Facts) -> _Details:
    cells = [one for one in at.cells_of[decision.deployment] if one.region == decision.region]
    wanted = at.view.deployments[decision.deployment].cells_wanted.get(decision.region, 0)
    return {"cells": len(cells), "leaving": sum(one.is_leaving for one in cells)}, {"cells_wanted": wanted}


def _of_wait(decision: ExplainCell, at: Facts) -> _Details:
    cell = at.view.cells[decision.cell]
    return {"spares": at.spares[cell.region, cell.instance_type]}, {"machines_lacking": at.view.machines_lacking(cell)}


def _of_launch(decision: LaunchNodes, at: Facts) -> _Details:
    region = at.view.regions[decision.region]
    seen = {"spares": at.spares[decision.region, decision.instance_type]}
    return seen, {
        "launches_per_pass": at.settings.launches_per_pass,
        "warm_spares": region.spares.get(decision.instance_type, 0),
    }


def _of_rollout(decision: ChangeRollout, at: Facts) -> _Details:
    rollout = next((one for one in at.view.rollouts.values() if one.id == decision.rollout), None)
    seen: dict[str, Any] = {"failed_starts": len(decision.failed)}
    if decision.verdict is not None:
        seen |= {"finding": decision.verdict.finding, "evidence": decision.verdict.reason, **decision.verdict.numbers}
    if rollout is None:
        return seen, {}
    seen["in_state_s"] = (at.now - rollout.state_since).total_seconds()
    return seen, msgspec.structs.asdict(rollout.policy)


def _of_replacement(decision: ReplaceNode | RequestReplacement | CordonNode, at: Facts) -> _Details:
    node = at.view.nodes.get(decision.node)
    seen = {
        "signals": ", ".join(one.signature for one in at.view.faults.signals if one.node == decision.node),
        "replacements_open": len(at.view.faults.replacements),
        "pool_nodes": at.pool_sizes[_pool_of(node)] if node else 0,
    }
    faults = at.settings.faults
    return seen, {"replaced_share": faults.replaced_share, "frozen_above_share": faults.frozen_above_share}


def _of_repair(decision: TryRepair, at: Facts) -> _Details:
    attempts = Counter(one.rung.value for one in at.view.faults.attempts.get(decision.node, ()))
    return dict(attempts), {"attempts_allowed": at.settings.faults.attempts_allowed}


def _of_incident(decision: OpenIncident, at: Facts) -> _Details:
    return {name: value for name, value in decision.evidence.items() if isinstance(value, Value)}, {}


_DETAILS: Mapping[type[Decision], Callable[..., _Details]] = {
    MoveNode: _of_node,
    MoveCell: _of_cell_state,
    StartCell: _of_start,
    DrainCell: _of_drain,
    CreateCell: _of_creation,
    ExplainCell: _of_wait,
    LaunchNodes: _of_launch,
    ChangeRollout: _of_rollout,
    ReplaceNode: _of_replacement,
    RequestReplacement: _of_replacement,
    CordonNode: _of_replacement,
    TryRepair: _of_repair,
    OpenIncident: _of_incident,
}


# --- other choices ---------------------------------------------------------------------------------------------------


def alternatives(one: Round, decision: Decision) -> tuple[Alternative, ...]:
    """Spares that a start did not take, or cells that a drain did not take; at most `ALTERNATIVES_MOST`."""
    found: Iterator[Alternative] = iter(())
    if isinstance(decision, StartCell):
        found = _other_nodes(one.view, decision)
    elif isinstance(decision, DrainCell):
        found = _other_cells(one.view, decision)
    return tuple(islice(found, ALTERNATIVES_MOST))


def _other_nodes(view: FleetView, decision: StartCell) -> Iterator[Alternative]:
    cell = view.cells[decision.cell]
    spec = view.deployments[cell.deployment]
    version = spec.of(decision.version or cell.version, cell.instance_type)
    taken = [view.nodes[name] for name in decision.nodes]
    pool = [node for node in view.nodes.values() if _pool_of(node) == (cell.region, cell.instance_type)]
    free = [node for node in pool if node.id not in decision.nodes and view.cell_of(node.id) is None]
    for node in sorted(free, key=lambda one: (not is_idle(one), one.id)):
        yield Alternative(node.id, _why_not(node, taken, version.engine, spec.markets))


def _why_not(node: NodeView, taken: list[NodeView], engine: str, markets: Markets) -> str:
    if not is_idle(node):
        return _why_not_idle(node)
    if not may_use(markets, node.markets):
        return "it is of a market that the deployment does not use"
    if node.stack(engine) != taken[0].stack(engine):
        return f"its software differs from that of {taken[0].id}"
    paths = [one.topology for one in (node, *taken)]
    if not all(paths):
        return "its place in the network is unknown"
    depth = depth_of(paths)
    levels = distance(node.topology, taken[0].topology, depth)
    farthest = max(distance(one.topology, taken[0].topology, depth) for one in taken)
    if levels > farthest:
        return f"{levels} levels away from {taken[0].id}; the farthest node taken is {farthest} away"
    return "it is as near; nodes are taken from the group that leaves the fewest spares apart, then by name"


def _why_not_idle(node: NodeView) -> str:
    if node.state is not NodeState.READY:
        return f"it is {node.state}"
    if node.cordoned:
        return "it is cordoned"
    return f"its agent is {node.report.state if node.report.connected else 'not connected'}"


def _other_cells(view: FleetView, decision: DrainCell) -> Iterator[Alternative]:
    cell = view.cells[decision.cell]
    for other in view.cells.values():
        if other.id == cell.id or (other.deployment, other.region) != (cell.deployment, cell.region):
            continue
        if other.state is not CellState.READY:
            yield Alternative(other.id, f"it is {other.state}")
        elif other.version != cell.version:
            yield Alternative(other.id, f"it runs {other.version}")
        elif other.role is not cell.role:
            yield Alternative(other.id, f"its role is {other.role}")
        else:
            older = "older" if other.created_at < cell.created_at else "newer"
            yield Alternative(other.id, f"it is {older}; cells of one cause are drained in their order of age")


# --- the loop --------------------------------------------------------------------------------------------------------


def _explain(one: Round) -> Callable[[Any, str], Reason]:
    facts = Facts(one.view, one.settings, one.now)
    return lambda decision, planner: reason_of(decision, planner, facts)


def _change(one: Round, changes: Mapping[str, str]) -> Round:
    return replace(one, settings=settings_changed(one.settings, changes))


RECONCILER = RecordedLoop(
    name="reconciler",
    view=FleetView,
    settings=FleetSettings,
    decisions=get_args(Decision),
    planners=PLANNERS,
    explain=_explain,
    check=lambda changes: settings_changed(FleetSettings(), changes),
    change=_change,
    alternatives=alternatives,
    with_choices=WITH_CHOICES,
    setting_names=lambda: names_of_settings(FleetSettings),
    is_told=is_told,
)
