"""Small fleets of which something was announced, and what is planned for them."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

from fleet.planning.fault_views import NoticeView
from fleet.planning.faults.notices import plan_notices
from fleet.planning.snapshot import CellView, FleetView, NodeView
from fleet.planning.states import CellState, NoticeKind
from tests.fleet.planning.fleets import NOW, SETTINGS, ago, cell, fleet, member

SPOT = 120.0
DAYS = 2 * 86400.0


def notice(
    name: str, kind: NoticeKind = NoticeKind.INTERRUPTION, lead_s: float | None = SPOT, **changes: Any
) -> NoticeView:
    ends_at = None if lead_s is None else NOW + timedelta(seconds=lead_s)
    return replace(NoticeView(name, kind, ago(5), ends_at, "said so"), **changes)


def told(*parts: NodeView | CellView | NoticeView, faults: dict[str, Any] | None = None, **changes: Any) -> FleetView:
    """Two cells of two nodes of `llama` by default, `c1` on n and o; what its provider announced is among the parts."""
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
