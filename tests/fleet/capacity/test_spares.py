"""Machines that are warm before planned cells need them."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.capacity.planning.view import PlannedSpares, cells_there, planned_spares
from fleet.deployments.planner import ClaimView
from fleet.machines.planner import ProviderLimits
from fleet.reconcile.planning.decisions import LaunchNodes, RetireNode
from fleet.reconcile.planning.planner import plan_reconcile
from fleet.reconcile.planning.snapshot import CellView, DeploymentView, FleetView, NodeView, PlannedPlaceCells
from fleet.reconcile.planning.states import CellState
from tests.fleet.fleets import KIND, NOW, SETTINGS, ago, cell, fleet, member, node

SERVING = (member("a"), member("b"), cell("c1", "a", "b"))
GROUP = ("east", KIND)


def planned(*cells: int, deployment: str = "llama", start_up_s: float = 600.0, age_s: float = 0.0) -> PlannedPlaceCells:
    return PlannedPlaceCells(deployment, "east", NOW - timedelta(seconds=age_s), 900, cells, start_up_s)


def booting(*parts: NodeView | CellView, boot_s: float = 300.0, **changes: Any) -> FleetView:
    """A region whose machines boot for five minutes."""
    view = fleet(*(parts or SERVING), **changes)
    limits = ProviderLimits(boot_s=boot_s, join_timeout_s=900.0)
    return replace(view, regions={"east": replace(view.regions["east"], limits=limits)})


def counts(view: FleetView, *places: PlannedPlaceCells) -> dict[tuple[str, str], int]:
    return {
        group: spares.count
        for group, spares in planned_spares(replace(view, planned=places), cells_there(view), NOW).items()
    }


@pytest.mark.parametrize(
    ("cells", "age_s", "machines"),
    [
        ((1, 1, 1, 1, 9), 0, 0),  # 30 minutes: an order, a boot, a start and a slot
        ((1, 1, 3, 1, 1), 0, 4),
        ((1, 4, 3, 1, 1), 0, 6),
        ((1, 1, 1, 3, 1), 0, 0),
        ((1, 1, 1, 3, 1), 900, 4),
        ((9, 1, 1, 1, 1), 900, 0),  # that slot is over
        ((1, 1, 5), 2699, 8),
        ((1, 1, 1, 1, 3), 2700, 0),  # too old
        ((1, 1, 3), -1, 0),
    ],
)
def test_the_most_until_what_is_ordered_now_has_booted_and_served_for_a_slot(
    cells: tuple[int, ...], age_s: float, machines: int
) -> None:
    assert counts(booting(), planned(*cells, age_s=age_s)) == ({GROUP: machines} if machines else {})


def test_what_another_deployment_needs_less_is_counted_off() -> None:
    view = booting()
    other = DeploymentView("qwen", KIND, 1, {"east": 4})
    cells = {f"q{number}": cell(f"q{number}", deployment="qwen") for number in range(4)}
    view = replace(view, deployments={**view.deployments, "qwen": other}, cells={**view.cells, **cells})
    view = replace(view, planned=(planned(1, 4, 4), planned(4, 1, 3, deployment="qwen")))
    found = planned_spares(view, cells_there(view), NOW)
    assert found == {
        GROUP: PlannedSpares(
            5, "from 12:30 UTC on its cells need 5 machines more (+6 of llama, -1 of qwen)", (2, 2, 2)
        )
    }  # fmt: skip


def test_who_has_fewer_than_it_wants_for_want_of_machines_gets_none_ahead() -> None:
    view = booting()
    claim = ClaimView(3, 1, granted=1, granted_at=NOW)
    short = replace(view.deployments["llama"], claims={"east": claim})
    assert counts(replace(view, deployments={"llama": short}), planned(1, 9, 9)) == {}


def test_what_is_gone_meanwhile_counts_for_nothing() -> None:
    view = booting()
    elsewhere = replace(planned(1, 9, 9), region="west")
    assert counts(view, planned(1, 9, 9, deployment="gone"), elsewhere) == {}


def decisions(view: FleetView, *places: PlannedPlaceCells) -> list[tuple[str, str]]:
    found = plan_reconcile(replace(view, planned=places), SETTINGS, NOW)
    return [
        (f"+{one.count}" if isinstance(one, LaunchNodes) else f"-{one.node}", one.reason)
        for one in found
        if isinstance(one, LaunchNodes | RetireNode)
    ]


def test_they_are_launched_with_the_reason_of_the_plan() -> None:
    ((what, reason),) = decisions(booting(), planned(1, 1, 3))
    assert what == "+4"
    assert reason == (
        "0 needed in cells and 4 warm, 0 spare and 0 on their way; by the day plan, 4 of them: from 12:30 UTC "
        "on its cells need 4 machines more (+4 of llama); 2 together for a cell"
    )


def test_no_pass_launches_more_than_its_limit() -> None:
    assert [what for what, _ in decisions(booting(), planned(1, 1, 90))] == [f"+{SETTINGS.launches_per_pass}"]


def test_they_stand_in_for_spares_that_new_cells_may_take() -> None:
    view = booting(warm=3)
    region = view.regions["east"]
    assert [what for what, _ in decisions(view, planned(1, 1, 3))] == ["+4"]
    assert [what for what, _ in decisions(view, planned(1, 1, 2))] == ["+3"]
    kept = replace(view, regions={"east": replace(region, repair_only={KIND: 3})})
    assert [what for what, _ in decisions(kept, planned(1, 1, 3))] == ["+3", "+4"]


def test_machines_of_a_cell_that_is_wanted_and_not_made_yet_are_not_given_back() -> None:
    since = ago(10_000)
    view = booting(*SERVING, node("x", spare_since=since), node("y", spare_since=since), wanted=2)
    assert decisions(view, planned(2, 2, 2)) == []
    leaving = replace(view, cells={"c1": cell("c1", "a", "b", state=CellState.DRAINING)})
    assert counts(leaving, planned(2, 2, 2)) == {GROUP: 4}


def test_a_spare_that_a_cell_needs_soon_is_not_given_back() -> None:
    since = ago(10_000)
    view = booting(*SERVING, node("x", spare_since=since), node("y", spare_since=since))
    assert [what for what, _ in decisions(view)] == ["-x", "-y"]
    assert decisions(view, planned(1, 1, 2)) == []


def test_a_region_with_machines_of_its_own_launches_none_for_it() -> None:
    view = booting()
    own = replace(view, regions={"east": replace(view.regions["east"], free={KIND: 0})})
    assert decisions(own, planned(1, 1, 3)) == []


@given(
    st.lists(st.lists(st.integers(0, 30), max_size=8), max_size=4),
    st.integers(0, 12),
    st.integers(1, 4),
    st.floats(-3600, 7200),
    st.floats(0, 1800),
)
def test_never_more_than_the_plan_has_beyond_what_is_wanted(
    rows: list[list[int]], wanted: int, nodes: int, age_s: float, start_up_s: float
) -> None:
    names = [f"d{number}" for number in range(len(rows))]
    view = booting(node("x"), wanted=wanted, nodes_per_cell=nodes)
    specs = {name: replace(view.deployments["llama"], name=name) for name in names}
    places = tuple(
        planned(*row, deployment=name, age_s=age_s, start_up_s=start_up_s)
        for name, row in zip(names, rows, strict=True)
    )
    found = planned_spares(replace(view, deployments=specs, planned=places), {}, NOW)
    most = sum(nodes * max([wanted, *row]) for row in rows)
    assert all(0 < spares.count <= most for spares in found.values())
    assert set(found) <= {GROUP}
