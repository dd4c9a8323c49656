"""A notice about a node of a cell that serves alone: a successor starts first where possible."""

from dataclasses import replace
from typing import Any

import pytest

from fleet.deployments.planner import UpdatePolicy
from fleet.faults.planning.announced import Notices
from fleet.faults.planning.views import NoticeView
from fleet.reconcile.planning.decisions import (
    CreateCell,
    DrainCell,
    LaunchNodes,
    MoveCell,
    RequestReplacement,
    StopCell,
)
from fleet.reconcile.planning.planner import plan_reconcile
from fleet.reconcile.planning.snapshot import CellView, FleetView, NodeView
from fleet.reconcile.planning.states import CellState, NoticeKind
from tests.fleet.faults.faulty import DAYS, SPOT, notice, of_c1, planned, told
from tests.fleet.fleets import NOW, SETTINGS, ago, cell, fleet, member, node


def lone(*parts: NodeView | CellView | NoticeView, **changes: Any) -> FleetView:
    """One cell of two nodes, c1 on n and o. Node n ends, and no other cell serves."""
    notices = tuple(part for part in parts if isinstance(part, NoticeView))
    others = [part for part in parts if not isinstance(part, NoticeView)]
    return replace(fleet(*of_c1(), *others, **changes), notices=notices)


def drains_of(view: FleetView) -> list[tuple[str, bool]]:
    return [(one.cell, one.forced) for one in plan_reconcile(view, SETTINGS, NOW) if isinstance(one, DrainCell)]


def succeeding(state: CellState, for_s: float = 60.0) -> list[NodeView | CellView]:
    return [member("s", of="c2"), member("t", of="c2"), cell("c2", "s", "t", state=state, state_since=ago(for_s))]


def test_of_a_lone_cell_another_whole_one_comes_first_where_spares_make_one() -> None:
    view = lone(notice("n"), node("s"), node("t"))
    assert planned(view) == []
    created = plan_reconcile(view, SETTINGS, NOW)
    assert [one.reason for one in created if isinstance(one, CreateCell)] == [
        "1 cells wanted, 0 exist, and 1 whose machines end"
    ]
    assert not drains_of(view)


def test_its_successor_keeps_its_place_once_the_spares_are_taken() -> None:
    for state in (CellState.PENDING, CellState.STARTING):
        view = lone(notice("n"), *succeeding(state))
        assert planned(view) == []
        decided = plan_reconcile(view, SETTINGS, NOW)
        assert not [one for one in decided if isinstance(one, (CreateCell, DrainCell, StopCell, MoveCell))]


@pytest.mark.parametrize(
    ("left_s", "state", "for_s", "drains"),
    [
        (100.0, CellState.READY, 60.0, True),
        (101.0, CellState.READY, 59.0, False),
        (119.0, CellState.READY, 60.0, True),
        (100.0, CellState.READY, 4.0, False),
        (100.0, CellState.READY, 5.0, True),
        (41.0, CellState.STARTING, 60.0, False),
        (40.0, CellState.STARTING, 60.0, True),
        (100.0, CellState.FAILED, 60.0, True),
        (101.0, CellState.FAILED, 60.0, False),
    ],
)
def test_a_lone_cell_drains_when_its_successor_serves_or_when_it_can_wait_no_longer(
    left_s: float, state: CellState, for_s: float, drains: bool
) -> None:
    """The ledger counts a cell after 60 s. A drain must begin 100 s before the end, the shortest one 40 s before."""
    view = lone(notice("n", lead_s=left_s), *succeeding(state, for_s))
    is_leave_given = state is CellState.READY and for_s >= 60.0
    assert drains_of(view) == ([("c1", not is_leave_given)] if drains else [])


def test_a_lone_cell_is_repaired_in_place_once_it_must_where_spares_make_no_other() -> None:
    assert planned(lone(notice("n", lead_s=101.0), node("s"))) == []
    view = lone(notice("n", lead_s=99.0), node("s"))
    assert [type(one) for one in planned(view)] == [RequestReplacement]
    assert not [one for one in plan_reconcile(view, SETTINGS, NOW) if isinstance(one, CreateCell)]


def test_a_lone_cell_without_a_spare_serves_until_one_comes_or_it_can_wait_no_longer() -> None:
    for lead_s, spares, goes in ((99.0, [], False), (41.0, [], False), (40.0, [], True), (99.0, [node("s")], True)):
        assert len(planned(lone(notice("n", lead_s=lead_s), *spares))) == goes, lead_s


def test_with_days_to_go_machines_for_another_whole_cell_are_bought_one_by_one() -> None:
    (bought,) = plan_reconcile(lone(notice("n", NoticeKind.RETIREMENT, DAYS)), SETTINGS, NOW)
    assert isinstance(bought, LaunchNodes)
    assert (bought.count, bought.near, bought.unit) == (2, ("spine", "rack-1"), 1)
    (one,) = plan_reconcile(lone(notice("n", lead_s=SPOT)), SETTINGS, NOW)
    assert isinstance(one, LaunchNodes)
    assert one.count == 1, "of two minutes' notice nothing that is bought now comes in time"


@pytest.mark.parametrize("max_unavailable", [0, 1])
def test_nothing_may_be_down_is_as_good_as_alone(max_unavailable: int) -> None:
    view = told(*of_c1(), notice("n"), node("s"), node("t"))
    policy = UpdatePolicy(max_unavailable=max_unavailable)
    view = replace(view, deployments={"llama": replace(view.deployments["llama"], policy=policy)})
    created = [one for one in plan_reconcile(view, SETTINGS, NOW) if isinstance(one, CreateCell)]
    assert len(created) == 1 - max_unavailable
    assert len(planned(view)) == max_unavailable


def test_of_two_such_cells_only_one_has_a_successor_where_spares_make_one() -> None:
    view = told(*of_c1(), notice("n"), notice("p", lead_s=130.0), node("s"), node("t"))
    view = replace(
        view, deployments={"llama": replace(view.deployments["llama"], policy=UpdatePolicy(max_unavailable=0))}
    )
    assert Notices(view, SETTINGS, NOW).going == {"c1"}
    third = [member("s", of="c3"), member("t", of="c3"), cell("c3", "s", "t", state=CellState.STARTING)]
    later = replace(
        view,
        nodes={**view.nodes, **{one.id: one for one in third if isinstance(one, NodeView)}},
        cells={**view.cells, **{one.id: one for one in third if isinstance(one, CellView)}},
    )
    assert Notices(later, SETTINGS, NOW).going == {"c1"}
