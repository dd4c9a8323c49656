"""The reconciler rests only while nothing is in doubt or on its way."""

from dataclasses import replace
from typing import Any

import pytest

from fleet.faults.planning.views import FaultsView
from fleet.nodes.planner import Listeners, ListenerView
from fleet.reconcile.planning.planner import PLANNERS
from fleet.reconcile.planning.rest import REST_S, rest_s
from fleet.reconcile.planning.snapshot import FleetView
from fleet.reconcile.planning.states import CellState, NodeState, ProviderAction
from tests.fleet.fleets import NOW, SETTINGS, ago, cell, fleet, member, node

WELL = ListenerView(ago(3600), ago(-4))


def calm(*extra: Any, cell_state: CellState = CellState.READY, **changes: Any) -> FleetView:
    """A cell of two nodes, and a node `n` without a cell, with changes."""
    own = {"listener": "a", **changes.pop("report", {})}
    others = (member(name, report={"listener": "a"}) for name in "lf")
    view = fleet(*others, node("n", report=own, **changes), cell("c1", "l", "f", state=cell_state), *extra, warm=1)
    return replace(view, listeners=Listeners({"a": WELL, "long gone": ListenerView(None, ago(60))}))


def test_a_fleet_in_which_no_planner_decides_anything_rests() -> None:
    assert [planner(calm(), SETTINGS, NOW) for planner in PLANNERS] == [()] * len(PLANNERS)
    assert rest_s(calm(), NOW) == REST_S
    assert rest_s(calm(node("old", state=NodeState.RETIRED)), NOW) == REST_S


@pytest.mark.parametrize(
    "changes",
    [
        *({"state": state} for state in NodeState if state not in (NodeState.READY, NodeState.RETIRED)),
        {"ordered": ProviderAction.RESTART_AGENT},
        {"report": {"connected": False}},
        {"report": {"quiet": True}},
        {"report": {"unhealthy_since": ago(1)}},
        {"report": {"listener": "long gone"}},
        {"report": {"listener": "unknown"}},
    ],
)
def test_a_node_in_doubt_or_on_its_way_is_watched(changes: dict[str, Any]) -> None:
    assert rest_s(calm(**changes), NOW) == 0.0


SILENT: dict[str, Any] = {"report": {"connected": False, "listener": "long gone"}}


def test_while_no_web_process_keeps_up_silence_needs_no_pass_each_second() -> None:
    """Its limits begin when one does, and are longer than a rest."""
    assert rest_s(replace(calm(**SILENT), listening_since=None), NOW) == REST_S < SETTINGS.suspect_after_s
    for changes in ({"state": NodeState.SUSPECT}, {"report": {"unhealthy_since": ago(1)}}):
        assert rest_s(replace(calm(**{**SILENT, **changes}), listening_since=None), NOW) == 0.0
    assert rest_s(replace(calm(cell_state=CellState.STARTING), listening_since=None), NOW) == 0.0


@pytest.mark.parametrize("state", [state for state in CellState if state is not CellState.READY])
def test_a_cell_on_its_way_is_watched(state: CellState) -> None:
    assert rest_s(calm(cell_state=state), NOW) == 0.0


@pytest.mark.parametrize(
    "changes",
    [
        {"listeners": Listeners({"a": ListenerView(None, ago(-4))})},
        {"listeners": Listeners({"a": ListenerView(ago(3600), ago(1))})},
        {"faults": FaultsView(down={"c1": "i-1"})},
        {"rollouts": {"llama": object()}},
        {"notices": (object(),)},
    ],
)
def test_everything_with_a_deadline_of_seconds_is_watched(changes: dict[str, Any]) -> None:
    assert rest_s(replace(calm(), **changes), NOW) == 0.0
