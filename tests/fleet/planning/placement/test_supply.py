"""Which machines are bought, near what, and when no more are bought in hope."""

from dataclasses import replace
from typing import Any

from fleet.planning.decisions import LaunchNodes
from fleet.planning.reconcile.planner import plan_reconcile
from fleet.planning.snapshot import CellView, FleetView, NodeView
from fleet.planning.states import CellState, NodeState
from tests.fleet.planning.fleets import NOW, SETTINGS, cell, fleet, member, node

PENDING = cell("c1", state=CellState.PENDING, generation=0)


def at(name: str, *topology: str, **changes: Any) -> NodeView:
    return node(name, topology=topology, **changes)


def tight(*parts: NodeView | CellView, within: int = 2) -> FleetView:
    view = fleet(*parts)
    return replace(view, deployments={"llama": replace(view.deployments["llama"], within=within)})


def launches(view: FleetView) -> list[tuple[tuple[str, ...], int]]:
    return [(d.near, d.count) for d in plan_reconcile(view, SETTINGS, NOW) if isinstance(d, LaunchNodes)]


def test_a_tight_cell_gets_a_machine_near_its_largest_group_though_there_are_spares() -> None:
    assert launches(tight(at("a", "s", "r1"), at("b", "s", "r2"), PENDING)) == [(("s", "r1"), 1)]


def test_a_machine_on_its_way_is_not_bought_twice() -> None:
    coming = at("c", "s", "r1", state=NodeState.JOINING, report={"connected": False})
    assert launches(tight(at("a", "s", "r1"), at("b", "s", "r2"), coming, PENDING)) == []


def test_no_more_are_bought_once_enough_came_where_they_fit_no_cell() -> None:
    strangers = [at(f"x{index}", "s", f"r{index + 2}") for index in range(SETTINGS.misfits_kept)]
    assert launches(tight(at("a", "s", "r1"), *strangers[:-1], PENDING)) == [(("s", "r1"), 1)]
    assert launches(tight(at("a", "s", "r1"), *strangers, PENDING)) == []


def test_a_repair_without_a_spare_gets_a_machine_near_the_leader_and_the_warm_one_may_be_anywhere() -> None:
    broken = cell("c1", "a", "b", state=CellState.LOST)
    view = fleet(member("a", topology=("s", "r7")), member("b", state=NodeState.LOST), broken, warm=1)
    assert launches(view) == [((), 1), (("s", "r7"), 1)]


def test_a_suspect_spare_is_not_replaced_by_a_warm_one_but_by_one_that_a_cell_needs() -> None:
    silent = node("a", state=NodeState.SUSPECT)
    spare = node("b")
    assert launches(fleet(silent, wanted=0, warm=1)) == []
    assert [count for _, count in launches(fleet(silent, spare, PENDING, warm=0))] == [1]
