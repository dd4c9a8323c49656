"""Small fleets for planner tests, said in a few words."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from engine_agent.protocol.states import EngineState
from fleet.reconcile.planning.settings import FleetSettings
from fleet.reconcile.planning.snapshot import (
    CellView,
    DeploymentView,
    FleetView,
    MemberView,
    NodeView,
    RegionView,
    ReportView,
)
from fleet.reconcile.planning.states import CellState, NodeState

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
SETTINGS = FleetSettings()
KIND = "local.cpu"


def ago(seconds: float) -> datetime:
    return NOW - timedelta(seconds=seconds)


LISTENING = ago(600)


def node(name: str, *, state: NodeState = NodeState.READY, **changes: Any) -> NodeView:
    """A connected idle node in `east` that reported just now; `report=` fields are given as a dict."""
    report: dict[str, Any] = {"connected": True, "last_seen_at": ago(0.5), "connection_changed_at": ago(600)}
    report |= changes.pop("report", {})
    view = NodeView(
        id=name,
        region="east",
        instance_type=KIND,
        state=state,
        created_at=ago(600),
        state_since=ago(600),
        report=ReportView(**report),
        topology=("spine", "rack-1"),
        spare_since=ago(100),
    )
    return replace(view, **changes)


def cell(name: str, *members: str, state: CellState = CellState.READY, **changes: Any) -> CellView:
    view = CellView(
        id=name,
        deployment="llama",
        region="east",
        instance_type=KIND,
        state=state,
        generation=3,
        created_at=ago(500),
        state_since=ago(60),
        members=tuple(MemberView(node, rank) for rank, node in enumerate(members)),
    )
    return replace(view, **changes)


def member(name: str, of: str = "c1", generation: int = 3, **changes: Any) -> NodeView:
    """A node whose agent reports a ready engine of cell `of`."""
    report = {"state": EngineState.READY, "cell": of, "generation": generation} | changes.pop("report", {})
    return node(name, report=report, spare_since=None, **changes)


def fleet(
    *parts: NodeView | CellView,
    wanted: int = 1,
    nodes_per_cell: int = 2,
    warm: int = 0,
    listening_since: datetime | None = LISTENING,
) -> FleetView:
    """A fleet with one region `east` and one deployment `llama`."""
    return FleetView(
        regions={"east": RegionView("east", {KIND: warm})},
        nodes={part.id: part for part in parts if isinstance(part, NodeView)},
        cells={part.id: part for part in parts if isinstance(part, CellView)},
        deployments={"llama": DeploymentView("llama", KIND, nodes_per_cell, {"east": wanted})},
        listening_since=listening_since,
    )
