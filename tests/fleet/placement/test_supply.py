"""Machines to buy, near what, and when no more are bought."""

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from fleet.reconcile.planning.decisions import LaunchNodes, RetireNode
from fleet.reconcile.planning.planner import plan_reconcile
from fleet.reconcile.planning.snapshot import CellView, FleetView, NodeView
from fleet.reconcile.planning.states import CellState, NodeState, ProviderAction
from tests.fleet.fleets import NOW, SETTINGS, ago, cell, fleet, member, node
from traffic.routing.planning.ingresses import IngressMachine, NewIngress, RemoveIngress, plan_ingress_machines

PENDING = cell("c1", state=CellState.PENDING, generation=0)


def at(name: str, *topology: str, **changes: Any) -> NodeView:
    return node(name, topology=topology, **changes)


def tight(*parts: NodeView | CellView, within: int = 2, wanted: int = 1) -> FleetView:
    view = fleet(*parts, wanted=wanted)
    return replace(view, deployments={"llama": replace(view.deployments["llama"], within=within)})


def bought(view: FleetView) -> list[tuple[int, int]]:
    """Numbers of machines, and how many of them together."""
    return [(d.count, d.unit) for d in plan_reconcile(view, SETTINGS, NOW) if isinstance(d, LaunchNodes)]


def pending(count: int) -> list[CellView]:
    return [replace(PENDING, id=f"c{number}") for number in range(count)]


def ordered(name: str, age_s: float = 60, unit: str = "", **changes: Any) -> NodeView:
    report = {"connected": False, "last_seen_at": None}
    known = node(name, state=NodeState.JOINING, state_since=ago(age_s), report=report, **changes)
    return replace(known, ordered=ProviderAction.LAUNCH, unit=unit)


def retired(view: FleetView) -> list[str]:
    return sorted(d.node for d in plan_reconcile(view, SETTINGS, NOW) if isinstance(d, RetireNode))


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


def test_the_machines_of_a_whole_cell_are_launched_together_and_the_warm_one_alone() -> None:
    assert bought(fleet(*pending(2), wanted=2, warm=1)) == [(1, 1), (4, 2)]


def test_a_cell_that_a_spare_is_held_for_gets_a_unit_if_as_many_are_lacking_and_single_ones_if_not() -> None:
    assert bought(fleet(node("a"), PENDING, warm=1)) == [(2, 2)]
    assert bought(fleet(node("a"), PENDING)) == [(1, 1)]


def test_a_bound_of_a_pass_splits_no_cell_and_leaves_no_large_one_out() -> None:
    assert bought(fleet(*pending(2), wanted=2, nodes_per_cell=5)) == [(5, 5)]
    assert bought(fleet(*pending(2), wanted=2, nodes_per_cell=12)) == [(12, 12)]


def test_growth_keeps_no_repair_waiting() -> None:
    broken = cell("b", "x", "y", state=CellState.LOST)
    parts: list[NodeView | CellView] = [
        member("x", "b", topology=("s", "r7")),
        member("y", "b", state=NodeState.LOST),
        broken,
    ]
    view = fleet(*parts, *pending(9), wanted=10)
    assert launches(view)[0] == (("s", "r7"), 1)
    assert bought(view) == [(1, 1), (6, 2)]


def test_what_a_repair_lacks_nearby_is_no_part_of_a_unit() -> None:
    broken = cell("b", "x", "y", state=CellState.LOST)
    parts: list[NodeView | CellView] = [
        member("x", "b", topology=("s", "r7")),
        member("y", "b", state=NodeState.LOST),
        broken,
    ]
    view = tight(*parts, at("a", "s", "r1"), PENDING, wanted=2)
    assert launches(view) == [(("s", "r1"), 1), (("s", "r7"), 1)]


