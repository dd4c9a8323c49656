"""Why a cell has no place, what it holds meanwhile, and what is reserved for repairs."""

from dataclasses import replace
from typing import Any

import pytest

from fleet.placement.planning.planner import Placed, Placement, PlacementRequest, Refused
from fleet.reconcile.planning.snapshot import FleetView, NodeView, RegionView
from tests.fleet.fleets import KIND, fleet, member, node


def at(name: str, *topology: str, **changes: Any) -> NodeView:
    return node(name, topology=topology, **changes)


def order(count: int, name: str = "c1", **changes: Any) -> PlacementRequest:
    return replace(PlacementRequest(name, "llama", "east", KIND, count), **changes)


def refusal(view: FleetView, *orders: PlacementRequest) -> Refused:
    answer = Placement(view).place(orders)[orders[-1].cell]
    assert isinstance(answer, Refused)
    return answer


def keeping(kept: int, *spares: NodeView) -> FleetView:
    return replace(fleet(*spares), regions={"east": RegionView("east", {KIND: kept}, {KIND: kept})})


@pytest.mark.parametrize(
    ("within", "expected"),
    [
        (3, "needs 2 local.cpu under one network node; largest group has 1"),
        (2, "needs 2 local.cpu under one network node of level 2; largest group has 1"),
        (9, "needs 2 local.cpu under one network node; largest group has 1"),
    ],
)
def test_a_tight_cell_says_how_large_the_largest_group_is(within: int, expected: str) -> None:
    assert refusal(fleet(at("a", "s", "m", "r1"), at("b", "s", "n", "r2")), order(2, within=within)).reason == expected


def test_too_few_spares_are_counted() -> None:
    assert refusal(fleet(), order(2)).reason == "needs 2 local.cpu; 0 are spare"
    assert refusal(fleet(at("a", "s")), order(2)).reason == "needs 2 local.cpu; 1 is spare"


def test_spares_of_different_software_are_counted() -> None:
    spares = [at(name, "s", software={"driver": name}, fingerprint=name) for name in "ab"]
    expected = "needs 2 local.cpu with the same software; largest group has 1"
    assert refusal(fleet(*spares), order(2)).reason == expected


def test_a_repair_that_nobody_fits_says_beside_whom() -> None:
    stays = member("x", topology=("s", "r1"))
    request = order(1, staying=(stays,), within=2, is_repair=True)
    expected = "needs 1 local.cpu with the software of x under one network node; none of 1 spare fits"
    assert refusal(fleet(stays, at("a", "s", "r2")), request).reason == expected


def test_new_cells_leave_what_is_kept_for_repair() -> None:
    view = keeping(1, at("a", "s", "r1"), at("b", "s", "r1"))
    assert refusal(view, order(2)).reason == "needs 2 local.cpu; 2 are spare and 1 of them kept for repair"
    assert isinstance(Placement(view).place([order(1)])["c1"], Placed)


def test_a_repair_takes_what_is_kept_for_it() -> None:
    stays = member("x", topology=("s", "r1"))
    view = keeping(1, stays, at("a", "s", "r1"))
    answer = Placement(view).place([order(1, staying=(stays,), is_repair=True)])["c1"]
    assert isinstance(answer, Placed)


def test_what_waits_for_more_holds_what_it_can_use() -> None:
    view = fleet(at("a", "s", "r1"), at("b", "s", "r1"))
    assert refusal(view, order(3, "c1"), order(2, "c2")).reason == "needs 2 local.cpu; 0 are spare"


def test_a_tight_cell_that_waits_holds_its_largest_group_only() -> None:
    view = fleet(at("a", "s", "r1"), at("b", "s", "r1"), at("c", "s", "r2"))
    answers = Placement(view).place([order(3, "c1", within=2), order(1, "c2")])
    assert isinstance(answers["c2"], Placed)
    assert [n.id for n in answers["c2"].nodes] == ["c"]


def test_a_refusal_says_how_many_more_would_do_and_near_what() -> None:
    view = fleet(at("a", "s", "r1"), at("b", "s", "r2"), at("c", "s", "r2"))
    refused = refusal(view, order(3, within=2))
    assert (refused.short, refused.near) == (1, ("s", "r2"))


def test_a_repair_that_needs_two_holds_the_one_that_is_near() -> None:
    stays = member("x", topology=("s", "r1"))
    view = fleet(stays, at("a", "s", "r1"), at("b", "s", "r9"))
    refused = refusal(view, order(2, staying=(stays,), within=2, is_repair=True))
    assert (refused.short, refused.near) == (1, ("s", "r1"))
