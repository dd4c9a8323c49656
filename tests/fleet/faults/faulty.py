"""Faults and notices in small fleets for planner tests, on top of `fleets`."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from engine_agent.protocol.signatures import FaultSignature
from fleet.faults.planning.notices import plan_notices
from fleet.faults.planning.views import (
    FaultsView,
    IncidentView,
    NoticeView,
    ReplacementView,
    Rule,
    SignalView,
    StepWindow,
)
from fleet.reconcile.planning.snapshot import CellView, FleetView, NodeView
from fleet.reconcile.planning.states import CellState, NoticeKind
from tests.fleet.fleets import KIND, NOW, SETTINGS, ago, cell, fleet, member

HARD = FaultSignature.NEURON_HBM_UNCORRECTABLE
SOFT = FaultSignature.NVIDIA_XID
VAGUE = FaultSignature.NEURON_COLLECTIVES_HANG
WINDOW = 1000


def signal(node: str, signature: str = HARD, **changes: Any) -> SignalView:
    view = SignalView(node, signature, "it broke", KIND, first_at=ago(5), last_at=ago(5))
    return replace(view, **changes)


def incident(kind: str, subject: str, **changes: Any) -> IncidentView:
    view = IncidentView(id=7, kind=kind, subject=subject, opened_at=ago(100), seen_at=ago(1), node=subject)
    return replace(view, **changes)


def replacement(node: str, cell: str = "", **changes: Any) -> ReplacementView:
    view = ReplacementView(id=5, node=node, rule=Rule.HARD_SIGNATURE, region="east", instance_type=KIND, cell=cell)
    return replace(view, **changes)


def with_faults(view: FleetView, *signals: SignalView, **parts: Any) -> FleetView:
    return replace(view, faults=FaultsView(signals=signals, **parts))


def windows(cell: str, step_ms: Sequence[float], generation: int = 3, bucket: int = 3) -> tuple[StepWindow, ...]:
    """Recent windows of a rank: 100 steps each, at one batch size."""
    return tuple(
        StepWindow(WINDOW + place, cell, generation, {bucket: 100}, {bucket: 100 * ms})
        for place, ms in enumerate(step_ms)
    )


SPOT = 120.0
DAYS = 2 * 86400.0


def notice(
    name: str, kind: NoticeKind = NoticeKind.INTERRUPTION, lead_s: float | None = SPOT, **changes: Any
) -> NoticeView:
    ends_at = None if lead_s is None else NOW + timedelta(seconds=lead_s)
    return replace(NoticeView(name, kind, ago(5), ends_at, "said so"), **changes)


def told(*parts: NodeView | CellView | NoticeView, faults: dict[str, Any] | None = None, **changes: Any) -> FleetView:
    """Plans for two cells of two nodes of `llama` by default, `c1` on n and o. Notices are among the parts."""
    notices = tuple(part for part in parts if isinstance(part, NoticeView))
    others = [part for part in parts if not isinstance(part, NoticeView)]
    second = cell("c2", "p", "q", state_since=ago(300))
    view = fleet(*others, member("p", of="c2"), member("q", of="c2"), second, **{"wanted": 2} | changes)
    return replace(view, notices=notices, faults=replace(view.faults, **faults or {}))


def of_c1(*, cordoned: str = "n", state: CellState = CellState.READY) -> list[NodeView | CellView]:
    ranks = [member(name, cordoned=name in cordoned) for name in "no"]
    return [*ranks, cell("c1", "n", "o", state=state, state_since=ago(300))]


def planned(view: FleetView) -> list[Any]:
    return list(plan_notices(view, SETTINGS, NOW))