@given(st.integers(1, 3), st.integers(1, 10), st.integers(0, 6), st.integers(0, 6), st.integers(0, 3))
def test_pass_by_pass_as_much_is_bought_as_is_needed_and_of_a_unit_all_or_none(
    cells: int, size: int, spares: int, coming: int, warm: int
) -> None:
    nodes = [node(f"s{number}") for number in range(spares)] + [ordered(f"o{n}", age_s=1) for n in range(coming)]
    for _ in range(cells * size + warm + 1):
        sold = bought(fleet(*nodes, *pending(cells), wanted=cells, nodes_per_cell=size, warm=warm))
        assert all(unit in {1, size} and count % unit == 0 for count, unit in sold)
        assert sum(count for count, _ in sold) <= max(SETTINGS.launches_per_pass, size)
        if not sold:
            break
        nodes += [ordered(f"b{len(nodes) + n}", age_s=1) for n in range(sum(count for count, _ in sold))]
    # Spares that suffice for a cell are in it and remain needed.
    assert len(nodes) == max(cells * size + warm, spares + coming)


def test_an_order_that_nobody_needs_any_more_is_taken_back_after_a_while() -> None:
    assert retired(fleet(ordered("a", 60), ordered("b", 9), ordered("c", 30), wanted=0, warm=0)) == ["a", "c"]
    assert retired(fleet(ordered("a", 60), ordered("b", 9), ordered("c", 30), wanted=0, warm=2)) == ["c"]
    launched = replace(ordered("a"), ordered=None)
    assert retired(fleet(launched, wanted=0)) == [], "what boots is a spare first"


def test_of_a_unit_that_waits_all_are_taken_back_or_none() -> None:
    unit = [ordered(name, unit="u-1") for name in ("a", "b", "c")]
    assert retired(fleet(*unit, wanted=0, warm=1)) == []
    assert retired(fleet(*unit, ordered("d", 90), wanted=0, warm=1)) == ["a", "b", "c"]


def test_an_order_is_kept_for_the_cell_that_no_idle_spare_fits() -> None:
    strangers = [at(f"x{index}", "s", f"r{index + 2}") for index in range(SETTINGS.misfits_kept)]
    awaited = ordered("c", topology=("s", "r1"))
    assert retired(tight(at("a", "s", "r1"), *strangers, awaited, PENDING)) == []


ZONES = ("a", "b", "c")
there = st.lists(st.builds(IngressMachine, id=st.uuids().map(str), zone=st.sampled_from(ZONES), gone=st.booleans()))


def test_an_empty_region_gets_one_a_zone_and_two_at_least() -> None:
    assert [each.zone for each in plan_ingress_machines(ZONES, ()) if isinstance(each, NewIngress)] == ["a", "b", "c"]
    assert [each.zone for each in plan_ingress_machines(["a"], ()) if isinstance(each, NewIngress)] == ["a", "a"]


def test_one_that_is_gone_is_replaced_in_its_zone() -> None:
    plan = plan_ingress_machines(["a", "b"], [IngressMachine("i-1", "a", gone=True), IngressMachine("i-2", "b")])
    assert plan == (RemoveIngress("i-1", "its machine is gone"), NewIngress("a", "zone a has no ingress"))


@given(st.sets(st.sampled_from(ZONES), min_size=1), there)
def test_what_runs_stays_and_then_nothing_lacks(zones: set[str], machines: list[IngressMachine]) -> None:
    plan = plan_ingress_machines(zones, machines)
    ended = {each.id for each in plan if isinstance(each, RemoveIngress)}
    assert ended == {each.id for each in machines if each.gone}
    new = [IngressMachine(str(n), each.zone) for n, each in enumerate(plan) if isinstance(each, NewIngress)]
    kept = [each for each in machines if not each.gone] + new
    assert {each.zone for each in kept} >= zones
    assert len(kept) >= 2
    assert plan_ingress_machines(zones, kept) == ()


def test_a_region_without_zones_gets_none() -> None:
    assert plan_ingress_machines((), ()) == ()
